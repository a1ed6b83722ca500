// The reduction over the batch on the CPU, the twin of tdt_loss_cuda/reduce.cu. Sums are float64, in the order of the
// batch.
#include "../tdt_loss_common/backend.h"

namespace tdt {

template <>
template <typename Acc>
void Cpu::reduce(const Tensor&, const Batch& batch, Reduction reduction, const Acc* losses, Acc* loss, Acc* weights) {
  int64_t labels = 0;
  for (int b = 0; b < batch.B; ++b) labels += batch.target_lengths.at(b);
  double sum = 0.0;
  for (int b = 0; b < batch.B; ++b) {
    const double weight = reduction_weight(reduction, batch, b, labels);
    weights[b] = static_cast<Acc>(weight);
    sum += weight * static_cast<double>(losses[b]);
  }
  *loss = static_cast<Acc>(sum);
}

template void Cpu::reduce<float>(const Tensor&, const Batch&, Reduction, const float*, float*, float*);
template void Cpu::reduce<double>(const Tensor&, const Batch&, Reduction, const double*, double*, double*);

}  // namespace tdt
