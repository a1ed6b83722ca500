// The occupancy of the arcs that leave a node, eq. 7: the one piece of arithmetic between the lattice and the gradient.
#pragma once

#include "problem.h"

namespace tdt {

template <typename Acc>
struct ArcPair {
  Acc blank, label;
};

TDT_HD float exp_of_sum(float, double x) { return expf(static_cast<float>(x)); }
TDT_HD double exp_of_sum(double, double x) { return exp(x); }

// Occupancies of the blank and the label arc of one duration d with log-probability dur_lp, out of node `at`.
// from = alpha(t, u) - LL; record = the node's log-probabilities; beta = the whole (B, T, U1) tensor.
template <typename Acc>
TDT_HD ArcPair<Acc> arc_occupancy(const Batch& batch, const Extent& extent, const Node& at, double from,
                                  const Acc* record, Acc dur_lp, int d, const double* beta) {
  ArcPair<Acc> occ{0, 0};
  const int64_t t_to = static_cast<int64_t>(at.t) + d;
  const bool lands = t_to < extent.T;
  const bool exits = t_to == extent.T && at.u == extent.U;  // the final blank, beta = 1
  if (d > 0 && (lands || exits)) {
    const double beta_to = lands ? beta[batch.node(at.b, static_cast<int>(t_to), at.u)] : 0.0;
    occ.blank = exp_of_sum(Acc(0), from + record[kBlankLp] + dur_lp + beta_to);
  }
  if (at.u < extent.U && lands) {
    occ.label =
        exp_of_sum(Acc(0), from + record[kLabelLp] + dur_lp + beta[batch.node(at.b, static_cast<int>(t_to), at.u + 1)]);
  }
  return occ;
}

}  // namespace tdt
