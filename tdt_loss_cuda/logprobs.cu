// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3, and the gradient of its logits, eq. 7-9
// (equations: lattice.cu).
//
// Both kernels move one row of logits each way at most and are bound by that, if what is done once per row stays small:
// so as few threads as possible share a row, kThreads of them. Forward 8 for a short row, a warp for a longer one, a
// block where rows are too few to fill the GPU otherwise; backward a warp, which turns several short rows one after
// another, or four warps for a longer one, so that fewer rows are in work at a time and the memory sees longer
// stretches. Offsets within a row are int, offsets of rows int64. Sums are float32 (float64 for float64 logits); the
// occupancies come from float64 alpha, beta and LL, whose sum cancels. Padding is zero-filled and never read; neither
// is a row whose occupancy is exactly 0.
#include "../tdt_loss_common/occupancy.h"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;         // threads
constexpr int kUnroll = 4;          // vectors a thread has in flight
constexpr int kNodeLanes = 8;       // lanes that work out a node
constexpr int kShortRows = 4;       // short rows that a warp turns
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

  if (thread < split.head) out[thread] = narrow<S>(gradient.clamped(gradient.softmax_part(widen(x[thread]))));
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
  if (thread < n - split.tail) {
    out[split.tail + thread] = narrow<S>(gradient.clamped(gradient.softmax_part(widen(x[split.tail + thread]))));
  }
  if (owns_blank) out[gradient.blank] = narrow<S>(gradient(at_blank, gradient.blank));
  if (owns_label) out[gradient.label] = narrow<S>(gradient(at_label, gradient.label));
}

// What a row needs of its node, and the gradient of one duration logit.
template <typename S>
struct RowTask {
  TokenGradient<accumulate_t<S>> gradient;
  accumulate_t<S> G;  // G_blank + G_label
  const S* x;
  S* grad_x;
  S* grad_z;  // where `duration` belongs, or null; each of the lanes has its own
  accumulate_t<S> duration;
};

// Worked out by kNodeLanes lanes, which take the arc pairs in turn. They write what gradients of durations there are
// beyond the first kNodeLanes.
template <typename S>
__device__ RowTask<S> work_out(int64_t row, const RowGroup<kNodeLanes>& lanes, const Batch& batch, const NodeList& list,
                               const LogitRows<S>& logits, const LogitRows<S>& grad,
                               const Saved<accumulate_t<S>>& saved, const Upstream<accumulate_t<S>>& upstream,
                               const Shaping<accumulate_t<S>>& shaping) {
  using Acc = accumulate_t<S>;
  const Node at = batch.node_at(list.at(row));
  const Extent extent = batch.extent(at.b);
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.counts);
  const bool valid = extent.has(at.t, at.u);
  const Acc scale = upstream.at(at.b);

  NodeSums<Acc> G{0, 0}, tdt{0, 0};
  ArcPair<Acc> own{0, 0};  // this lane's arc pair of the first lattice
  if (valid && sample.lives) {
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

  const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0);
  S* grad_z = grad.durations.row(row, at);
  RowTask<S> task;
  const Acc both = G.blank + G.label;
  const int label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  task.gradient = {occupied.record[kLse], both * scale, G.blank * scale,     G.label * scale,
                   shaping.blank,         label,        shaping.limit(scale)};
  task.G = both;
  task.x = logits.tokens.row(row, at);
  task.grad_x = grad.tokens.row(row, at);
  task.grad_z = lanes.lane < batch.D ? grad_z + lanes.lane : nullptr;
  if (task.grad_z) task.duration = duration_entry(shaping, occupied.record[kDurLp + lanes.lane], own, G_tdt, scale);
  for (int i = lanes.lane + kNodeLanes; i < batch.D; i += kNodeLanes) {
    const ArcPair<Acc> occ = G_tdt == 0 ? ArcPair<Acc>{0, 0} : occupied.arc(i);
    grad_z[i] = narrow<S>(duration_entry(shaping, occupied.record[kDurLp + i], occ, G_tdt, scale));
  }
  return task;
}

// The value that lane `lane` of the warp has.
template <typename T>
__device__ __forceinline__ T from_lane(const T& mine, int lane) {
  static_assert(sizeof(T) % sizeof(int) == 0);
  T theirs;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(T) / sizeof(int)); ++k) {
    reinterpret_cast<int*>(&theirs)[k] = __shfl_sync(kFullMask, reinterpret_cast<const int*>(&mine)[k], lane);
  }
  return theirs;
}

// A group turns kRows rows, one after another, whose nodes its lanes work out before, all at once. Every warp of a
// group does so for itself: cheaper than to wait for one. The groups of a block take its rows in turn, so that the
// block works on one stretch of memory at a time.
template <typename S, int kThreads, int kRows>
__global__ void __launch_bounds__(kBlock, min_blocks<S>())
    gradient_kernel(const __grid_constant__ Batch batch, const NodeList list,
                    const __grid_constant__ LogitRows<S> logits, const __grid_constant__ LogitRows<S> grad,
                    const __grid_constant__ Saved<accumulate_t<S>> saved,
                    const __grid_constant__ Upstream<accumulate_t<S>> upstream,
                    const __grid_constant__ Shaping<accumulate_t<S>> shaping) {
  static_assert(kThreads >= kWarp && kRows * kNodeLanes <= kWarp);
  constexpr int kGroups = kBlock / kThreads;
  const RowGroup<kThreads> group;
  const RowGroup<kNodeLanes> lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups * kRows + threadIdx.x / kThreads;
  const int own = group.lane / kNodeLanes;  // the row whose node this lane helps to work out
  RowTask<S> mine{};
  if (own < kRows && first + own * kGroups < list.n) {
    mine = work_out(first + own * kGroups, lanes, batch, list, logits, grad, saved, upstream, shaping);
  }
  for (int r = 0; r < kRows && first + r * kGroups < list.n; ++r) {
    const accumulate_t<S> G = from_lane(mine.G, r * kNodeLanes);
    S* grad_x = from_lane(mine.grad_x, r * kNodeLanes);
    if (G == 0 || isnan(G)) {  // padding, no alignment through this node, or a malformed sample: x is not read
      fill_row<S, kThreads>(grad_x, batch.V, narrow<S>(G), group.thread);
    } else {
      gradient_row<S, kThreads>(from_lane(mine.x, r * kNodeLanes), grad_x, batch.V,
                                from_lane(mine.gradient, r * kNodeLanes), group.thread);
    }
    if (own == r && group.thread < kWarp && mine.grad_z) *mine.grad_z = narrow<S>(mine.duration);
  }
}

template <typename S>
bool is_short(int V) {
  return V * static_cast<int64_t>(sizeof(S)) < kShortRow;
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::log_probs(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                     accumulate_t<S>* node_lp, const Emission& emission) {
  const cuda::LaunchScope scope(like);
  const auto launch = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads);
    cuda::log_probs_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, node_lp, emission);
  };
  if (cuda::is_short<S>(batch.V) && list.n * 8 >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, 8>{});
  } else if (cuda::is_short<S>(batch.V) || list.n * cuda::kWarp >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, cuda::kWarp>{});
  } else {
    launch(std::integral_constant<int, cuda::kBlock>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename S>
void Cuda::gradient(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                    const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved,
                    const Upstream<accumulate_t<S>>& upstream, const Shaping<accumulate_t<S>>& shaping) {
  const cuda::LaunchScope scope(like);
  const auto launch = [&](auto threads, auto rows) {
    constexpr int kThreads = decltype(threads)::value, kRows = decltype(rows)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads * kRows);
    cuda::gradient_kernel<S, kThreads, kRows>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, grad, saved, upstream, shaping);
  };
  constexpr std::integral_constant<int, 1> kOne{};
  constexpr std::integral_constant<int, cuda::kShortRows> kSeveral{};
  constexpr std::integral_constant<int, cuda::kWarp> kOneWarp{};
  constexpr std::integral_constant<int, 4 * cuda::kWarp> kFourWarps{};
  if (!cuda::is_short<S>(batch.V)) {
    launch(kFourWarps, kOne);
  } else if (list.n * cuda::kWarp / cuda::kShortRows < cuda::kFillsGpu) {
    launch(kOneWarp, kOne);
  } else {
    launch(kOneWarp, kSeveral);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                            \
  template void Cuda::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, \
                                   accumulate_t<S>*, const Emission&);                                \
  template void Cuda::gradient<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&,  \
                                  const LogitRows<S>&, const Saved<accumulate_t<S>>&,                 \
                                  const Upstream<accumulate_t<S>>&, const Shaping<accumulate_t<S>>&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
