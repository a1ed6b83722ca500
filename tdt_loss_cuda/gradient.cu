// The gradient of the logits on the GPU, eq. 7-9 (equations: lattice.cu).
//
// A row of token logits is read and written once, where it has occupancy, else only written, and the kernel is bound by
// that if what is done once per row stays small and nothing waits for it: so the threads of a block first work out the
// nodes of all its rows at once, eight a node, and then turn the rows, a warp a short row, two warps a longer one. The
// gradient of the duration logits is written with the row, as part of it where it lies behind it: a sector of memory
// that is written in two parts costs as much as many.
//
// Offsets within a row are int, offsets of rows int64. The occupancies come from float64 alpha, beta and LL, whose sum
// cancels; what is made of them is float32 (float64 for float64 logits).
#include "../tdt_loss_common/occupancy.h"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kNodeLanes = 8;  // threads that work out a node

// How rows are shared out: kThreads turn a row, and a block has the next kRows rows. More would spread what the GPU
// reads and writes at a time over more memory, which costs bandwidth; fewer would leave it waiting for nodes.
template <int kThreadsOfRow, int kRowsOfBlock>
struct Shape {
  static constexpr int kThreads = kThreadsOfRow, kRows = kRowsOfBlock;
  static constexpr bool kShort = kThreads <= kWarp;
  // Warps of a long row write whole cache lines. A short row would need another round for that; it is left to the
  // cache to put together what its warps write in parts.
  static constexpr int kBoundary = kShort ? 16 : kCacheLine;
  static constexpr Caching kStores = kShort ? Caching::kKept : Caching::kBypassed;
};
using LongRows = Shape<2 * kWarp, 2>;
using ShortRows = Shape<kWarp, 16>;

// eq. 8: softmax(x)_v * G, less G_blank and G_label at their columns, times the upstream gradient.
template <typename Acc>
struct TokenGradient {
  Acc lse, scaled_G, scaled_blank, scaled_label;
  int blank, label;  // label -1: no such column
  Acc limit;         // of every entry: clamp times the upstream gradient, or +inf

  __device__ __forceinline__ Acc operator()(Acc x, int v) const {
    const Acc softmax_part = exp_of(x - lse) * scaled_G;
    return clamped(softmax_part - (v == blank ? scaled_blank : Acc(0)) - (v == label ? scaled_label : Acc(0)), limit);
  }
};

// What a row needs of its node, and the gradients of its first duration logits.
template <typename S>
struct RowTask {
  using Acc = accumulate_t<S>;
  TokenGradient<Acc> gradient;
  Acc G;  // G_blank + G_label
  const S* x;
  S *grad_x, *grad_z;
  Acc durations[kNodeLanes];
};

// The elements of a row outside its vectors, one a thread: the head, and from thread kTailThread on the tail with as
// many gradients of durations as lie behind it.
template <typename S>
struct RowEnds {
  static constexpr int kTailThread = kWarp / 2;
  static_assert(Vector<S>::kSize - 1 + kNodeLanes <= kWarp - kTailThread);
  int element;  // of this thread, or -1

  template <class Split>
  __device__ RowEnds(const Split& split, int n, int thread) {
    const int in_tail = thread - kTailThread;
    element = thread < split.head ? thread : in_tail >= 0 && in_tail < n - split.tail ? split.tail + in_tail : -1;
  }
};

// The vectors of a row, all alike, by kThreads threads.
template <int kThreads, Caching kStores, typename S, class Split>
__device__ void fill_vectors(S* out, const Split& split, accumulate_t<S> value, int thread) {
  const Vector<S> filled = Vector<S>::of(value);
  for (int i = thread - split.skipped; i < split.vectors; i += kThreads) {
    if (split.has(i)) filled.template store<kStores>(out + split.head + i * Vector<S>::kSize);
  }
}

// n zeros, written by a block.
template <typename S>
__device__ void fill_stretch(S* out, int n) {
  const RowSplit<S, kCacheLine> split(out, n);
  fill_vectors<kBlock, Caching::kBypassed>(out, split, 0, threadIdx.x);
  const RowEnds<S> ends(split, n, threadIdx.x);
  if (ends.element >= 0) out[ends.element] = narrow<S>(0);
}

// The gradients of a row's V tokens and of its first durations.
template <typename S, class Shape>
__device__ void write_row(const RowTask<S>& task, int V, int D, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize, kThreads = Shape::kThreads;
  const S* const x = task.x;
  S* const out = task.grad_x;
  const bool reads = task.G != 0 && !isnan(task.G);  // else padding, no alignment, or a malformed sample
  const RowSplit<S, Shape::kBoundary> split(out, V);
  const bool joint = task.grad_z == out + V;
  const RowEnds<S> ends(split, joint ? V + min(D, kNodeLanes) : V, thread);
  if (!joint && thread < min(D, kNodeLanes)) task.grad_z[thread] = narrow<S>(task.durations[thread]);

  if (!reads) {
    fill_vectors<kThreads, Shape::kStores>(out, split, task.G, thread);
    if (ends.element >= 0) out[ends.element] = narrow<S>(ends.element < V ? task.G : task.durations[ends.element - V]);
    return;
  }
  if (reinterpret_cast<uintptr_t>(x) % 16 != reinterpret_cast<uintptr_t>(out) % 16) {  // no common boundary
    for (int v = thread; v < V; v += kThreads) out[v] = narrow<S>(task.gradient(widen(x[v]), v));
    if (ends.element >= V) out[ends.element] = narrow<S>(task.durations[ends.element - V]);
    return;
  }

  // The columns of blank and label are written again by the thread that wrote them before, which keeps every test for
  // them out of the loop. All single elements are asked for before anything is stored: a load below a store waits for
  // it, since they might be of one address.
  const int blank = task.gradient.blank, label = task.gradient.label;
  const bool owns_blank = split.in_body(blank) && split.owner(blank, kThreads) == thread;
  const bool owns_label = split.in_body(label) && split.owner(label, kThreads) == thread;
  S at_blank{}, at_label{}, at_end{};
  if (owns_blank) at_blank = x[blank];
  if (owns_label) at_label = x[label];
  if (ends.element >= 0 && ends.element < V) at_end = x[ends.element];
  const Acc lse = task.gradient.lse, scaled_G = task.gradient.scaled_G, limit = task.gradient.limit;
  const bool clamps = limit < static_cast<Acc>(INFINITY);
  for (int i = thread - split.skipped; i < split.vectors; i += kThreads * kUnroll) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) loaded[k] = Vector<S>::load(x + split.head + (i + k * kThreads) * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) {
        Acc values[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[j] = exp_of(loaded[k].at(j) - lse) * scaled_G;
        if (clamps) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) values[j] = clamped(values[j], limit);
        }
        Vector<S>::pack(values).template store<Shape::kStores>(out + split.head + (i + k * kThreads) * kSize);
      }
    }
  }
  if (ends.element >= 0) {
    out[ends.element] =
        narrow<S>(ends.element < V ? task.gradient(widen(at_end), ends.element) : task.durations[ends.element - V]);
  }
  if (owns_blank) out[blank] = narrow<S>(task.gradient(widen(at_blank), blank));
  if (owns_label) out[label] = narrow<S>(task.gradient(widen(at_label), label));
}

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
  if (lanes.lane == 0) {
    task.x = logits.tokens.row(row, at);
    task.grad_x = grad.tokens.row(row, at);
    task.grad_z = grad.durations.row(row, at);
  }

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
  task.durations[lanes.lane] = duration_entry(shaping, dur_lp, own, G_tdt, scale);
  for (int i = lanes.lane + kNodeLanes; i < batch.D; i += kNodeLanes) {
    ArcPair<Acc> occ{0, 0};
    if (lives && G_tdt != 0) {
      dur_lp = record[kDurLp + i];
      occ = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0).arc(i);
    }
    grad.durations.row(row, at)[i] = narrow<S>(duration_entry(shaping, dur_lp, occ, G_tdt, scale));
  }
  if (lanes.lane > 0) return;
  const int label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  task.gradient = {lse, both * scale, G.blank * scale, G.label * scale, shaping.blank, label, shaping.limit(scale)};
  task.G = both;
}

// `packed`: the elements from one row of gradients to the next, where rows follow one another without a gap; else 0.
template <typename S, class Shape>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    gradient_kernel(const __grid_constant__ Batch batch, const NodeList list,
                    const __grid_constant__ LogitRows<S> logits, const __grid_constant__ LogitRows<S> grad,
                    const __grid_constant__ Saved<accumulate_t<S>> saved,
                    const __grid_constant__ Upstream<accumulate_t<S>> upstream,
                    const __grid_constant__ Shaping<accumulate_t<S>> shaping, int packed) {
  constexpr int kThreads = Shape::kThreads;
  const RowGroup<kThreads> group;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Shape::kRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(Shape::kRows), list.n - first));
  if (packed > 0) {
    bool valid = false;
    if (threadIdx.x < rows) {
      const Node at = batch.node_at(first + threadIdx.x);
      valid = batch.extent(at.b).has(at.t, at.u);
    }
    if (!__syncthreads_or(valid)) {  // padding alone: one stretch
      const Node start = batch.node_at(first);
      fill_stretch(grad.tokens.row(first, start), rows * packed);
      if (packed == batch.V) fill_stretch(grad.durations.row(first, start), rows * batch.D);
      return;
    }
  }

  __shared__ RowTask<S> tasks[Shape::kRows];
  const RowGroup<kNodeLanes> lanes;
  for (int r = threadIdx.x / kNodeLanes; r < rows; r += kBlock / kNodeLanes) {
    work_out(tasks[r], first + r, lanes, batch, list, logits, grad, saved, upstream, shaping);
  }
  __syncthreads();
  for (int r = threadIdx.x / kThreads; r < rows; r += kBlock / kThreads) {
    write_row<S, Shape>(tasks[r], batch.V, batch.D, group.thread);
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
  const bool joint = grad.durations.data == grad.tokens.data + batch.V;
  const int width = joint ? batch.V + batch.D : batch.V;
  const bool packed =
      !list.nodes && grad.tokens.are_packed(batch, width) && (joint || grad.durations.are_packed(batch, batch.D));
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    const unsigned blocks = cuda::blocks_for(list.n, Shape::kRows);
    cuda::gradient_kernel<S, Shape><<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, grad, saved,
                                                                                 upstream, shaping, packed ? width : 0);
  };
  cuda::is_short_row<S>(batch.V) ? launch(cuda::ShortRows{}) : launch(cuda::LongRows{});
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
