// Rows of logits on the CPU: eq. 1-3 forward, eq. 7-9 backward (equations: tdt_loss_cuda/lattice.cu).
//
// The twin of tdt_loss_cuda/logprobs.cu, function by function. Nodes are shared out over torch's threads; a row is read
// once per direction and nothing is kept per (t, u, v) but the gradient. Sums are float32 (float64 for float64 logits).
#include <cmath>

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/occupancy.h"
#include "rows.h"

namespace tdt {
namespace {

using namespace cpu;

constexpr int64_t kGrain = 16;  // rows per task at least: a row costs about a microsecond at V = 1024

}  // namespace

template <>
template <typename S>
void Cpu::log_probs(const Tensor&, const Batch& batch, const LogitRows<S>& logits, accumulate_t<S>* node_lp, int blank,
                    double sigma) {
  using Acc = accumulate_t<S>;
  const int R = record_size(batch.D);
  torch::stable::parallel_for(0, batch.nodes(), kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> buffer;
    for (int64_t node = begin; node < end; ++node) {
      const auto [b, t, u] = batch.node_at(node);
      const Extent extent = batch.extent(b);
      Acc* record = node_lp + node * R;
      std::fill(record, record + R, Acc(0));
      if (!extent.has(t, u)) continue;  // padding is not read

      const Acc* x = widened(logits.tokens.row(b, t, u), batch.V, buffer);
      const Acc lse = row_logsumexp(x, batch.V);
      const int y = u < extent.U ? batch.label(b, u) : -1;
      record[kLse] = lse;
      record[kBlankLp] = x[blank] - lse - static_cast<Acc>(sigma);                  // eq. 1
      record[kLabelLp] = y < 0 ? -INFINITY : x[y] - lse - static_cast<Acc>(sigma);  // eq. 2
      if (batch.D == 0) continue;
      const Acc* z = widened(logits.durations.row(b, t, u), batch.D, buffer);
      const Acc lse_z = row_logsumexp(z, batch.D);
      for (int i = 0; i < batch.D; ++i) record[kDurLp + i] = z[i] - lse_z;  // eq. 3
    }
  });
}

template <>
template <typename S>
void Cpu::gradient(const Tensor&, const Batch& batch, const Durations& durations, const LogitRows<S>& logits,
                   const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved, int blank) {
  using Acc = accumulate_t<S>;
  const int R = record_size(batch.D);
  torch::stable::parallel_for(0, batch.nodes(), kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> buffer, G_i(batch.D);
    for (int64_t node = begin; node < end; ++node) {
      const Node at = batch.node_at(node);
      const auto [b, t, u] = at;
      const Extent extent = batch.extent(b);
      const double ll = saved.ll[b];
      const Acc* record = saved.node_lp + node * R;
      const Acc scale = saved.grad_losses[b];
      const bool valid = extent.has(t, u);

      Acc G_blank = 0, G_label = 0;
      if (valid && std::isfinite(ll)) {
        for (int i = 0; i < batch.D; ++i) {
          const auto [blank_occ, label_occ] = arc_occupancy(batch, extent, at, saved.alpha[node] - ll, record,
                                                            record[kDurLp + i], durations.d[i], saved.beta);
          G_blank += blank_occ;
          G_label += label_occ;
          G_i[i] = blank_occ + label_occ;
        }
      }
      const Acc G = G_blank + G_label;
      const bool nan = valid && std::isnan(ll);

      S* grad_x = grad.tokens.row(b, t, u);
      if (G == 0) {  // padding, no alignment through this node, or a malformed sample; x need not be read
        std::fill(grad_x, grad_x + batch.V, static_cast<S>(nan ? Acc(NAN) : Acc(0)));
      } else {
        Acc* result = row_for(grad_x, batch.V, buffer);
        row_softmax(widened(logits.tokens.row(b, t, u), batch.V, buffer), result, batch.V, record[kLse],
                    G * scale);  // eq. 8
        result[blank] -= G_blank * scale;
        if (u < extent.U) result[batch.label(b, u)] -= G_label * scale;
        store_row(result, grad_x, batch.V);
      }
      S* grad_z = grad.durations.row(b, t, u);
      for (int i = 0; i < batch.D; ++i) {
        const Acc value = G == 0 ? Acc(0) : (std::exp(record[kDurLp + i]) * G - G_i[i]) * scale;  // eq. 9
        grad_z[i] = static_cast<S>(nan ? Acc(NAN) : value);
      }
    }
  });
}

#define TDT_INSTANTIATE(S)                                                                                          \
  template void Cpu::log_probs<S>(const Tensor&, const Batch&, const LogitRows<S>&, accumulate_t<S>*, int, double); \
  template void Cpu::gradient<S>(const Tensor&, const Batch&, const Durations&, const LogitRows<S>&,                \
                                 const LogitRows<S>&, const Saved<accumulate_t<S>>&, int);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
