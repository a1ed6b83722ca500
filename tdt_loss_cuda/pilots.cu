// What the pilots say about the tokens, on the GPU (Pilots in band.h): the log-sum-exp of each pilot row, the mean
// probability of each token, the most frequent ones, and the sums of the groups of the others. Each sum has one order.
#include "../tdt_loss_common/band.h"

#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kSlices = 16;         // of the pilots, and of the tokens of a group, that are summed apart
constexpr int kChooseBlock = 1024;  // threads of the one block that chooses

// Sum or maximum over a block, for all its threads.
template <int kThreads, typename Acc, typename F>
__device__ Acc block_reduce(Acc x, F&& combine) {
  __shared__ Acc shared[kThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = combine(x, __shfl_xor_sync(kFullMask, x, offset));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = shared[0];
  for (int w = 1; w < kThreads / kWarp; ++w) x = combine(x, shared[w]);
  return x;
}

template <typename S, typename Acc>
__global__ void __launch_bounds__(kBlock) pilot_lse_kernel(const __grid_constant__ Pilots<S, Acc> p, Acc* lse) {
  const Acc* const x = p.logits + blockIdx.x * p.stride;
  Acc max = negative_infinity<Acc>(), sum = 0;
  for (int k = threadIdx.x; k < p.V; k += kBlock) max = fmax(max, x[k] + p.bias[k]);
  max = block_reduce<kBlock>(max, [](Acc a, Acc b) { return fmax(a, b); });
  for (int k = threadIdx.x; k < p.V; k += kBlock) sum += exp_of(x[k] + p.bias[k] - max);
  sum = block_reduce<kBlock>(sum, [](Acc a, Acc b) { return a + b; });
  if (threadIdx.x == 0) lse[blockIdx.x] = max + log(sum);
}

// means (kSlices, V): each slice's part of the mean probability.
template <typename S, typename Acc>
__global__ void __launch_bounds__(kBlock)
    pilot_mean_kernel(const __grid_constant__ Pilots<S, Acc> p, const Acc* lse, Acc* means) {
  const int k = blockIdx.x * kBlock + threadIdx.x, slice = blockIdx.y;
  if (k >= p.V) return;
  const int rows = (p.n + kSlices - 1) / kSlices, end = min(p.n, (slice + 1) * rows);
  const Acc bias = p.bias[k];
  Acc sum = 0;
#pragma unroll 4
  for (int i = slice * rows; i < end; ++i) sum += exp_of(p.logits[i * p.stride + k] + bias - lse[i]);
  means[static_cast<int64_t>(slice) * p.V + k] = sum / p.n;
}

// A float32 that orders as the probability does, as an unsigned number.
__device__ __forceinline__ unsigned order_of(double share) { return __float_as_uint(static_cast<float>(share)); }

// The most frequent tokens, of equal ones those of smaller number: 8 binary digits of the smallest chosen probability
// at a time, by counting.
template <typename S, typename Acc>
__global__ void __launch_bounds__(kChooseBlock)
    choose_kernel(const __grid_constant__ Pilots<S, Acc> p, const Acc* means) {
  __shared__ int counts[256], places[kChooseBlock / kWarp + 1];
  __shared__ unsigned prefix_shared;
  __shared__ int left_shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int k = threadIdx.x; k < p.V; k += kChooseBlock) {
    Acc share = 0;
    for (int slice = 0; slice < kSlices; ++slice) share += means[static_cast<int64_t>(slice) * p.V + k];
    p.share[k] = k != p.blank && share >= static_cast<Acc>(kUnseen) ? share : Acc(0);
  }
  unsigned prefix = 0;
  int left = p.frequent;  // to be chosen among those with the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < 256) counts[threadIdx.x] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < p.V; k += kChooseBlock) {
      const unsigned order = order_of(p.share[k]);
      if (shift == 24 || order >> (shift + 8) == prefix) atomicAdd(counts + (order >> shift & 255), 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      while (digit > 0 && counts[digit] < left) left -= counts[digit--];
      prefix_shared = prefix << 8 | static_cast<unsigned>(digit);
      left_shared = left;
    }
    __syncthreads();
    prefix = prefix_shared;
    left = left_shared;
  }
  // In their order: those above the smallest, and of its equals as many as are left.
  int chosen = 0, equals = 0;
  for (int first = 0; first < p.V; first += kChooseBlock) {
    const int k = first + static_cast<int>(threadIdx.x);
    const unsigned order = k < p.V ? order_of(p.share[k]) : 0;
    const auto place_of = [&](bool holds, int* total) {
      const unsigned votes = __ballot_sync(kFullMask, holds);
      __syncthreads();
      if (lane == 0) places[warp] = __popc(votes);
      __syncthreads();
      int place = __popc(votes & ((1u << lane) - 1)), all = 0;
      for (int w = 0; w < kChooseBlock / kWarp; ++w) {
        if (w < warp) place += places[w];
        all += places[w];
      }
      *total = all;
      return place;
    };
    int of_equals, of_chosen;
    const bool equal = k < p.V && order == prefix;
    const bool above = k < p.V && order > prefix;
    const int before = equals + place_of(equal, &of_equals);  // all threads take part in the votes
    const bool last = equal && before < left;
    const int place = chosen + place_of(above || last, &of_chosen);
    if (above || last) {
      p.chosen[place] = k;
      p.share[k] = 0;
    }
    chosen += of_chosen;
    equals += of_equals;
  }
}

// weights (kSlices, groups, H): a slice's part of the sum of share * weight; largest (kSlices, groups, H): of |weight|.
template <typename S, typename Acc>
__global__ void __launch_bounds__(kBlock)
    group_weight_kernel(const __grid_constant__ Pilots<S, Acc> p, Acc* weights, Acc* largest) {
  const int h = blockIdx.x * kBlock + threadIdx.x, m = blockIdx.y, slice = blockIdx.z;
  if (h >= p.H) return;
  const int tokens = (p.V + p.D - m + p.groups - 1) / p.groups, each = (tokens + kSlices - 1) / kSlices;
  Acc sum = 0, most = 0;
#pragma unroll 8
  for (int i = slice * each; i < min(tokens, (slice + 1) * each); ++i) {
    const int k = i * p.groups + m;
    const Acc w = widen(p.weight[static_cast<int64_t>(k) * p.H + h]);
    const Acc share = k < p.V ? p.share[k] : Acc(0);
    sum += share == Acc(0) ? Acc(0) : share * w;
    most = fmax(most, fabs(w));
  }
  const int64_t out = (static_cast<int64_t>(slice) * p.groups + m) * p.H + h;
  weights[out] = sum;
  largest[out] = most;
}

// The slices together, and the sums of a group: a block a group, and one for the column that bounds the rounding.
template <typename S, typename Acc>
__global__ void __launch_bounds__(kBlock)
    group_sums_kernel(const __grid_constant__ Pilots<S, Acc> p, const Acc* weights, const Acc* largest) {
  const auto add = [](Acc a, Acc b) { return a + b; };
  const int m = blockIdx.x;
  if (m < p.groups) {
    for (int h = threadIdx.x; h < p.H; h += kBlock) {
      Acc sum = 0;
      for (int slice = 0; slice < kSlices; ++slice) {
        sum += weights[(static_cast<int64_t>(slice) * p.groups + m) * p.H + h];
      }
      p.group_weight[static_cast<int64_t>(m) * p.H + h] = sum;
    }
    Acc share = 0, share_log = 0, share_bias = 0;
    for (int k = m + threadIdx.x * p.groups; k < p.V; k += kBlock * p.groups) {
      const Acc q = p.share[k];
      if (q == Acc(0)) continue;
      share += q;
      share_log += q * log(q);
      share_bias += q * p.bias[k];
    }
    share = block_reduce<kBlock>(share, add);
    share_log = block_reduce<kBlock>(share_log, add);
    share_bias = block_reduce<kBlock>(share_bias, add);
    if (threadIdx.x > 0) return;
    p.group_sums[m] = share;
    p.group_sums[p.groups + m] = share_log;
    p.group_sums[2 * p.groups + m] = share_bias;
    return;
  }
  const auto most = [](Acc a, Acc b) { return fmax(a, b); };
  Acc bias = 0, all = 0;
  for (int k = threadIdx.x; k < p.V + p.D; k += kBlock) bias = fmax(bias, fabs(p.bias[k]));
  bias = block_reduce<kBlock>(bias, most);
  for (int h = threadIdx.x; h < p.H; h += kBlock) {
    Acc here = 0;
    for (int i = 0; i < kSlices * p.groups; ++i) here = fmax(here, largest[static_cast<int64_t>(i) * p.H + h]);
    p.rounding[h] = rounding_weight(p, here);
    all += rounding_bias(p, here);
  }
  all = block_reduce<kBlock>(all, add);
  if (threadIdx.x == 0) p.rounding[p.H] = all + (bias < static_cast<Acc>(INFINITY) ? bias : Acc(0));
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::pilots(const Tensor& like, const Pilots<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  const cuda::LaunchScope scope(like);
  const ScalarType type = accumulate_type(like.scalar_type());
  const int64_t of_groups = static_cast<int64_t>(cuda::kSlices) * p.groups * p.H;
  const int64_t of_tokens = static_cast<int64_t>(cuda::kSlices) * p.V;
  Tensor workspace = empty_on(like, {p.n + of_tokens + 2 * of_groups}, type);
  Acc* const lse = static_cast<Acc*>(workspace.mutable_data_ptr());
  Acc *const means = lse + p.n, *const weights = means + of_tokens, *const largest = weights + of_groups;
  const dim3 of_columns(cuda::blocks_for(p.V, cuda::kBlock), cuda::kSlices);
  const dim3 of_weights(cuda::blocks_for(p.H, cuda::kBlock), p.groups, cuda::kSlices);
  cuda::pilot_lse_kernel<<<p.n, cuda::kBlock, 0, scope.stream()>>>(p, lse);
  cuda::pilot_mean_kernel<<<of_columns, cuda::kBlock, 0, scope.stream()>>>(p, lse, means);
  cuda::choose_kernel<<<1, cuda::kChooseBlock, 0, scope.stream()>>>(p, means);
  cuda::group_weight_kernel<<<of_weights, cuda::kBlock, 0, scope.stream()>>>(p, weights, largest);
  cuda::group_sums_kernel<<<p.groups + 1, cuda::kBlock, 0, scope.stream()>>>(p, weights, largest);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) template void Cuda::pilots<S>(const Tensor&, const Pilots<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
