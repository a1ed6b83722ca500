// The gradient of the logits on the GPU, eq. 7-9 and 11-13 (equations.h).
//
// A row of token logits is read and written once where it has occupancy, else only written. The kernel is bound by that
// as long as what is done once per row stays small and nothing waits for it. So the threads of a block first compute
// eq. 7 for the nodes of all its rows at once, eight threads a node, and then transform the rows, a warp for a short
// row and two warps for a longer one (gradient_rows.cuh). The gradient of the duration logits is written with the row,
// in the same vectors where both lie in one tensor: a sector of memory that is written in two parts costs as much as
// many. Padding is filled by blocks of its own (order.cuh).
//
// Loops that mostly run once are not unrolled: their copies would take registers from the rows, and a spill costs more
// than it seems (benchmarks/NOTES.md).
//
// Offsets within a row are int, offsets of rows int64. The occupancies come from float64 alpha, beta and LL, whose sum
// cancels; what is made of them is float32 (float64 for float64 logits).
#include "../tdt_loss_common/occupancy.h"
#include "gradient_rows.cuh"
#include "order.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 128;

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

// What a row needs of its node `at`, computed by kNodeLanes lanes, each for every kNodeLanes-th arc pair. They also
// write the gradients of durations beyond the first kNodeLanes. `row`: of a tile.
template <typename S>
__device__ void compute_node(RowTask<S>& task, int row, const Node& at, const Extent& extent,
                             const RowGroup<kNodeLanes>& lanes, const GradientTask<S>& whole) {
  using Acc = accumulate_t<S>;
  const auto& [batch, list, logits, grad, saved, upstream, shaping] = whole;
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u), feasible = valid && sample.feasible;
  const Acc scale = upstream.at(at.b);
  if (lanes.lane == 0) {
    task.x = logits.tokens.row(row, at);
    task.grad_x = grad.tokens.row(row, at);
    task.grad_z = grad.durations.row(row, at);
    task.gradient.label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  }

  // What forward has written for the node; in padding it has written nothing.
  const Acc* record = saved.node_lp + batch.node(at.b, at.t, at.u) * record_size(batch.D);
  Acc max = 0, sum = 1, dur_lp = 0;
  NodeSums<Acc> G{0, 0}, tdt{0, 0};
  ArcPair<Acc> own{0, 0};  // this lane's arc pair of the first lattice
  if (feasible) {
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
    if (feasible && G_tdt != 0) {
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
// block is cut at a cache line. `packed`: whether the rows lie one behind the other.
template <typename S>
__device__ void fill_padding(const BlockNodes& nodes, const Batch& batch, const LogitRows<S>& grad, bool packed) {
  // Bit r + 1: node r follows node r - 1. The nodes just before and behind the block's are looked at too.
  const int r = lane_of_thread() - 1;
  const bool exists = nodes.has(batch, r);
  const Node at = nodes.at(batch, exists ? r : 0);
  const int64_t node = batch.node(at.b, at.t, at.u), before = shuffle_up(kFullMask, node, 1);
  const LaneMask follows = ballot(kFullMask, packed && exists && r > -1 && node == before + 1) & ~1u;
  const bool joint = grad.layout == Layout::kJoint;
  const int64_t width = joint ? batch.V + batch.D : batch.V;
  const bool lines = width * sizeof(S) >= kCacheLine;

  for (int start = 0, end; start < nodes.n; start = end) {
    for (end = start + 1; end < nodes.n && (follows >> (end + 1) & 1);) ++end;
    const Node first = nodes.at(batch, start);
    S* const out = grad.tokens.row(0, first);
    S *from = out, *to = out + (end - start) * width;
    if (lines && start == 0 && (follows >> 1 & 1)) from = next_line(from);
    if (lines && end == nodes.n && (follows >> (end + 1) & 1)) to = next_line(to);
    fill_stretch(from, to);
    if (!joint) {
      S* const durations = grad.durations.row(0, first);
      fill_stretch(durations, durations + (end - start) * batch.D);
    }
  }
}

template <typename S, class Shape>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    gradient_kernel(const __grid_constant__ GradientTask<S> task,
                    const __grid_constant__ BlockOrder<Shape::kRows> order, bool packed) {
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
    compute_node(tasks[r], first + r, at, extent, RowGroup<kNodeLanes>(), task);
  }
  __syncthreads();
#pragma unroll 1
  for (int r = threadIdx.x / kThreads; r < rows; r += kBlock / kThreads) {
    write_row<S, Shape>(tasks[r], batch.V, batch.D, task.grad.layout, group.thread);
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
  const bool joint = grad.layout == Layout::kJoint;
  const int width = joint ? batch.V + batch.D : batch.V;
  const bool packed =
      !list.nodes && grad.tokens.are_packed(batch, width) && (joint || grad.durations.are_packed(batch, batch.D));
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    const auto order = cuda::BlockOrder<Shape::kRows>::of(batch);
    const unsigned blocks = list.nodes ? cuda::blocks_for(list.n, Shape::kRows) : order.blocks;
    cuda::gradient_kernel<S, Shape><<<blocks, cuda::kBlock, 0, scope.stream()>>>(task, order, packed);
  };
  cuda::is_short_row<S>(batch.V) ? launch(cuda::ShortRows{}) : launch(cuda::LongRows{});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) template void Cuda::gradient(const Tensor&, const GradientTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
