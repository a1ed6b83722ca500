// The band on the GPU (band.h): the head narrowed for each sample, a block a column; narrow rows to upper bounds of
// their nodes, half a warp a
// row; which node a row is of.
#include "../tdt_loss_common/band.h"

#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kRowLanes = 16;  // threads of a narrow row

// Of a group's column: the labels of the sample that are in it, found by all threads, are taken out by all threads.
template <typename S>
__device__ void write_centroid(const BoundColumns<S, accumulate_t<S>>& p, int b, int m, int64_t column,
                               int64_t residual) {
  using Acc = accumulate_t<S>;
  extern __shared__ int own[];  // the labels in the group, as many as `count`
  __shared__ int count;
  const int U = p.batch.extent(b).U;
  if (threadIdx.x < kWarp) {  // in their order, so that the sums have the same bits always
    int found = 0;
    for (int first = 0; first < U; first += kWarp) {
      const int u = first + static_cast<int>(threadIdx.x);
      const int y = u < U ? p.batch.label(b, u) : -1;
      const bool is_own = y >= 0 && p.in_group(y, m) && is_new_label(p.batch, b, u, p.blank);
      const unsigned votes = __ballot_sync(kFullMask, is_own);
      if (is_own) own[found + __popc(votes & ((1u << threadIdx.x) - 1))] = y;
      found += __popc(votes);
    }
    if (threadIdx.x == 0) count = found;
  }
  __syncthreads();
  const Acc whole = p.group_sums[m];
  GroupSums<Acc> sums{whole, p.group_sums[p.layout.groups + m], p.group_sums[2 * p.layout.groups + m]};
  for (int i = 0; i < count; ++i) sums.remove(p.share[own[i]], p.bias ? p.bias[own[i]] : Acc(0));
  const bool usable = sums.usable(whole);
  for (int h = threadIdx.x; h < p.H; h += kBlock) {
    Acc value = p.group_weight[static_cast<int64_t>(m) * p.H + h];
    for (int i = 0; i < count; ++i) {
      value -= p.share[own[i]] * widen(p.weight[static_cast<int64_t>(own[i]) * p.H + h]);
    }
    value = usable ? value / sums.share : Acc(0);
    const S rounded = narrow<S>(value);
    p.out_weight[column * p.H + h] = rounded;
    if (p.layout.split) p.out_weight[residual * p.H + h] = narrow<S>(value - widen(rounded));
  }
  if (threadIdx.x > 0) return;
  p.out_bias[column] = usable ? sums.bias() : negative_infinity<Acc>();
  p.out_counted[column] = negative_infinity<Acc>();
  if (!p.layout.split) return;
  p.out_bias[residual] = 0;
  p.out_counted[residual] = negative_infinity<Acc>();
}

template <typename S>
__global__ void __launch_bounds__(kBlock)
    bound_columns_kernel(const __grid_constant__ BoundColumns<S, accumulate_t<S>> p) {
  using Acc = accumulate_t<S>;
  const BoundLayout& layout = p.layout;
  const int c = static_cast<int>(blockIdx.x % p.out_columns), b = static_cast<int>(blockIdx.x / p.out_columns);
  const int64_t before = static_cast<int64_t>(b) * p.out_columns, column = before + c;
  if (c >= layout.centroid(0) && c < layout.summed()) {
    const int m = c - layout.centroid(0);
    return write_centroid(p, b, m, column, before + layout.residual(m));
  }
  if (c >= layout.summed() && c < layout.rounding()) return;  // with their centroids

  // The column of the head that goes here, or none.
  int from = -1;
  bool counts = false;
  if (c == 0) {
    from = p.blank;
    counts = true;
  } else if (c < layout.first_frequent()) {
    const int u = c - 1;
    if (u < p.batch.extent(b).U) from = p.batch.label(b, u);
    counts = from >= 0 && is_new_label(p.batch, b, u, p.blank);
  } else if (c < layout.centroid(0)) {
    from = p.frequent[c - layout.first_frequent()];
    bool is_label = false;
    const int U = p.batch.extent(b).U;
    for (int u = threadIdx.x; u < U; u += kBlock) is_label = is_label || p.batch.label(b, u) == from;
    counts = !__syncthreads_or(is_label);
  } else if (c >= layout.duration(0) && c < layout.columns()) {
    from = p.batch.V + c - layout.duration(0);
  }
  const bool rounding = c == layout.rounding();
  const S* const weight = p.weight + static_cast<int64_t>(from) * p.H;
  for (int h = threadIdx.x; h < p.H; h += kBlock) {
    S value = narrow<S>(Acc(0));
    if (from >= 0) value = weight[h];
    if (rounding) value = narrow<S>(p.rounding[h]);
    p.out_weight[column * p.H + h] = value;
  }
  if (threadIdx.x > 0) return;
  Acc bias = 0;
  if (from >= 0 && p.bias) bias = p.bias[from];
  if (rounding) bias = p.rounding[p.H];
  p.out_bias[column] = bias;
  p.out_counted[column] = counts ? bias : negative_infinity<Acc>();
}

// The largest of some numbers, and the sum of exp of the rest of each, as a thread or several have it.
template <typename Acc>
struct RunningSum {
  Acc max = negative_infinity<Acc>(), sum = 0;

  template <int n>
  __device__ __forceinline__ void add(const Acc (&x)[n]) {
    Acc own = x[0];
#pragma unroll
    for (int j = 1; j < n; ++j) own = fmax(own, x[j]);
    const Acc next = fmax(max, own), reference = next == negative_infinity<Acc>() ? Acc(0) : next;
    sum *= exp_of(max - reference);
#pragma unroll
    for (int j = 0; j < n; ++j) sum += exp_of(x[j] - reference);
    max = next;
  }
  // Over the lanes of a group, for all of them.
  template <int kThreads>
  __device__ __forceinline__ Acc log_sum_exp(const RowGroup<kThreads>& group) const {
    Acc most[1] = {max};
    group.max(most);
    const Acc reference = most[0] == negative_infinity<Acc>() ? Acc(0) : most[0];
    return most[0] + log(group.sum(sum * exp_of(max - reference)));
  }
};

// NaN does not count as a maximum but makes its own sum NaN, and so that of all.
template <typename Acc>
__global__ void __launch_bounds__(kBlock) bound_rows_kernel(const __grid_constant__ BoundRows<Acc> p) {
  constexpr int kSize = Vector<Acc>::kSize;
  const BoundLayout& layout = p.layout;
  const RowGroup<kRowLanes> group;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kBlock / kRowLanes) + threadIdx.x / kRowLanes;
  if (i >= p.list.n) return;
  const int64_t node = p.list.at(p.batch, i);
  const Node at = p.batch.node_at(node);
  const Extent extent = p.batch.extent(at.b);
  if (!extent.has(at.t, at.u)) return;
  const Acc* const row = p.rows + i * p.stride;
  const Acc* const bias = p.bias + static_cast<int64_t>(at.b) * p.stride;
  const Acc* const counted = p.counted + static_cast<int64_t>(at.b) * p.stride;
  const auto logit = [&](int c) { return row[c] + bias[c]; };

  RunningSum<Acc> tokens;
#pragma unroll 2
  for (int c = group.lane * kSize; c < layout.centroid(0); c += kRowLanes * kSize) {  // of what follows counts none
    const Vector<Acc> x = Vector<Acc>::load(row + c);
    const Vector<Acc> own{__ldg(reinterpret_cast<const uint4*>(counted + c))};
    Acc values[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = x.at(j) + own.at(j);
    tokens.add(values);
  }
  for (int m = group.lane; m < layout.groups; m += kRowLanes) {
    tokens.add({logit(layout.centroid(m)) + (layout.split ? row[layout.residual(m)] : Acc(0))});
  }
  RunningSum<Acc> durations;
  for (int d = group.lane; d < layout.D; d += kRowLanes) durations.add({logit(layout.duration(d))});
  const Acc lse = tokens.log_sum_exp(group), lse_durations = durations.log_sum_exp(group);
  const Acc margin = p.rounding * logit(layout.rounding());
  if (group.lane == 0) write_bound(p, node, at, extent, {logit(0), logit(layout.label(at.u)), lse, margin});
  Acc* const out = p.node_lp + node * record_size(p.batch.D) + kDurLp;
  for (int d = group.lane; d < layout.D; d += kRowLanes) out[d] = logit(layout.duration(d)) - lse_durations + margin;
}

__global__ void list_rows_kernel(const __grid_constant__ RowTable table, int64_t n, int32_t* nodes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i < n) nodes[i] = table.node(i);
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::bound_columns(const Tensor& like, const BoundColumns<S, accumulate_t<S>>& p) {
  const cuda::LaunchScope scope(like);
  const auto blocks = static_cast<unsigned>(static_cast<int64_t>(p.out_columns) * p.batch.B);
  const size_t shared = sizeof(int) * std::max(1, p.batch.max_U1 - 1);
  STD_CUDA_CHECK(cudaFuncSetAttribute(cuda::bound_columns_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)));
  cuda::bound_columns_kernel<S><<<blocks, cuda::kBlock, shared, scope.stream()>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename Acc>
void Cuda::bound_rows(const Tensor& like, const BoundRows<Acc>& p) {
  const cuda::LaunchScope scope(like);
  cuda::bound_rows_kernel<Acc>
      <<<cuda::blocks_for(p.list.n, cuda::kBlock / cuda::kRowLanes), cuda::kBlock, 0, scope.stream()>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
void Cuda::list_rows(const Tensor& like, const RowTable& table, int64_t n, int32_t* nodes) {
  const cuda::LaunchScope scope(like);
  cuda::list_rows_kernel<<<cuda::blocks_for(n, cuda::kBlock), cuda::kBlock, 0, scope.stream()>>>(table, n, nodes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) \
  template void Cuda::bound_columns<S>(const Tensor&, const BoundColumns<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)
#define TDT_INSTANTIATE_ACCUMULATE(S, _) template void Cuda::bound_rows<S>(const Tensor&, const BoundRows<S>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE_ACCUMULATE)

}  // namespace tdt
