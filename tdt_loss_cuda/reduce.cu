// The losses of a batch from its log-likelihoods, eq. 6 and 11, and their reduction on the GPU: one block, one launch
// where torch would need one for each division and sum. A thread takes every kBlock-th sample; partial sums, float64,
// are added in a tree: the same bits always.
#include "launch.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;

// The sum over the block; every thread gets it.
template <typename T>
__device__ T block_sum(T x, T* shared) {
  shared[threadIdx.x] = x;
  for (int half = kBlock / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  __syncthreads();
  return shared[0];
}

template <typename Acc>
__global__ void __launch_bounds__(kBlock) reduce_kernel(const __grid_constant__ Reducing p, Reduced<Acc> out) {
  __shared__ int64_t label_sums[kBlock];
  __shared__ double loss_sums[kBlock];
  int64_t labels = 0;
  for (int b = threadIdx.x; b < p.B; b += kBlock) labels += p.labels(b);
  labels = block_sum(labels, label_sums);
  double sum = 0.0;
  for (int b = threadIdx.x; b < p.B; b += kBlock) {
    const double loss = p.loss_of(b);
    if (out.losses) {
      out.losses[b] = static_cast<Acc>(loss);
      continue;
    }
    const double weight = reduction_weight(p.reduction, p.B, p.target_lengths, b, labels);
    out.weights[b] = static_cast<Acc>(weight);
    sum += weight * loss;
  }
  sum = block_sum(sum, loss_sums);
  if (threadIdx.x == 0 && out.loss) *out.loss = static_cast<Acc>(sum);
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::reduce(const Tensor& like, const Reducing& problem, const Reduced<Acc>& out) {
  const cuda::LaunchScope scope(like);
  cuda::reduce_kernel<Acc><<<1, cuda::kBlock, 0, scope.stream()>>>(problem, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(Acc, _) template void Cuda::reduce(const Tensor&, const Reducing&, const Reduced<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
