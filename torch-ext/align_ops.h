// The op `align` as a function, for both backends: checks, outputs, then the backend. Schema: torch_binding.cpp.
#pragma once

#include <tuple>

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/checks.h"

namespace tdt {

// The best alignment of each sample: frames and durations (B, U) int64 of its labels, -1 elsewhere, and score (B,).
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> align(const Tensor& node_lp, const Tensor& targets, const Tensor& logit_lengths,
                                         const Tensor& target_lengths, const DurationList& durations, int64_t vocab) {
  const Arcs arcs = arcs_of(durations);
  const auto D = static_cast<int64_t>(durations.size());
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, D);
  check_node_lp(node_lp, D);
  const int64_t U = targets.size(1);
  Tensor label_frames = empty_on(node_lp, {batch.B, U}, ScalarType::Long);
  Tensor label_durations = empty_on(node_lp, {batch.B, U}, ScalarType::Long);
  Tensor score = empty_on(node_lp, {batch.B}, node_lp.scalar_type());
  if (batch.B == 0) return {label_frames, label_durations, score};
  dispatch_accumulate(node_lp.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    Backend::align(node_lp, AlignTask<Acc>{batch, arcs, const_data<Acc>(node_lp), mutable_data<int64_t>(label_frames),
                                           mutable_data<int64_t>(label_durations), U, mutable_data<Acc>(score)});
  });
  return {label_frames, label_durations, score};
}

}  // namespace tdt
