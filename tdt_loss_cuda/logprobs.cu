// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3 (equations: lattice.cu).
//
// A row is read once, and the kernel is bound by that if what is done once per row stays small: so as few threads as
// possible share a row, kThreads of them: 8 for a short row, a warp for a longer one, a block where rows are too few to
// fill the GPU otherwise. Offsets within a row are int, offsets of rows int64. Sums are float32 (float64 for float64
// logits). Padding is never read. Loops over the fields of a record mostly run once and are not unrolled.
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kFillsGpu = 1 << 18;  // threads: one wave of the largest GPUs

// Over a row; every thread of the group gets it.
template <typename S, int kThreads>
__device__ SumExp<accumulate_t<S>> row_sum_exp(const S* x, int n, const RowGroup<kThreads>& group) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize;
  const int thread = group.thread;
  const RowSplit<S> split(x, n);
  SumExp<Acc> row;
  const Acc ends[2] = {thread < split.head ? widen(x[thread]) : negative_infinity<Acc>(),
                       thread < n - split.tail ? widen(x[split.tail + thread]) : negative_infinity<Acc>()};
  constexpr int kStride = kThreads * kUnroll;
  const S* from = x + split.head + thread * kSize;
  for (int i = thread; i < split.vectors; i += kStride, from += kStride * kSize) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      loaded[k] = Vector<S>::of(negative_infinity<Acc>());
      if (i + k * kThreads < split.vectors) loaded[k] = Vector<S>::load(from + k * kThreads * kSize);
    }
    Acc values[kUnroll * kSize];
#pragma unroll
    for (int j = 0; j < kUnroll * kSize; ++j) values[j] = loaded[j / kSize].at(j % kSize);
    row.add(values);
  }
  row.add(ends);

  row.merge(group);
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ Acc parts[3][kWarps];
    if (group.lane == 0) {
      parts[0][thread / kWarp] = row.max;
      parts[1][thread / kWarp] = row.peak;
      parts[2][thread / kWarp] = row.rest;
    }
    __syncthreads();
    row = SumExp<Acc>();
    if (group.lane < kWarps) {
      row.max = parts[0][group.lane];
      row.peak = parts[1][group.lane];
      row.rest = parts[2][group.lane];
    }
    row.merge(group);
  }
  return row;
}

// The row of this thread.
template <int kThreads>
__device__ int64_t group_row() {
  return static_cast<int64_t>(blockIdx.x) * (kBlock / kThreads) + threadIdx.x / kThreads;
}

template <typename S, int kThreads>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    log_probs_kernel(const __grid_constant__ Batch batch, const NodeList list,
                     const __grid_constant__ LogitRows<S> logits,
                     const __grid_constant__ NodeRecords<accumulate_t<S>> out,
                     const __grid_constant__ Emission emission) {
  using Acc = accumulate_t<S>;
  const RowGroup<kThreads> group;
  const int64_t row = group_row<kThreads>();
  if (row >= list.n) return;
  const int64_t node = list.at(batch, row);
  const Node at = batch.node_at(node);
  const auto [b, t, u] = at;
  const Extent extent = batch.extent(b);
  const int R = record_size(batch.D);
  Acc* record = out.node_lp + node * R;
  if (!extent.has(t, u)) {
#pragma unroll 1
    for (int field = group.thread; field < R; field += kThreads) record[field] = Acc(0);
    return;
  }

  // Everything but the row itself is asked for first, to arrive while the row does. Lane l has field l of the record,
  // and l + kLanes and so on where there are many durations.
  const S* x = logits.tokens.row(row, at);
  const S* z = logits.durations.row(row, at);
  const auto duration_logit = [&](int field) {
    const int i = field - kDurLp;
    return i >= 0 && i < batch.D ? widen(z[i]) : negative_infinity<Acc>();
  };
  const int y = u < extent.U ? batch.label(b, u) : -1;
  const Acc x_blank = widen(x[emission.blank]);
  const Acc x_label = y < 0 ? negative_infinity<Acc>() : widen(x[y]);
  const Acc first[1] = {duration_logit(group.lane)};

  const SumExp<Acc> tokens = row_sum_exp<S, kThreads>(x, batch.V, group);
  if (group.thread >= kWarp) return;  // the record is one warp's
  SumExp<Acc> durations;
  durations.add(first);
#pragma unroll 1
  for (int field = group.lane + group.kLanes; field < R; field += group.kLanes) durations.add({duration_logit(field)});
  durations.merge(group);
  if (group.lane == 0) out.row_stats[node] = {tokens.max, tokens.sum()};

  const Acc sigma = static_cast<Acc>(emission.sigma);
  const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - t));
#pragma unroll 1
  for (int field = group.lane; field < R; field += group.kLanes) {
    const bool of_token = field < kDurLp;
    Acc logit = field == group.lane ? first[0] : duration_logit(field);
    if (of_token) logit = field == kBlankLp ? x_blank : x_label;
    SumExp<Acc> row_of_field = durations;
    if (of_token) row_of_field = tokens;
    Acc value = logit - row_of_field.max - row_of_field.log_sum();                    // eq. 3
    if (of_token) value -= sigma;                                                     // eq. 1
    if (field == kLabelLp) value = y < 0 ? negative_infinity<Acc>() : value + delay;  // eq. 2
    record[field] = field < kDurLp + batch.D ? value : Acc(0);
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::log_probs(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                     const NodeRecords<accumulate_t<S>>& out, const Emission& emission) {
  const cuda::LaunchScope scope(like);
  const auto launch = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads);
    cuda::log_probs_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, out, emission);
  };
  if (cuda::is_short_row<S>(batch.V) && list.n * 8 >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, 8>{});
  } else if (cuda::is_short_row<S>(batch.V) || list.n * cuda::kWarp >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, cuda::kWarp>{});
  } else {
    launch(std::integral_constant<int, cuda::kBlock>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                            \
  template void Cuda::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, \
                                   const NodeRecords<accumulate_t<S>>&, const Emission&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
