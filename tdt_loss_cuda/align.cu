// The best alignment on the GPU: scores backward over the lattice, then a walk along the best arcs (align.h).
//
// Work: one block for each sample. Every arc raises t + u, so the nodes of one anti-diagonal are independent: the block
// takes them from the last to the first, threads striding over u, with a barrier after each. There is no limit on T or
// U. One thread walks: each of its steps waits for the one before.
//
// best(t,u) is float64 and the best arc of a node one byte, both in global memory, (T, U + 1) from the first node of
// the sample on. Other threads of the block write what a thread reads: plain loads and stores with barriers between
// them, never the read-only cache.
#include "launch.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kMaxBlock = 1024;

template <typename Acc>
__global__ void __launch_bounds__(kMaxBlock)
    align_kernel(const __grid_constant__ AlignTask<Acc> task, double* best, uint8_t* best_arcs) {
  const Batch& batch = task.batch;
  const int b = blockIdx.x;
  // Once for the block: its threads then count the same barriers, whatever happens to the lengths meanwhile.
  __shared__ Extent of_block;
  if (threadIdx.x == 0) of_block = batch.extent(b);
  __syncthreads();
  const Extent extent = of_block;
  int64_t *frames = task.frames + b * task.U, *durations = task.durations + b * task.U;
  best += batch.node(b, 0, 0);
  best_arcs += batch.node(b, 0, 0);

  bool bad_label = false;
  for (int64_t u = threadIdx.x; u < task.U; u += blockDim.x) {
    frames[u] = durations[u] = -1;
    bad_label = bad_label || (u < extent.U && batch.label(b, static_cast<int>(u)) < 0);
  }
  const bool malformed = __syncthreads_or(bad_label || !extent.ok);
  if (malformed || extent.T == 0) {
    if (threadIdx.x == 0) task.score[b] = malformed ? static_cast<Acc>(NAN) : -static_cast<Acc>(INFINITY);
    return;
  }

  bool nan = false;
  for (int n = extent.T - 1 + extent.U; n >= 0; --n) {  // n = t + u
    const int first = max(0, n - (extent.T - 1)), last = min(n, extent.U);
    for (int k = threadIdx.x; k <= last - first; k += blockDim.x) {
      const int u = first + k, t = n - u;
      const Acc* record = task.node_lp + batch.node(b, t, u) * record_size(batch.D);
      const BestStep step = best_step(task.arcs, extent, t, u, record, best);
      best[lattice_index(extent, t, u)] = step.best;
      best_arcs[lattice_index(extent, t, u)] = step.arc;
      nan = nan || step.nan;
    }
    __syncthreads();
  }
  nan = __syncthreads_or(nan);
  if (threadIdx.x != 0) return;
  if (!nan && best[0] > -INFINITY) trace(task.arcs, extent, best_arcs, frames, durations);
  task.score[b] = static_cast<Acc>(nan ? NAN : best[0]);
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::align(const Tensor& like, const AlignTask<Acc>& task) {
  const cuda::LaunchScope scope(like);
  const Batch& batch = task.batch;
  Tensor best = empty_on(like, {batch.nodes()}, ScalarType::Double);
  Tensor best_arcs = empty_on(like, {batch.nodes()}, ScalarType::Byte);
  // No anti-diagonal is longer than this; small blocks have quick barriers.
  const int longest = std::max(1, std::min({batch.max_T, batch.max_U1, cuda::kMaxBlock}));
  const int threads = (longest + cuda::kWarp - 1) / cuda::kWarp * cuda::kWarp;
  cuda::align_kernel<Acc>
      <<<batch.B, threads, 0, scope.stream()>>>(task, mutable_data<double>(best), mutable_data<uint8_t>(best_arcs));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(Acc, _) template void Cuda::align(const Tensor&, const AlignTask<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
