// Which nodes are computed in full, on the GPU (Budget in band.h): the mass of every node, how much of a sample's lies
// in each bin, how many bins the budget covers, and the list of the nodes that stay, in their order. Masses are added
// as integers, so that atomics give the same sum in any order.
#include "../tdt_loss_common/band.h"

#include "launch.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarp;
constexpr int kNodesPerThread = 8;
constexpr int kPiece = kBlock * kNodesPerThread;  // nodes of a block
constexpr int kBinsPerThread = (Budget::kBins + kBlock - 1) / kBlock;

template <typename Acc>
__global__ void __launch_bounds__(kBlock) posterior_kernel(const __grid_constant__ Posterior<Acc> p) {
  const int64_t node = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (node < p.batch.nodes()) p.out[node] = posterior_of(p, node, p.batch.node_at(node));
}

template <typename Acc>
__device__ __forceinline__ Budget budget_of(const Selection<Acc>& p, int b) {
  return Budget::of(p.ll, p.batch.B, b, p.mixture, p.tolerance);
}

// bins (B, kBins), zeroed. A block has nodes of one sample.
template <typename Acc>
__global__ void __launch_bounds__(kBlock)
    fill_bins_kernel(const __grid_constant__ Selection<Acc> p, unsigned long long* bins) {
  __shared__ unsigned long long own[Budget::kBins];
  for (int i = threadIdx.x; i < Budget::kBins; i += kBlock) own[i] = 0;
  __syncthreads();
  const int64_t of_sample = static_cast<int64_t>(p.batch.max_T) * p.batch.max_U1;
  for (int b = blockIdx.y; b < p.batch.B; b += gridDim.y) {
    const Budget budget = budget_of(p, b);
    for (int k = 0; k < kNodesPerThread; ++k) {
      const int64_t i = static_cast<int64_t>(blockIdx.x) * kPiece + k * kBlock + threadIdx.x;
      if (i >= of_sample) break;
      const int64_t node = b * of_sample + i;
      if (p.known && p.known[node]) continue;
      const uint64_t units = budget.units(p.mass[node]);
      if (units != 0 && Budget::may_go(units)) {
        atomicAdd(own + Budget::bin(units), static_cast<unsigned long long>(units));
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Budget::kBins; i += kBlock) {
      if (own[i] != 0) atomicAdd(bins + static_cast<int64_t>(b) * Budget::kBins + i, own[i]);
      own[i] = 0;
    }
    __syncthreads();
  }
}

// The inclusive sum over the threads of a block, of numbers that add up to less than 2^64.
template <typename T>
__device__ __forceinline__ T block_scan(T x, T* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T before = __shfl_up_sync(kFullMask, x, offset);
    if (lane >= offset) x += before;
  }
  if (lane == kWarp - 1) shared[warp] = x;
  __syncthreads();
  T base = 0;
  for (int w = 0; w < warp; ++w) base += shared[w];
  __syncthreads();
  return base + x;
}

// How many bins of each sample may go, and what is in them.
template <typename Acc>
__global__ void __launch_bounds__(kBlock)
    cut_kernel(const __grid_constant__ Selection<Acc> p, const unsigned long long* bins, int* cuts) {
  __shared__ unsigned long long shared[kWarps];
  __shared__ int cut;
  __shared__ unsigned long long gone;
  const int b = blockIdx.x;
  if (threadIdx.x == 0) {
    cut = 0;
    gone = 0;
  }
  unsigned long long own[kBinsPerThread], sum = 0;
  for (int k = 0; k < kBinsPerThread; ++k) {
    const int i = threadIdx.x * kBinsPerThread + k;
    own[k] = i < Budget::kBins ? bins[static_cast<int64_t>(b) * Budget::kBins + i] : 0;
    sum += own[k];
  }
  unsigned long long until = block_scan(sum, shared) - sum;
  for (int k = 0; k < kBinsPerThread; ++k) {
    const int i = threadIdx.x * kBinsPerThread + k;
    until += own[k];
    if (i < Budget::kBins && Budget::may_go(until)) {  // sums rise from bin to bin: the largest that may go is the last
      atomicMax(&cut, i + 1);
      atomicMax(&gone, until);
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  cuts[b] = cut;
  p.dropped[b] = budget_of(p, b).mass(gone);
}

template <typename Acc>
__device__ __forceinline__ bool is_kept(const Selection<Acc>& p, const int* cuts, int64_t node) {
  if (node >= p.batch.nodes() || (p.known && p.known[node])) return false;
  const Acc mass = p.mass[node];
  if (mass == Acc(0)) return false;
  const int b = p.batch.node_at(node).b;
  return Budget::keeps(budget_of(p, b).units(mass), cuts[b]);
}

template <typename Acc>
__global__ void __launch_bounds__(kBlock)
    count_kernel(const __grid_constant__ Selection<Acc> p, const int* cuts, int* counts) {
  int kept = 0;
  for (int k = 0; k < kNodesPerThread; ++k) {
    const int64_t node = static_cast<int64_t>(blockIdx.x) * kPiece + k * kBlock + threadIdx.x;
    kept += __syncthreads_count(is_kept(p, cuts, node));
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = kept;
}

// The counts of all blocks into the places where they begin, by one block.
__global__ void __launch_bounds__(kBlock) begin_kernel(int* counts, int n, int* total) {
  __shared__ int shared[kWarps];
  __shared__ int last;
  int before = 0;
  for (int first = 0; first < n; first += kBlock) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int own = i < n ? counts[i] : 0;
    const int until = block_scan(own, shared);
    if (i < n) counts[i] = before + until - own;
    if (threadIdx.x == kBlock - 1) last = until;
    __syncthreads();
    before += last;
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = before;
}

template <typename Acc>
__global__ void __launch_bounds__(kBlock)
    list_kernel(const __grid_constant__ Selection<Acc> p, const int* cuts, const int* begins) {
  __shared__ int shared[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int next = begins[blockIdx.x];
  for (int k = 0; k < kNodesPerThread; ++k) {
    const int64_t node = static_cast<int64_t>(blockIdx.x) * kPiece + k * kBlock + threadIdx.x;
    const bool kept = is_kept(p, cuts, node);
    const unsigned votes = __ballot_sync(kFullMask, kept);
    if (lane == 0) shared[warp] = __popc(votes);
    __syncthreads();
    int place = next, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += shared[w];
      all += shared[w];
    }
    __syncthreads();
    next += all;
    place += __popc(votes & ((1u << lane) - 1));
    if (node >= p.batch.nodes()) continue;
    p.row_of_node[node] = kept ? place : -1;
    if (!kept) continue;
    p.nodes[place] = static_cast<int32_t>(node);
    if (p.known) p.known[node] = 1;
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::posterior(const Tensor& like, const Posterior<Acc>& p) {
  const cuda::LaunchScope scope(like);
  cuda::posterior_kernel<Acc><<<cuda::blocks_for(p.batch.nodes(), cuda::kBlock), cuda::kBlock, 0, scope.stream()>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename Acc>
void Cuda::select(const Tensor& like, const Selection<Acc>& p) {
  const cuda::LaunchScope scope(like);
  constexpr unsigned kMostOfGrid = 65535;
  const int B = p.batch.B;
  const unsigned pieces = cuda::blocks_for(p.batch.nodes(), cuda::kPiece);
  const int64_t of_bins = static_cast<int64_t>(B) * Budget::kBins;
  Tensor workspace = empty_on(like, {2 * of_bins + B + pieces}, ScalarType::Int);
  auto* const bins = static_cast<unsigned long long*>(workspace.mutable_data_ptr());
  int* const cuts = reinterpret_cast<int*>(bins + of_bins);
  STD_CUDA_CHECK(cudaMemsetAsync(bins, 0, of_bins * sizeof(*bins), scope.stream()));
  STD_CUDA_CHECK(cudaMemsetAsync(p.nodes, 0xff, p.batch.nodes() * sizeof(*p.nodes), scope.stream()));
  const int64_t of_sample = static_cast<int64_t>(p.batch.max_T) * p.batch.max_U1;
  const dim3 grid(cuda::blocks_for(of_sample, cuda::kPiece), std::min<unsigned>(B, kMostOfGrid));
  cuda::fill_bins_kernel<Acc><<<grid, cuda::kBlock, 0, scope.stream()>>>(p, bins);
  cuda::cut_kernel<Acc><<<B, cuda::kBlock, 0, scope.stream()>>>(p, bins, cuts);
  cuda::count_kernel<Acc><<<pieces, cuda::kBlock, 0, scope.stream()>>>(p, cuts, cuts + B);
  cuda::begin_kernel<<<1, cuda::kBlock, 0, scope.stream()>>>(cuts + B, static_cast<int>(pieces), p.count);
  cuda::list_kernel<Acc><<<pieces, cuda::kBlock, 0, scope.stream()>>>(p, cuts, cuts + B);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE_ACCUMULATE(S, _)                                \
  template void Cuda::posterior<S>(const Tensor&, const Posterior<S>&); \
  template void Cuda::select<S>(const Tensor&, const Selection<S>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE_ACCUMULATE)

}  // namespace tdt
