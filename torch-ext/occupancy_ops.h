// The ops of occupancies as functions, once for both backends. Schemas: torch_binding.cpp.
#pragma once

#include <tuple>

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/checks.h"

namespace tdt {

// eq. 7 of every arc of the first lattice: blank and label (B, T, U1, D), for RNN-T (B, T, U1).
template <class Backend>
std::tuple<Tensor, Tensor> occupancy(const Tensor& node_lp, const Tensor& ll, const Tensor& alpha_beta,
                                     const Tensor& targets, const Tensor& logit_lengths, const Tensor& target_lengths,
                                     const DurationList& durations, int64_t vocab) {
  const Arcs arcs = arcs_of(durations);
  const auto D = static_cast<int64_t>(durations.size());
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, D);
  check_node_lp(node_lp, D);
  STD_TORCH_CHECK(ll.dim() == 2, "ll must have 2 dimensions (lattices, B), got ", ll.dim());
  check_saved(batch, static_cast<int>(ll.size(0)), node_lp.scalar_type(), node_lp, ll, alpha_beta);
  std::vector<int64_t> size{batch.B, batch.max_T, batch.max_U1};
  if (!arcs.rnnt) size.push_back(D);
  Tensor blank = empty_on(node_lp, size, node_lp.scalar_type());
  Tensor label = empty_on(node_lp, size, node_lp.scalar_type());
  if (batch.nodes() == 0) return {blank, label};
  dispatch_accumulate(node_lp.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    const Saved<Acc> saved{const_data<Acc>(node_lp), nullptr, const_data<double>(ll), const_data<double>(alpha_beta)};
    Backend::occupancy(node_lp,
                       OccupancyTask<Acc>{batch, arcs, saved, mutable_data<Acc>(blank), mutable_data<Acc>(label)});
  });
  return {blank, label};
}

// G (B, T, U1): what the gradient of each node's logits is proportional to. 0 where there is none, NaN at the valid
// nodes of a sample with NaN.
template <class Backend>
Tensor node_occupancy(const Tensor& node_lp, const Tensor& ll, const Tensor& alpha_beta, const Tensor& targets,
                      const Tensor& logit_lengths, const Tensor& target_lengths, const DurationList& durations,
                      int64_t vocab, double omega, double fastemit_lambda) {
  const Arcs arcs = arcs_of(durations);
  const int lattices = lattices_of(arcs, omega);
  const auto D = static_cast<int64_t>(durations.size());
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, D);
  check_node_lp(node_lp, D);
  check_saved(batch, lattices, node_lp.scalar_type(), node_lp, ll, alpha_beta);
  Tensor G = empty_on(node_lp, {batch.B, batch.max_T, batch.max_U1}, node_lp.scalar_type());
  if (batch.nodes() == 0) return G;
  dispatch_accumulate(node_lp.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    const Saved<Acc> saved{const_data<Acc>(node_lp), nullptr, const_data<double>(ll), const_data<double>(alpha_beta)};
    const auto shaping = Shaping<Acc>::of(0, arcs, Mixture::of(lattices, omega), fastemit_lambda, 0.0);
    Backend::node_occupancy(node_lp, NodeOccupancyTask<Acc>{batch, saved, shaping, mutable_data<Acc>(G)});
  });
  return G;
}

}  // namespace tdt
