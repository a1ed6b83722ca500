// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3, and the gradient of its logits, eq. 7-9
// (equations: lattice.cu).
//
// Both kernels move one row of logits each way at most and are bound by that. A row of up to kWarpRow bytes belongs to
// one warp, kRowsPerBlock of them to a block; a longer row to a block of kLongWarps warps, so that enough 16-byte loads
// are in flight either way. Offsets within a row are int, offsets of rows int64. Sums are float32 (float64 for float64
// logits); the occupancies come from float64 alpha, beta and LL, whose sum cancels. Padding is zero-filled and never
// read; neither is a row whose occupancy is exactly 0.
#include "../tdt_loss_common/occupancy.h"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kRowsPerBlock = 8;    // rows of one warp each
constexpr int kLongWarps = 8;       // warps of a long row where rows are few
constexpr int kLongRow = 320 * 16;  // bytes
constexpr int kEnoughRows = 8192;   // with as many rows a warp each fills the GPU, whatever their length
constexpr int kUnroll = 4;          // vectors a thread has in flight

template <int kWarps>
constexpr int block_rows() {
  return kWarps == 1 ? kRowsPerBlock : 1;
}
template <int kWarps>
constexpr int block_threads() {
  return block_rows<kWarps>() * kWarps * kWarp;
}
// Blocks per multiprocessor to compile for: 32 warps, which leaves 64 registers a thread. float64 needs more.
template <typename S>
constexpr int min_blocks() {
  return sizeof(S) == 8 ? 2 : 4;
}

// log(sum of exp) over a row by its kWarps * 32 threads; every thread gets it.
template <typename S, int kWarps>
__device__ accumulate_t<S> row_logsumexp(const S* x, int n, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kThreads = kWarps * kWarp, kSize = Vector<S>::kSize;
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

  lse.merge_warp();
  if constexpr (kWarps > 1) {
    __shared__ Acc max[kWarps], sum[kWarps];
    if (thread % kWarp == 0) {
      max[thread / kWarp] = lse.max;
      sum[thread / kWarp] = lse.sum;
    }
    __syncthreads();
    lse = LogSumExp<Acc>();
    const int lane = thread % kWarp;
    if (lane < kWarps) {
      lse.max = max[lane];
      lse.sum = sum[lane];
    }
    lse.merge_warp();
  }
  return lse.value();
}

template <typename S, int kWarps>
__global__ void __launch_bounds__(block_threads<kWarps>(), min_blocks<S>())
    log_probs_kernel(const __grid_constant__ Batch batch, const __grid_constant__ LogitRows<S> logits,
                     accumulate_t<S>* node_lp, int blank, accumulate_t<S> sigma) {
  using Acc = accumulate_t<S>;
  const int thread = threadIdx.x % (kWarps * kWarp);
  const int64_t node = static_cast<int64_t>(blockIdx.x) * block_rows<kWarps>() + threadIdx.x / (kWarps * kWarp);
  if (node >= batch.nodes()) return;
  const auto [b, t, u] = batch.node_at(node);
  const Extent extent = batch.extent(b);
  const int R = record_size(batch.D);
  Acc* record = node_lp + node * R;
  if (!extent.has(t, u)) {
    for (int i = thread; i < R; i += kWarps * kWarp) record[i] = Acc(0);
    return;
  }

  // Everything but the row itself is asked for first, to arrive while the row does.
  const S* x = logits.tokens.row(b, t, u);
  const S* z = logits.durations.row(b, t, u);
  const int y = u < extent.U ? batch.label(b, u) : -1;
  const Acc x_blank = widen(x[blank]);
  const Acc x_label = y < 0 ? negative_infinity<Acc>() : widen(x[y]);
  const int lane = thread % kWarp;
  Acc z_lane[2];  // durations lane and lane + 32
#pragma unroll
  for (int k = 0; k < 2; ++k)
    z_lane[k] = lane + k * kWarp < batch.D ? widen(z[lane + k * kWarp]) : negative_infinity<Acc>();

  const Acc lse = row_logsumexp<S, kWarps>(x, batch.V, thread);
  if (thread >= kWarp) return;  // the record is one warp's
  LogSumExp<Acc> durations;
  durations.add(z_lane);
  durations.merge_warp();
  const Acc lse_z = durations.value();

  if (lane == kLse) record[kLse] = lse;
  if (lane == kBlankLp) record[kBlankLp] = x_blank - lse - sigma;                                     // eq. 1
  if (lane == kLabelLp) record[kLabelLp] = y < 0 ? negative_infinity<Acc>() : x_label - lse - sigma;  // eq. 2
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int i = lane + k * kWarp;
    if (i < R - kDurLp) record[kDurLp + i] = i < batch.D ? z_lane[k] - lse_z : Acc(0);  // eq. 3
  }
}

template <typename S, int kWarps>
__device__ void fill_row(S* out, int n, S value, int thread) {
  constexpr int kThreads = kWarps * kWarp, kSize = Vector<S>::kSize;
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

  __device__ __forceinline__ Acc softmax_part(Acc x) const { return exp_of(x - lse) * scaled_G; }
  __device__ __forceinline__ Acc operator()(Acc x, int v) const {
    return softmax_part(x) - (v == blank ? scaled_blank : Acc(0)) - (v == label ? scaled_label : Acc(0));
  }
};

// The row's softmax part by vectors; the columns of blank and label are then written again by the thread that wrote
// them before, which keeps every test for them out of the loop. `out` may be `x`.
template <typename S, int kWarps>
__device__ void gradient_row(const S* x, S* out, int n, const TokenGradient<accumulate_t<S>>& gradient, int thread) {
  constexpr int kThreads = kWarps * kWarp, kSize = Vector<S>::kSize;
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

  if (thread < split.head) out[thread] = narrow<S>(gradient.softmax_part(widen(x[thread])));
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
        Vector<S>::pack(values).store(out + split.head + (i + k * kThreads) * kSize);
      }
    }
  }
  if (thread < n - split.tail) {
    out[split.tail + thread] = narrow<S>(gradient.softmax_part(widen(x[split.tail + thread])));
  }
  if (owns_blank) out[gradient.blank] = narrow<S>(gradient(widen(at_blank), gradient.blank));
  if (owns_label) out[gradient.label] = narrow<S>(gradient(widen(at_label), gradient.label));
}

template <typename S, int kWarps>
__global__ void __launch_bounds__(block_threads<kWarps>(), min_blocks<S>())
    gradient_kernel(const __grid_constant__ Batch batch, const __grid_constant__ Durations durations,
                    const __grid_constant__ LogitRows<S> logits, const __grid_constant__ LogitRows<S> grad,
                    const __grid_constant__ Saved<accumulate_t<S>> saved, int blank) {
  using Acc = accumulate_t<S>;
  const int thread = threadIdx.x % (kWarps * kWarp), lane = thread % kWarp;
  const int64_t node = static_cast<int64_t>(blockIdx.x) * block_rows<kWarps>() + threadIdx.x / (kWarps * kWarp);
  if (node >= batch.nodes()) return;
  const Node at = batch.node_at(node);
  const auto [b, t, u] = at;
  const Extent extent = batch.extent(b);
  const double ll = saved.ll[b];
  const bool valid = extent.has(t, u);
  const Acc* record = saved.node_lp + node * record_size(batch.D);

  // Lane i weighs duration i (and i + 32). Every warp of a long row does so for itself: cheaper than to wait for one.
  Acc G_blank = 0, G_label = 0, G_i[2] = {0, 0}, dur_lp[2] = {0, 0};
  if (valid && isfinite(ll)) {
    const double from = saved.alpha[node] - ll;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = lane + k * kWarp;
      if (i < batch.D) {
        dur_lp[k] = record[kDurLp + i];
        const auto [blank_occ, label_occ] =
            arc_occupancy(batch, extent, at, from, record, dur_lp[k], durations.d[i], saved.beta);
        G_blank += blank_occ;
        G_label += label_occ;
        G_i[k] = blank_occ + label_occ;
      }
    }
  }
  G_blank = warp_sum(G_blank);
  G_label = warp_sum(G_label);
  const Acc G = G_blank + G_label;
  const Acc scale = saved.grad_losses[b];
  const bool nan = valid && isnan(ll);

  S* grad_x = grad.tokens.row(b, t, u);
  if (G == 0) {  // padding, no alignment through this node, or a malformed sample: x is not read
    fill_row<S, kWarps>(grad_x, batch.V, narrow<S>(nan ? Acc(NAN) : Acc(0)), thread);
  } else {
    const int label = u < extent.U ? batch.label(b, u) : -1;
    const TokenGradient<Acc> gradient{record[kLse], G * scale, G_blank * scale, G_label * scale, blank, label};
    gradient_row<S, kWarps>(logits.tokens.row(b, t, u), grad_x, batch.V, gradient, thread);
  }
  if (thread >= kWarp) return;
  S* grad_z = grad.durations.row(b, t, u);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int i = lane + k * kWarp;
    if (i >= batch.D) continue;
    const Acc value = G == 0 ? Acc(0) : (exp(dur_lp[k]) * G - G_i[k]) * scale;  // eq. 9
    grad_z[i] = narrow<S>(nan ? Acc(NAN) : value);
  }
}

// Calls f with the number of warps for each row of n elements.
template <typename S, typename F>
void with_row_warps(const Batch& batch, F&& f) {
  if (batch.nodes() >= kEnoughRows || batch.V * sizeof(S) < kLongRow) {
    f(std::integral_constant<int, 1>{});
  } else {
    f(std::integral_constant<int, kLongWarps>{});
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::log_probs(const Tensor& like, const Batch& batch, const LogitRows<S>& logits, accumulate_t<S>* node_lp,
                     int blank, double sigma) {
  const cuda::LaunchScope scope(like);
  cuda::with_row_warps<S>(batch, [&](auto warps) {
    constexpr int kWarps = decltype(warps)::value;
    const unsigned blocks = cuda::blocks_for(batch.nodes(), cuda::block_rows<kWarps>());
    cuda::log_probs_kernel<S, kWarps><<<blocks, cuda::block_threads<kWarps>(), 0, scope.stream()>>>(
        batch, logits, node_lp, blank, static_cast<accumulate_t<S>>(sigma));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename S>
void Cuda::gradient(const Tensor& like, const Batch& batch, const Durations& durations, const LogitRows<S>& logits,
                    const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved, int blank) {
  const cuda::LaunchScope scope(like);
  cuda::with_row_warps<S>(batch, [&](auto warps) {
    constexpr int kWarps = decltype(warps)::value;
    const unsigned blocks = cuda::blocks_for(batch.nodes(), cuda::block_rows<kWarps>());
    cuda::gradient_kernel<S, kWarps>
        <<<blocks, cuda::block_threads<kWarps>(), 0, scope.stream()>>>(batch, durations, logits, grad, saved, blank);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                                           \
  template void Cuda::log_probs<S>(const Tensor&, const Batch&, const LogitRows<S>&, accumulate_t<S>*, int, double); \
  template void Cuda::gradient<S>(const Tensor&, const Batch&, const Durations&, const LogitRows<S>&,                \
                                  const LogitRows<S>&, const Saved<accumulate_t<S>>&, int);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
