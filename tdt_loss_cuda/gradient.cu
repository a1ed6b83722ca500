// The gradient of the logits on the GPU, eq. 7-9 and 11-13 (equations.h).
//
// A row of token logits is read and written once, where it has occupancy, else only written, and the kernel is bound by
// that if what is done once per row stays small and nothing waits for it: so the threads of a block first work out the
// nodes of all its rows at once, eight a node, and then turn the rows, a warp a short row, two warps a longer one. The
// gradient of the duration logits is written with the row, as part of it where it lies behind it: a sector of memory
// that is written in two parts costs as much as many. Padding is filled by blocks of its own (order.cuh).
//
// Loops that mostly run once are not unrolled: their copies would take registers from the rows, and a spill costs more
// than it seems (benchmarks/NOTES.md).
//
// Offsets within a row are int, offsets of rows int64. The occupancies come from float64 alpha, beta and LL, whose sum
// cancels; what is made of them is float32 (float64 for float64 logits).
#include "../tdt_loss_common/occupancy.h"
#include "order.cuh"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kNodeLanes = 8;  // threads that work out a node

// How rows are shared out: kThreads turn a row, and a block has up to kRows rows. More would spread what the GPU
// reads and writes at a time over more memory, which costs bandwidth; fewer would leave it waiting for nodes.
template <int kThreadsOfRow, int kRowsOfBlock>
struct Shape {
  static constexpr int kThreads = kThreadsOfRow, kRows = kRowsOfBlock;
  // Warps of a long row write whole cache lines. A short row would need another round for that.
  static constexpr int kBoundary = kThreads > kWarp ? kCacheLine : 16;
};
using LongRows = Shape<2 * kWarp, 2>;
using ShortRows = Shape<kWarp, 16>;

// eq. 8: softmax(x)_v * G, less G_blank and G_label at their columns, times the upstream gradient.
template <typename Acc>
struct TokenGradient {
  // share: G times the upstream gradient over the row's sum of exp(x - max)
  Acc max, share, scaled_blank, scaled_label;
  int blank, label;  // label -1: no such column
  Acc limit;         // of every entry: clamp times the upstream gradient, or +inf

  __device__ __forceinline__ Acc operator()(Acc x, int v) const {
    const Acc softmax_part = exp_of(x - max) * share;
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
template <int kThreads, Caching caching, typename S, class Split>
__device__ void fill_vectors(S* out, const Split& split, accumulate_t<S> value, int thread) {
  const Vector<S> filled = Vector<S>::of(value);
#pragma unroll 1
  for (int i = thread - split.skipped; i < split.vectors; i += kThreads) {
    if (split.has(i)) filled.template store<caching>(out + split.head + i * Vector<S>::kSize);
  }
}

// Zeros from `begin` to `end`, written by a block, in pieces whose elements an int counts.
template <typename S>
__device__ void fill_stretch(S* begin, S* end) {
#pragma unroll 1
  for (; begin < end; begin += kMostColumns) {
    const int n = static_cast<int>(end - begin < kMostColumns ? end - begin : kMostColumns);
    const RowSplit<S, kCacheLine> split(begin, n);
    fill_vectors<kBlock, Caching::kBypassed>(begin, split, 0, threadIdx.x);
    const RowEnds<S> ends(split, n, threadIdx.x);
    if (ends.element >= 0) begin[ends.element] = narrow<S>(0);
  }
}

// eq. 8 of the vectors of a row, but for the columns of blank and label. `alignment`: of the logits.
template <Alignment alignment, int kThreads, typename S, class Split>
__device__ __forceinline__ void transform_vectors(const TokenGradient<accumulate_t<S>>& gradient, const S* x, S* out,
                                                  const Split& split, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize, kStride = kThreads * kUnroll;
  const Acc max = gradient.max, share = gradient.share, limit = gradient.limit;
  const bool clamps = limit < static_cast<Acc>(INFINITY);
  int i = thread - split.skipped;
  const S* from = x + split.head + i * kSize;
  S* to = out + split.head + i * kSize;
  for (; i < split.vectors; i += kStride, from += kStride * kSize, to += kStride * kSize) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) loaded[k] = load_vector<alignment>(from + k * kThreads * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) {
        Acc values[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[j] = exp_of(loaded[k].at(j) - max) * share;
        if (clamps) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) values[j] = clamped(values[j], limit);
        }
        Vector<S>::pack(values).store(to + k * kThreads * kSize);
      }
    }
  }
}

// The gradients of a row's V tokens and of its first durations.
template <typename S, class Shape>
__device__ void write_row(const RowTask<S>& task, int V, int D, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kThreads = Shape::kThreads;
  const S* const x = task.x;
  S* const out = task.grad_x;
  const bool reads = task.G != 0 && !isnan(task.G);  // else no occupancy, or none that is a number
  const RowSplit<S, Shape::kBoundary> split(out, V);
  const bool joint = task.grad_z == out + V;
  const RowEnds<S> ends(split, joint ? V + min(D, kNodeLanes) : V, thread);
  if (!joint && thread < min(D, kNodeLanes)) task.grad_z[thread] = narrow<S>(task.durations[thread]);

  if (!reads) {
    fill_vectors<kThreads, Caching::kKept>(out, split, task.G, thread);
    if (ends.element >= 0) out[ends.element] = narrow<S>(ends.element < V ? task.G : task.durations[ends.element - V]);
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
  // Gradients are stored in whole vectors; the logits may lie otherwise.
  const unsigned shift = static_cast<unsigned>(reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(out)) % 16;
  if (shift == 0) {
    transform_vectors<Alignment::kWhole, kThreads>(task.gradient, x, out, split, thread);
  } else if (sizeof(S) > 2 || shift % 4 == 0) {
    transform_vectors<Alignment::kWords, kThreads>(task.gradient, x, out, split, thread);
  } else if constexpr (sizeof(S) == 2) {
    transform_vectors<Alignment::kOdd, kThreads>(task.gradient, x, out, split, thread);
  }
  if (ends.element >= 0) {
    out[ends.element] =
        narrow<S>(ends.element < V ? task.gradient(widen(at_end), ends.element) : task.durations[ends.element - V]);
  }
  if (owns_blank) out[blank] = narrow<S>(task.gradient(widen(at_blank), blank));
  if (owns_label) out[label] = narrow<S>(task.gradient(widen(at_label), label));
}

// A row of a tile, or of the batch where its node is `at`: worked out by kNodeLanes lanes, which take the arc pairs in
// turn. They write what gradients of durations there are beyond the first kNodeLanes.
template <typename S>
__device__ void work_out(RowTask<S>& task, int row, const Node& at, const Extent& extent,
                         const RowGroup<kNodeLanes>& lanes, const GradientTask<S>& whole) {
  using Acc = accumulate_t<S>;
  const auto& [batch, list, logits, grad, saved, upstream, shaping] = whole;
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u), lives = valid && sample.lives;
  const Acc scale = upstream.at(at.b);
  if (lanes.lane == 0) {
    task.x = logits.tokens.row(row, at);
    task.grad_x = grad.tokens.row(row, at);
    task.grad_z = grad.durations.row(row, at);
    task.gradient.label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  }

  // What the forward wrote of the node; of padding, nothing.
  const Acc* record = saved.node_lp + batch.node(at.b, at.t, at.u) * record_size(batch.D);
  Acc max = 0, sum = 1, dur_lp = 0;
  NodeSums<Acc> G{0, 0}, tdt{0, 0};
  ArcPair<Acc> own{0, 0};  // this lane's arc pair of the first lattice
  if (lives) {
    max = saved.row_max[batch.node(at.b, at.t, at.u)];
    sum = record[kRowSum];
    if (lanes.lane < batch.D) dur_lp = record[kDurLp + lanes.lane];
#pragma unroll 1
    for (int l = 0; l < shaping.lattices; ++l) {
      if (!shaping.counts[l]) continue;
      const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[l], saved, l);
#pragma unroll 1
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
  if (batch.D > kNodeLanes) sync_lanes(lanes.mask);
#pragma unroll 1
  for (int i = lanes.lane + kNodeLanes; i < batch.D; i += kNodeLanes) {
    ArcPair<Acc> occ{0, 0};
    if (lives && G_tdt != 0) {
      dur_lp = record[kDurLp + i];
      occ = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0).arc(i);
    }
    task.grad_z[i] = narrow<S>(duration_entry(shaping, dur_lp, occ, G_tdt, scale));
  }
  if (lanes.lane > 0) return;
  const int label = task.gradient.label;
  task.gradient = {max,   both * scale / sum,  G.blank * scale, G.label * scale, shaping.blank,
                   label, shaping.limit(scale)};
  task.G = both;
}

// Zeros for a block of padding, a stretch for each run of nodes that follow one another. A run that goes on in another
// block is cut at a cache line. `packed`: the elements from the gradients of one node to those of the next, or 0 where
// there is a gap between them.
template <typename S>
__device__ void fill_padding(const BlockNodes& nodes, const Batch& batch, const LogitRows<S>& grad, int packed) {
  // Bit r + 1: node r follows node r - 1. Of the nodes before and behind the block's, too.
  const int r = lane_of_thread() - 1;
  const bool exists = nodes.has(batch, r);
  const Node at = nodes.at(batch, exists ? r : 0);
  const int64_t node = batch.node(at.b, at.t, at.u), before = shuffle_up(kFullMask, node, 1);
  const LaneMask follows = ballot(kFullMask, packed > 0 && exists && r > -1 && node == before + 1) & ~1u;
  const int64_t width = packed > 0 ? packed : batch.V;
  const bool lines = width * sizeof(S) >= kCacheLine;

  for (int start = 0, end; start < nodes.n; start = end) {
    for (end = start + 1; end < nodes.n && (follows >> (end + 1) & 1);) ++end;
    const Node first = nodes.at(batch, start);
    S* const out = grad.tokens.row(0, first);
    S *from = out, *to = out + (end - start) * width;
    if (lines && start == 0 && (follows >> 1 & 1)) from = next_line(from);
    if (lines && end == nodes.n && (follows >> (end + 1) & 1)) to = next_line(to);
    fill_stretch(from, to);
    if (width == batch.V) {
      S* const durations = grad.durations.row(0, first);
      fill_stretch(durations, durations + (end - start) * batch.D);
    }
  }
}

template <typename S, class Shape>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    gradient_kernel(const __grid_constant__ GradientTask<S> task,
                    const __grid_constant__ BlockOrder<Shape::kRows> order, int packed) {
  const Batch& batch = task.batch;
  const NodeList list = task.list;
  static_assert(Shape::kRows <= kBlock / kNodeLanes && Shape::kRows <= kWarp - 2);
  constexpr int kThreads = Shape::kThreads;
  const RowGroup<kThreads> group;
  const int first = blockIdx.x * Shape::kRows;  // of a tile
  int rows = min(Shape::kRows, static_cast<int>(list.n) - first);
  __shared__ BlockNodes nodes;
  if (!list.nodes) {
    order.find(batch, &nodes);
    if (nodes.padding) return fill_padding(nodes, batch, task.grad, packed);
    rows = nodes.n;
  }

  __shared__ RowTask<S> tasks[Shape::kRows];
  const int r = threadIdx.x / kNodeLanes;
  if (r < rows) {
    const Node at = list.nodes ? batch.node_at(list.at(batch, first + r)) : nodes.at(batch, r);
    const Extent extent = list.nodes ? batch.extent(at.b) : nodes.extent;
    work_out(tasks[r], first + r, at, extent, RowGroup<kNodeLanes>(), task);
  }
  __syncthreads();
#pragma unroll 1
  for (int r = threadIdx.x / kThreads; r < rows; r += kBlock / kThreads) {
    write_row<S, Shape>(tasks[r], batch.V, batch.D, group.thread);
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::gradient(const Tensor& like, const GradientTask<S>& task) {
  const cuda::LaunchScope scope(like);
  const Batch& batch = task.batch;
  const NodeList& list = task.list;
  const LogitRows<S>& grad = task.grad;
  const bool joint = grad.durations.data == grad.tokens.data + batch.V;
  const int width = joint ? batch.V + batch.D : batch.V;
  const bool packed =
      !list.nodes && grad.tokens.are_packed(batch, width) && (joint || grad.durations.are_packed(batch, batch.D));
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    const auto order = cuda::BlockOrder<Shape::kRows>::of(batch);
    const unsigned blocks = list.nodes ? cuda::blocks_for(list.n, Shape::kRows) : order.blocks;
    cuda::gradient_kernel<S, Shape><<<blocks, cuda::kBlock, 0, scope.stream()>>>(task, order, packed ? width : 0);
  };
  cuda::is_short_row<S>(batch.V) ? launch(cuda::ShortRows{}) : launch(cuda::LongRows{});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) template void Cuda::gradient(const Tensor&, const GradientTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
