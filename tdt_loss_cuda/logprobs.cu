// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3, and the gradient of its token logits, eq. 8
// (equations: lattice.cu).
//
// Both kernels move one row of logits each way at most and are bound by that, if what is done once per row stays small:
// so as few threads as possible share a row, kThreads of them. 8 for a short row, forward only (rows with and without
// occupancy take different ways backward, which one warp would take in turn); a warp for a longer one; a block only
// where rows are too few to fill the GPU otherwise. Offsets within a row are int, offsets of rows int64. Sums are
// float32 (float64 for float64 logits). Padding is zero-filled and never read; neither is a row whose occupancy is
// exactly 0.
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;         // threads
constexpr int kUnroll = 4;          // vectors a thread has in flight
constexpr int kShortRow = 8192;     // bytes
constexpr int kFillsGpu = 1 << 18;  // threads: one wave of the largest GPUs

// Blocks per multiprocessor to compile for: 32 warps, which leaves 64 registers a thread. float64 needs more.
template <typename S>
constexpr int min_blocks() {
  return sizeof(S) == 8 ? 2 : 4;
}

// log(sum of exp) over a row; every thread of the group gets it.
template <typename S, int kThreads>
__device__ accumulate_t<S> row_logsumexp(const S* x, int n, const RowGroup<kThreads>& group) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize;
  const int thread = group.thread;
  const RowSplit<S> split(x, n);
  LogSumExp<Acc> lse;
  const Acc ends[2] = {thread < split.head ? widen(x[thread]) : negative_infinity<Acc>(),
                       thread < n - split.tail ? widen(x[split.tail + thread]) : negative_infinity<Acc>()};
  for (int i = thread; i < split.vectors; i += kThreads * kUnroll) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      loaded[k] = Vector<S>::of(negative_infinity<Acc>());
      if (i + k * kThreads < split.vectors) loaded[k] = Vector<S>::load(x + split.head + (i + k * kThreads) * kSize);
    }
    Acc values[kUnroll * kSize];
#pragma unroll
    for (int j = 0; j < kUnroll * kSize; ++j) values[j] = loaded[j / kSize].at(j % kSize);
    lse.add(values);
  }
  lse.add(ends);

  lse.merge(group);
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ Acc max[kWarps], sum[kWarps];
    if (group.lane == 0) {
      max[thread / kWarp] = lse.max;
      sum[thread / kWarp] = lse.sum;
    }
    __syncthreads();
    lse = LogSumExp<Acc>();
    if (group.lane < kWarps) {
      lse.max = max[group.lane];
      lse.sum = sum[group.lane];
    }
    lse.merge(group);
  }
  return lse.value();
}

// The row of this thread.
template <int kThreads>
__device__ int64_t group_row() {
  return static_cast<int64_t>(blockIdx.x) * (kBlock / kThreads) + threadIdx.x / kThreads;
}

template <typename S, int kThreads>
__global__ void __launch_bounds__(kBlock, min_blocks<S>())
    log_probs_kernel(const __grid_constant__ Batch batch, const NodeList list,
                     const __grid_constant__ LogitRows<S> logits, accumulate_t<S>* node_lp,
                     const __grid_constant__ Emission emission) {
  using Acc = accumulate_t<S>;
  const RowGroup<kThreads> group;
  const int64_t row = group_row<kThreads>();
  if (row >= list.n) return;
  const int64_t node = list.at(row);
  const Node at = batch.node_at(node);
  const auto [b, t, u] = at;
  const Extent extent = batch.extent(b);
  const int R = record_size(batch.D);
  Acc* record = node_lp + node * R;
  if (!extent.has(t, u)) {
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

  const Acc lse = row_logsumexp<S, kThreads>(x, batch.V, group);
  if (group.thread >= kWarp) return;  // the record is one warp's
  LogSumExp<Acc> durations;
  durations.add(first);
  for (int field = group.lane + group.kLanes; field < R; field += group.kLanes) durations.add({duration_logit(field)});
  durations.merge(group);
  const Acc lse_z = durations.value();

  const Acc sigma = static_cast<Acc>(emission.sigma);
  const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - t));
  for (int field = group.lane; field < R; field += group.kLanes) {
    Acc value = field == group.lane ? first[0] - lse_z : duration_logit(field) - lse_z;  // eq. 3
    if (field == kLse) value = lse;
    if (field == kBlankLp) value = x_blank - lse - sigma;                                             // eq. 1
    if (field == kLabelLp) value = y < 0 ? negative_infinity<Acc>() : x_label - lse - sigma + delay;  // eq. 2
    record[field] = field < kDurLp + batch.D ? value : Acc(0);
  }
}

template <typename S, int kThreads>
__device__ void fill_row(S* out, int n, S value, int thread) {
  constexpr int kSize = Vector<S>::kSize;
  const RowSplit<S> split(out, n);
  const Vector<S> filled = Vector<S>::of(widen(value));
  if (thread < split.head) out[thread] = value;
  for (int i = thread; i < split.vectors; i += kThreads) filled.store(out + split.head + i * kSize);
  if (thread < n - split.tail) out[split.tail + thread] = value;
}

// eq. 8: softmax(x)_v * G, less G_blank and G_label at their columns, times the upstream gradient.
template <typename Acc>
struct TokenGradient {
  Acc lse, scaled_G, scaled_blank, scaled_label;
  int blank, label;  // label -1: no such column
  Acc limit;         // of every entry: clamp times the upstream gradient, or +inf

  __device__ __forceinline__ Acc clamped(Acc x) const { return x > limit ? limit : x < -limit ? -limit : x; }
  __device__ __forceinline__ Acc softmax_part(Acc x) const { return exp_of(x - lse) * scaled_G; }
  __device__ __forceinline__ Acc operator()(Acc x, int v) const {
    return clamped(softmax_part(x) - (v == blank ? scaled_blank : Acc(0)) - (v == label ? scaled_label : Acc(0)));
  }
};

// The row's softmax part by vectors; the columns of blank and label are then written again by the thread that wrote
// them before, which keeps every test for them out of the loop. `out` may be `x`.
template <typename S, int kThreads>
__device__ void gradient_row(const S* x, S* out, int n, const TokenGradient<accumulate_t<S>>& gradient, int thread) {
  constexpr int kSize = Vector<S>::kSize;
  const RowSplit<S> split(x, n);
  if (reinterpret_cast<uintptr_t>(x) % 16 != reinterpret_cast<uintptr_t>(out) % 16) {  // no common boundary
    for (int v = thread; v < n; v += kThreads) out[v] = narrow<S>(gradient(widen(x[v]), v));
    return;
  }
  const bool owns_blank = split.owner(gradient.blank, kThreads) == thread;
  const bool owns_label = gradient.label >= 0 && split.owner(gradient.label, kThreads) == thread;
  S at_blank{}, at_label{};
  if (owns_blank) at_blank = x[gradient.blank];
  if (owns_label) at_label = x[gradient.label];

  if (thread < split.head) out[thread] = narrow<S>(gradient.clamped(gradient.softmax_part(widen(x[thread]))));
  const bool clamps = gradient.limit < static_cast<accumulate_t<S>>(INFINITY);
  for (int i = thread; i < split.vectors; i += kThreads * kUnroll) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * kThreads < split.vectors) loaded[k] = Vector<S>::load(x + split.head + (i + k * kThreads) * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * kThreads < split.vectors) {
        accumulate_t<S> values[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[j] = gradient.softmax_part(loaded[k].at(j));
        if (clamps) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) values[j] = gradient.clamped(values[j]);
        }
        Vector<S>::pack(values).store(out + split.head + (i + k * kThreads) * kSize);
      }
    }
  }
  if (thread < n - split.tail) {
    out[split.tail + thread] = narrow<S>(gradient.clamped(gradient.softmax_part(widen(x[split.tail + thread]))));
  }
  if (owns_blank) out[gradient.blank] = narrow<S>(gradient(widen(at_blank), gradient.blank));
  if (owns_label) out[gradient.label] = narrow<S>(gradient(widen(at_label), gradient.label));
}

template <typename S, int kThreads>
__global__ void __launch_bounds__(kBlock, min_blocks<S>())
    token_gradient_kernel(const __grid_constant__ Batch batch, const NodeList list,
                          const __grid_constant__ Rows<S> logits, const __grid_constant__ Rows<S> grad,
                          const accumulate_t<S>* node_lp, const NodeSums<accumulate_t<S>>* sums,
                          const __grid_constant__ Upstream<accumulate_t<S>> upstream,
                          const __grid_constant__ Shaping<accumulate_t<S>> shaping) {
  using Acc = accumulate_t<S>;
  const RowGroup<kThreads> group;
  const int64_t row = group_row<kThreads>();
  if (row >= list.n) return;
  const int64_t node = list.at(row);
  const Node at = batch.node_at(node);
  const NodeSums<Acc> G = sums[row];
  const Acc lse = node_lp[node * record_size(batch.D) + kLse];
  const Acc scale = upstream.at(at.b);
  const Acc G_both = G.blank + G.label;
  S* grad_x = grad.row(row, at);
  if (G_both == 0 || isnan(G_both)) {
    fill_row<S, kThreads>(grad_x, batch.V, narrow<S>(G_both), group.thread);
    return;
  }
  const int label = G.label != 0 ? batch.label(at.b, at.u) : -1;
  const TokenGradient<Acc> gradient{lse,           G_both * scale, G.blank * scale,     G.label * scale,
                                    shaping.blank, label,          shaping.limit(scale)};
  gradient_row<S, kThreads>(logits.row(row, at), grad_x, batch.V, gradient, group.thread);
}

// Calls f with the number of threads for each of `rows` rows of V: kFewest, or as many more as fill the GPU.
template <typename S, int kFewest, typename F>
void with_row_threads(int V, int64_t rows, F&& f) {
  const bool is_short = V * static_cast<int64_t>(sizeof(S)) < kShortRow;
  if (is_short && rows * kFewest >= kFillsGpu) {
    f(std::integral_constant<int, kFewest>{});
  } else if (is_short || rows * kWarp >= kFillsGpu) {
    f(std::integral_constant<int, kWarp>{});
  } else {
    f(std::integral_constant<int, kBlock>{});
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::log_probs(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                     accumulate_t<S>* node_lp, const Emission& emission) {
  const cuda::LaunchScope scope(like);
  cuda::with_row_threads<S, 8>(batch.V, list.n, [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads);
    cuda::log_probs_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, node_lp, emission);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename S>
void Cuda::token_gradient(const Tensor& like, const Batch& batch, const NodeList& list, const Rows<S>& logits,
                          const Rows<S>& grad, const accumulate_t<S>* node_lp, const NodeSums<accumulate_t<S>>* sums,
                          const Upstream<accumulate_t<S>>& upstream, const Shaping<accumulate_t<S>>& shaping) {
  const cuda::LaunchScope scope(like);
  cuda::with_row_threads<S, cuda::kWarp>(batch.V, list.n, [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads);
    cuda::token_gradient_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, grad, node_lp, sums, upstream, shaping);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                                            \
  template void Cuda::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&,                 \
                                   accumulate_t<S>*, const Emission&);                                                \
  template void Cuda::token_gradient<S>(const Tensor&, const Batch&, const NodeList&, const Rows<S>&, const Rows<S>&, \
                                        const accumulate_t<S>*, const NodeSums<accumulate_t<S>>*,                     \
                                        const Upstream<accumulate_t<S>>&, const Shaping<accumulate_t<S>>&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
