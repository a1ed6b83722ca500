// The losses of a batch from its log-likelihoods, eq. 6 and 11, and their reduction on the CPU: the twin of
// tdt_loss_cuda/reduce.cu. Sums are float64, in the order of the batch.
#include "../tdt_loss_common/backend.h"

namespace tdt {

template <>
template <typename Acc>
void Cpu::reduce(const Tensor&, const Reducing& p, const Reduced<Acc>& out) {
  if (out.losses) {
    for (int b = 0; b < p.B; ++b) out.losses[b] = static_cast<Acc>(p.loss_of(b));
    return;
  }
  int64_t labels = 0;
  for (int b = 0; b < p.B; ++b) labels += p.labels(b);
  double sum = 0.0;
  for (int b = 0; b < p.B; ++b) {
    const double weight = reduction_weight(p.reduction, p.B, p.target_lengths, b, labels);
    out.weights[b] = static_cast<Acc>(weight);
    sum += weight * p.loss_of(b);
  }
  *out.loss = static_cast<Acc>(sum);
}

#define TDT_INSTANTIATE(Acc, _) template void Cpu::reduce(const Tensor&, const Reducing&, const Reduced<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
