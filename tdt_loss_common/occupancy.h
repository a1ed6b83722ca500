// The occupancy of the arcs that leave a node, eq. 7: the one piece of arithmetic between the lattice and the gradient.
#pragma once

#include "backend.h"

namespace tdt {

template <typename Acc>
struct ArcPair {
  Acc blank, label;
};

TDT_HD float exp_of_sum(float, double x) { return expf(static_cast<float>(x)); }
TDT_HD double exp_of_sum(double, double x) { return exp(x); }

// A node of a lattice that the forward has run. Only nodes of samples with a finite LL have occupancies.
template <typename Acc>
struct OccupiedNode {
  const Batch& batch;
  const Extent& extent;
  Node at;
  const Arcs& arcs;
  const Acc* record;   // the node's log-probabilities
  double from;         // alpha(t, u) - LL
  const double* beta;  // (B, T, U1)

  // eq. 7 of arc pair i.
  TDT_HD ArcPair<Acc> arc(int i) const {
    ArcPair<Acc> occ{0, 0};
    const int64_t t_to = static_cast<int64_t>(at.t) + arcs.d[i];
    const bool lands = t_to < extent.T;
    const bool exits = t_to == extent.T && at.u == extent.U;  // the final blank, beta = 1
    const Acc dur_lp = arcs.dur_lp(record, i);
    if (arcs.has_blank(i) && (lands || exits)) {
      const double beta_to = lands ? beta[batch.node(at.b, static_cast<int>(t_to), at.u)] : 0.0;
      occ.blank = exp_of_sum(Acc(0), from + record[kBlankLp] + dur_lp + beta_to);
    }
    if (arcs.has_label(i) && at.u < extent.U && lands) {
      const double beta_to = beta[batch.node(at.b, static_cast<int>(t_to), at.u + 1)];
      occ.label = exp_of_sum(Acc(0), from + record[kLabelLp] + dur_lp + beta_to);
    }
    return occ;
  }
};

template <typename Acc>
TDT_HD OccupiedNode<Acc> occupied_node(const Batch& batch, const Extent& extent, const Node& at, const Arcs& arcs,
                                       const Saved<Acc>& saved, int lattice) {
  const int64_t node = batch.node(at.b, at.t, at.u);
  const double ll = saved.ll[static_cast<int64_t>(lattice) * batch.B + at.b];
  return {batch,
          extent,
          at,
          arcs,
          saved.node_lp + node * record_size(batch.D),
          saved.alpha(batch, lattice)[node] - ll,
          saved.beta(batch, lattice)};
}

// What the log-likelihoods of a sample's lattices say about its gradient.
struct SampleState {
  bool lives;  // every lattice that counts has an alignment, and the sample is well formed
  bool nan;    // a logit was NaN or +inf

  // ll (lattices, B)
  TDT_HD static SampleState of(const double* ll, int B, int b, int lattices, const bool* counts) {
    SampleState state{true, false};
    for (int l = 0; l < lattices; ++l) {
      if (!counts[l]) continue;
      const double here = ll[static_cast<int64_t>(l) * B + b];
      state.lives = state.lives && here > -INFINITY && here < INFINITY;
      state.nan = state.nan || here != here;
    }
    return state;
  }
};

// The sums of a node over arcs and lattices; G_tdt: that of the first lattice alone. NaN at the valid nodes of a sample
// with NaN.
template <typename Acc>
TDT_HD NodeSums<Acc> node_sums(const Batch& batch, const Extent& extent, const Node& at, const Saved<Acc>& saved,
                               const Shaping<Acc>& shaping, Acc* G_tdt) {
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u);
  NodeSums<Acc> G{0, 0};
  *G_tdt = 0;
  if (!valid || !sample.lives) {  // padding, no alignment, or a malformed sample
    if (valid && sample.nan) G.blank = *G_tdt = static_cast<Acc>(NAN);
    return G;
  }
  for (int l = 0; l < shaping.lattices; ++l) {
    if (!shaping.counts[l]) continue;
    const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[l], saved, l);
    for (int i = 0; i < shaping.arcs[l].n; ++i) {
      const ArcPair<Acc> occ = occupied.arc(i);
      G.blank += shaping.blank_share[l] * occ.blank;
      G.label += shaping.label_share[l] * occ.label;
    }
    if (l == 0) *G_tdt = G.blank + G.label;
  }
  return G;
}

// The sums of a node, and the gradient of its duration logits into `grad_z`: everything of the gradient but eq. 8.
template <typename S, typename Acc>
TDT_HD NodeSums<Acc> node_gradient(const Batch& batch, const Node& at, const Saved<Acc>& saved, Acc scale,
                                   const Shaping<Acc>& shaping, S* grad_z) {
  const Extent extent = batch.extent(at.b);
  Acc G_tdt;
  const NodeSums<Acc> G = node_sums(batch, extent, at, saved, shaping, &G_tdt);
  if (G_tdt == 0) {
    for (int i = 0; i < batch.D; ++i) grad_z[i] = static_cast<S>(Acc(0));
    return G;
  }
  const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0);
  const Acc limit = shaping.limit(scale);
  for (int i = 0; i < batch.D; ++i) {
    const ArcPair<Acc> occ = occupied.arc(i);
    const Acc G_i = shaping.blank_share[0] * occ.blank + shaping.label_share[0] * occ.label;
    const Acc value = (exp_of_sum(Acc(0), occupied.record[kDurLp + i]) * G_tdt - G_i) * scale;  // eq. 9
    grad_z[i] = static_cast<S>(value > limit ? limit : value < -limit ? -limit : value);
  }
  return G;
}

}  // namespace tdt
