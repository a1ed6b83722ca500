// Rows of logits on the CPU: the log-probabilities of every node, eq. 1-3 (equations: tdt_loss_cuda/lattice.cu).
//
// The twin of tdt_loss_cuda/logprobs.cu. Nodes are shared out over torch's threads, and a row is read once. Sums are
// float32 (float64 for float64 logits).
#include <cmath>

#include "rows.h"

namespace tdt {

using namespace cpu;

template <>
template <typename S>
void Cpu::log_probs(const Tensor&, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                    const NodeRecords<accumulate_t<S>>& out, const Emission& emission) {
  using Acc = accumulate_t<S>;
  const int R = record_size(batch.D);
  const Acc sigma = static_cast<Acc>(emission.sigma);
  torch::stable::parallel_for(0, list.n, kGrain, [&](int64_t begin, int64_t end) {
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
      const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - at.t));
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

#define TDT_INSTANTIATE(S)                                                                           \
  template void Cpu::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, \
                                  const NodeRecords<accumulate_t<S>>&, const Emission&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
