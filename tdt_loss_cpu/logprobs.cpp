// Rows of logits on the CPU: the log-probabilities of every node, eq. 1-3 (equations.h).
//
// The twin of tdt_loss_cuda/logprobs.cu. Nodes are shared out over torch's threads, and a row is read once. Sums are
// float32 (float64 for float64 logits).
#include <cmath>

#include "rows.h"

namespace tdt {

using namespace cpu;

template <>
template <typename S>
void Cpu::log_probs(const Tensor&, const LogProbsTask<S>& task) {
  using Acc = accumulate_t<S>;
  torch::stable::parallel_for(0, task.list.n, kGrain, [&](int64_t begin, int64_t end) {
    const auto& [batch, list, logits, out, emission] = task;
    const int R = record_size(batch.D);
    std::vector<Acc> buffer;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = list.at(batch, row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      Acc* record = out.node_lp + node * R;
      std::fill(record, record + R, Acc(0));
      if (!extent.has(at.t, at.u)) continue;  // padding is not read

      write_token_fields(batch, node, at, extent, widened(logits.tokens.row(row, at), batch.V, buffer), out, emission);
      write_duration_fields(record, widened(logits.durations.row(row, at), batch.D, buffer), batch.D);
    }
  });
}

#define TDT_INSTANTIATE(S, _) template void Cpu::log_probs(const Tensor&, const LogProbsTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
