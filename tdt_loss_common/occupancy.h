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

  // ll (lattices, B); a lattice of share 0 does not count
  template <typename Acc>
  TDT_HD static SampleState of(const double* ll, int B, int b, int lattices, const Acc* share) {
    SampleState state{true, false};
    for (int l = 0; l < lattices; ++l) {
      if (share[l] == 0) continue;
      const double here = ll[static_cast<int64_t>(l) * B + b];
      state.lives = state.lives && here > -INFINITY && here < INFINITY;
      state.nan = state.nan || here != here;
    }
    return state;
  }
};

// G of a node: the sum of its occupancies over arcs and lattices, as the gradient takes them. 0 where the node has
// none, NaN at the valid nodes of a sample with NaN.
template <typename Acc>
TDT_HD Acc node_occupancy(const Batch& batch, const Saved<Acc>& saved, const Shaping<Acc>& shaping, int64_t node) {
  const Node at = batch.node_at(node);
  const Extent extent = batch.extent(at.b);
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.blank_share);
  if (!extent.has(at.t, at.u)) return Acc(0);
  if (!sample.lives) return sample.nan ? static_cast<Acc>(NAN) : Acc(0);
  Acc G = 0;
  for (int l = 0; l < shaping.lattices; ++l) {
    if (shaping.blank_share[l] == 0) continue;
    const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[l], saved, l);
    for (int i = 0; i < shaping.arcs[l].n; ++i) {
      const ArcPair<Acc> occ = occupied.arc(i);
      G += shaping.blank_share[l] * occ.blank + shaping.label_share[l] * occ.label;
    }
  }
  return G;
}

}  // namespace tdt
