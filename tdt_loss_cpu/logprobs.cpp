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
    const Acc sigma = static_cast<Acc>(emission.sigma);
    std::vector<Acc> buffer;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = list.at(batch, row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      Acc* record = out.node_lp + node * R;
      std::fill(record, record + R, Acc(0));
      if (!extent.has(at.t, at.u)) continue;  // padding is not read

      const Acc* x = widened(logits.tokens.row(row, at), batch.V, buffer);
      const Row<Acc> tokens(x, batch.V);
      const int y = at.u < extent.U ? batch.label(at.b, at.u) : -1;
      const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - at.t));  // eq. 10
      out.row_max[node] = tokens.max;
      record[kRowSum] = tokens.sum;
      record[kBlankLp] = x[emission.blank] - tokens.max - tokens.log_sum - sigma;                 // eq. 1
      record[kLabelLp] = y < 0 ? -INFINITY : x[y] - tokens.max - tokens.log_sum - sigma + delay;  // eq. 2
      if (batch.D == 0) continue;
      const Acc* z = widened(logits.durations.row(row, at), batch.D, buffer);
      const Row<Acc> durations(z, batch.D);
      for (int i = 0; i < batch.D; ++i) record[kDurLp + i] = z[i] - durations.max - durations.log_sum;  // eq. 3
    }
  });
}

#define TDT_INSTANTIATE(S, _) template void Cpu::log_probs(const Tensor&, const LogProbsTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
