// The gradient of the logits on the GPU, eq. 7-9 (equations: lattice.cu).
//
// A row of token logits is read and written once, where it has occupancy, else only written, and the kernel is bound by
// that if what is done once per row stays small and nothing waits for it: so the threads of a block first work out the
// nodes of all its rows at once, eight a node, and then turn the rows one after another, a warp a short row, four warps
// a longer one, so that the block works on one stretch of memory at a time. The gradient of the duration logits is
// written beside the row, never apart from it: a sector of memory written in two parts costs as much as many.
//
// Offsets within a row are int, offsets of rows int64. The occupancies come from float64 alpha, beta and LL, whose sum
// cancels; what is made of them is float32 (float64 for float64 logits).
#include "../tdt_loss_common/occupancy.h"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kNodeLanes = 8;                // threads that work out a node
constexpr int kNodes = kBlock / kNodeLanes;  // nodes that a block works out at once
constexpr int kLongRowThreads = 4 * kWarp;   // that turn a row which is not short
constexpr int kLongRows = 2;                 // of a block: more would spread its reads and writes
static_assert(kLongRowThreads <= kBlock);

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
__device__ void gradient_row(const S* x, S* out, int n, const TokenGradient<accumulate_t<S>> gradient, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize;
  const RowSplit<S> split(x, n);
  if (reinterpret_cast<uintptr_t>(x) % 16 != reinterpret_cast<uintptr_t>(out) % 16) {  // no common boundary
    for (int v = thread; v < n; v += kThreads) out[v] = narrow<S>(gradient(widen(x[v]), v));
    return;
  }
  const bool owns_blank = split.owner(gradient.blank, kThreads) == thread;
  const bool owns_label = gradient.label >= 0 && split.owner(gradient.label, kThreads) == thread;
  const Acc at_blank = owns_blank ? widen(x[gradient.blank]) : Acc(0);
  const Acc at_label = owns_label ? widen(x[gradient.label]) : Acc(0);

  // Asked for before anything is stored: a load below a store waits for it, since they might be of one address.
  const Acc at_head = thread < split.head ? widen(x[thread]) : Acc(0);
  const Acc at_tail = thread < n - split.tail ? widen(x[split.tail + thread]) : Acc(0);
  const bool clamps = gradient.limit < static_cast<Acc>(INFINITY);
  for (int i = thread; i < split.vectors; i += kThreads * kUnroll) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * kThreads < split.vectors) loaded[k] = Vector<S>::load(x + split.head + (i + k * kThreads) * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (i + k * kThreads < split.vectors) {
        Acc values[kSize];
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
  if (thread < split.head) out[thread] = narrow<S>(gradient.clamped(gradient.softmax_part(at_head)));
  if (thread < n - split.tail) {
    out[split.tail + thread] = narrow<S>(gradient.clamped(gradient.softmax_part(at_tail)));
  }
  if (owns_blank) out[gradient.blank] = narrow<S>(gradient(at_blank, gradient.blank));
  if (owns_label) out[gradient.label] = narrow<S>(gradient(at_label, gradient.label));
}

// What a row needs of its node, and the gradients of its first duration logits.
template <typename S>
struct RowTask {
  TokenGradient<accumulate_t<S>> gradient;
  accumulate_t<S> G;  // G_blank + G_label
  const S* x;
  S *grad_x, *grad_z;
  accumulate_t<S> durations[kNodeLanes];
};

// Worked out by kNodeLanes lanes, which take the arc pairs in turn. They write what gradients of durations there are
// beyond the first kNodeLanes.
template <typename S>
__device__ void work_out(RowTask<S>& task, int64_t row, const RowGroup<kNodeLanes>& lanes, const Batch& batch,
                         const NodeList& list, const LogitRows<S>& logits, const LogitRows<S>& grad,
                         const Saved<accumulate_t<S>>& saved, const Upstream<accumulate_t<S>>& upstream,
                         const Shaping<accumulate_t<S>>& shaping) {
  using Acc = accumulate_t<S>;
  const Node at = batch.node_at(list.at(row));
  const Extent extent = batch.extent(at.b);
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u), lives = valid && sample.lives;
  const Acc scale = upstream.at(at.b);

  // What the forward wrote of the node; of padding, nothing.
  const Acc* record = saved.node_lp + batch.node(at.b, at.t, at.u) * record_size(batch.D);
  Acc lse = 0, dur_lp = 0;
  NodeSums<Acc> G{0, 0}, tdt{0, 0};
  ArcPair<Acc> own{0, 0};  // this lane's arc pair of the first lattice
  if (lives) {
    lse = record[kLse];
    if (lanes.lane < batch.D) dur_lp = record[kDurLp + lanes.lane];
    for (int l = 0; l < shaping.lattices; ++l) {
      if (!shaping.counts[l]) continue;
      const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[l], saved, l);
      for (int i = lanes.lane; i < shaping.arcs[l].n; i += kNodeLanes) {
        const ArcPair<Acc> occ = occupied.arc(i);
        if (l == 0 && i == lanes.lane) own = occ;
        G.blank += shaping.blank_share[l] * occ.blank;
        G.label += shaping.label_share[l] * occ.label;
      }
      if (l == 0) tdt = G;
    }
  }
  G = {lanes.sum(G.blank), lanes.sum(G.label)};
  Acc G_tdt = G.blank + G.label;
  if (shaping.lattices > 1) G_tdt = lanes.sum(tdt.blank) + lanes.sum(tdt.label);
  if (valid && sample.nan) G.blank = G_tdt = static_cast<Acc>(NAN);

  const Acc both = G.blank + G.label;
  S* grad_z = grad.durations.row(row, at);
  task.durations[lanes.lane] = duration_entry(shaping, dur_lp, own, G_tdt, scale);
  for (int i = lanes.lane + kNodeLanes; i < batch.D; i += kNodeLanes) {
    ArcPair<Acc> occ{0, 0};
    if (lives && G_tdt != 0) {
      dur_lp = record[kDurLp + i];
      occ = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0).arc(i);
    }
    grad_z[i] = narrow<S>(duration_entry(shaping, dur_lp, occ, G_tdt, scale));
  }
  if (lanes.lane > 0) return;
  const int label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  task.gradient = {lse, both * scale, G.blank * scale, G.label * scale, shaping.blank, label, shaping.limit(scale)};
  task.G = both;
  task.x = logits.tokens.row(row, at);
  task.grad_x = grad.tokens.row(row, at);
  task.grad_z = grad_z;
}

template <typename S, int kThreads, int kRows>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    gradient_kernel(const __grid_constant__ Batch batch, const NodeList list,
                    const __grid_constant__ LogitRows<S> logits, const __grid_constant__ LogitRows<S> grad,
                    const __grid_constant__ Saved<accumulate_t<S>> saved,
                    const __grid_constant__ Upstream<accumulate_t<S>> upstream,
                    const __grid_constant__ Shaping<accumulate_t<S>> shaping) {
  __shared__ RowTask<S> tasks[kRows];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), list.n - first));
  const RowGroup<kNodeLanes> lanes;
  for (int r = threadIdx.x / kNodeLanes; r < rows; r += kNodes) {
    work_out(tasks[r], first + r, lanes, batch, list, logits, grad, saved, upstream, shaping);
  }
  __syncthreads();
  const RowGroup<kThreads> group;
  for (int r = threadIdx.x / kThreads; r < rows; r += kBlock / kThreads) {
    const RowTask<S>& task = tasks[r];
    if (task.G == 0 || isnan(task.G)) {  // padding, no alignment through here, or a malformed sample: x is not read
      fill_row<S, kThreads>(task.grad_x, batch.V, narrow<S>(task.G), group.thread);
    } else {
      gradient_row<S, kThreads>(task.x, task.grad_x, batch.V, task.gradient, group.thread);
    }
    if (group.thread < min(batch.D, kNodeLanes)) task.grad_z[group.thread] = narrow<S>(task.durations[group.thread]);
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::gradient(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                    const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved,
                    const Upstream<accumulate_t<S>>& upstream, const Shaping<accumulate_t<S>>& shaping) {
  const cuda::LaunchScope scope(like);
  const auto launch = [&](auto threads, auto rows) {
    constexpr int kThreads = decltype(threads)::value, kRows = decltype(rows)::value;
    const unsigned blocks = cuda::blocks_for(list.n, kRows);
    cuda::gradient_kernel<S, kThreads, kRows>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, grad, saved, upstream, shaping);
  };
  using std::integral_constant;
  if (!cuda::is_short_row<S>(batch.V)) {
    launch(integral_constant<int, cuda::kLongRowThreads>{}, integral_constant<int, cuda::kLongRows>{});
  } else if (list.n * cuda::kNodeLanes >= cuda::kFillsGpu) {
    launch(integral_constant<int, cuda::kWarp>{}, integral_constant<int, cuda::kNodes>{});
  } else {  // fewer rows, more blocks
    launch(integral_constant<int, cuda::kWarp>{}, integral_constant<int, cuda::kBlock / cuda::kWarp>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                           \
  template void Cuda::gradient<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, \
                                  const LogitRows<S>&, const Saved<accumulate_t<S>>&,                \
                                  const Upstream<accumulate_t<S>>&, const Shaping<accumulate_t<S>>&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
