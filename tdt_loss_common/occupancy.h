// The occupancy of the arcs that leave a node, eq. 7, and their sums: the one piece of arithmetic between the lattice
// and the gradient (equations.h).
#pragma once

#include "backend.h"

namespace tdt {

template <typename Acc>
struct ArcPair {
  Acc blank, label;
};

// exp(x) of a sum whose result is of the type of the first argument. Where it is large enough for its last digits to
// matter beside others, to 1 ulp: the device's expf errs by 2 near 1.
TDT_HD float exp_of_sum(float, double x) {
  const auto rounded = static_cast<float>(x);
  if (!(rounded > -20.0f && rounded < 1.0f)) return expf(rounded);  // an arc that does not exist may have any sum
  const Scaled exact = scaled_exp(rounded);
  return static_cast<float>(2.0 * exact.m * pow2_or_zero(exact.e - 1));
}
TDT_HD double exp_of_sum(double, double x) { return exp(x); }

// A node of a lattice that the forward has run. Only valid nodes of samples with a finite LL have occupancies.
template <typename Acc>
struct OccupiedNode {
  const Arcs& arcs;
  const Acc* record;             // the node's log-probabilities
  double from;                   // alpha(t, u) - LL
  const double* beta;            // the node's own in (B, T, U1)
  int U1;                        // from one frame of beta to the next
  int frames_left, labels_left;  // T - t and U - u

  // eq. 7 of arc pair i. Where an arc does not exist another address is read and the value dropped: without branches
  // the loads of several arcs are in flight together.
  TDT_HD ArcPair<Acc> arc(int i) const {
    const Departures out = arcs.departures(i, frames_left, labels_left);
    const double* const to = beta + (out.lands ? static_cast<int64_t>(arcs.d[i]) * U1 : 0);
    const double beta_blank = to[0], beta_label = to[labels_left > 0 ? 1 : 0];
    const double dur_lp = arcs.dur_lp(record, i);
    const Acc blank = exp_of_sum(Acc(0), from + record[kBlankLp] + dur_lp + (out.lands ? beta_blank : 0.0));
    const Acc label = exp_of_sum(Acc(0), from + record[kLabelLp] + dur_lp + beta_label);
    return {out.blank ? blank : Acc(0), out.label ? label : Acc(0)};
  }
};

template <typename Acc>
TDT_HD OccupiedNode<Acc> occupied_node(const Batch& batch, const Extent& extent, const Node& at, const Arcs& arcs,
                                       const Saved<Acc>& saved, int lattice) {
  const int64_t node = batch.node(at.b, at.t, at.u);
  const double ll = saved.ll[static_cast<int64_t>(lattice) * batch.B + at.b];
  return {arcs,
          saved.node_lp + node * record_size(batch.D),
          saved.alpha(batch, lattice)[node] - ll,
          saved.beta(batch, lattice) + node,
          batch.max_U1,
          extent.T - at.t,
          extent.U - at.u};
}

// What the log-likelihoods of a sample's lattices say about its gradient.
struct SampleState {
  bool feasible;  // every lattice that counts has an alignment, and the sample is well formed
  bool nan;       // a logit was NaN or +inf

  // ll (lattices, B)
  TDT_HD static SampleState of(const double* ll, int B, int b, int lattices, const bool* counts) {
    SampleState state{true, false};
    for (int l = 0; l < kMaxLattices; ++l) {  // a constant, so that nothing is unrolled that cannot run
      if (l >= lattices || !counts[l]) continue;
      const double here = ll[static_cast<int64_t>(l) * B + b];
      state.feasible = state.feasible && here > -INFINITY && here < INFINITY;
      state.nan = state.nan || here != here;
    }
    return state;
  }
};

// The sums of a node over arcs and lattices, with the factors of eq. 11 and 12; G_tdt: that of the first lattice alone.
// NaN at the valid nodes of a sample with NaN.
template <typename Acc>
TDT_HD NodeSums<Acc> node_sums(const Batch& batch, const Extent& extent, const Node& at, const Saved<Acc>& saved,
                               const Shaping<Acc>& shaping, Acc* G_tdt) {
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u);
  NodeSums<Acc> G{0, 0};
  *G_tdt = 0;
  if (!valid || !sample.feasible) {  // padding, no alignment, or a malformed sample
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

// eq. 9, with eq. 13, of one duration, with its log-probability and its arcs of the first lattice, whose sum over all
// durations is G_tdt.
template <typename Acc>
TDT_HD Acc duration_entry(const Shaping<Acc>& shaping, Acc dur_lp, const ArcPair<Acc>& occ, Acc G_tdt, Acc scale) {
  if (G_tdt == 0) return 0;
  const Acc G_i = shaping.blank_share[0] * occ.blank + shaping.label_share[0] * occ.label;
  return clamped((exp_of_sum(Acc(0), dur_lp) * G_tdt - G_i) * scale, shaping.limit(scale));
}

}  // namespace tdt
