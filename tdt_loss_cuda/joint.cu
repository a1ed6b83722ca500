// The hidden layer of the joint network on the GPU, for tiles of the loss without the logits: the rows themselves, and
// their gradient summed into that of the encoder and of the prediction network (joint.h).
//
// Rows: a warp each, 16 bytes a thread at a time. Gradient: d f_t is the sum over the rows of frame (b, t), which are
// neighbours in a tile, since it is sorted by node; the warp that has the first of them takes them all. d g_u is the
// sum over the rows of (b, u), which lie a frame apart; a warp looks for them in the map from nodes to rows, 32 frames
// at a time. Either way one warp adds the rows of a sum in their order and no other touches it: no atomics, same bits
// always. Sums are float32 (float64 for float64 inputs), and a tile adds to what the tiles before it have left. Mask
// and activation are computed again from node and inputs.
#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/joint.h"
#include "rows.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarp;
constexpr int kRowsInFlight = 4;
constexpr int kRowsPerWarp = 8;     // whose frames a warp looks at: few, so that a short tile still fills the GPU
constexpr int kSamplesAtOnce = 16;  // a tile of live rows spans a few samples, rarely more

// The kSize hidden units of a thread: 16 bytes of them, or one where rows do not start at 16-byte boundaries.
template <typename S, int kSize>
struct Units {
  Vector<S> vector;

  // Cached, unlike a row of logits: f and g serve many rows.
  __device__ __forceinline__ static Units load(const S* p) { return {Vector<S>{load_constant(p)}}; }
  __device__ __forceinline__ accumulate_t<S> at(int j) const { return vector.at(j); }
  __device__ __forceinline__ static void store(S* p, const accumulate_t<S> (&x)[kSize]) {
    *reinterpret_cast<uint4*>(p) = Vector<S>::pack(x).bits;
  }
};

template <typename S>
struct Units<S, 1> {
  S unit;

  __device__ __forceinline__ static Units load(const S* p) { return {*p}; }
  __device__ __forceinline__ accumulate_t<S> at(int) const { return widen(unit); }
  __device__ __forceinline__ static void store(S* p, const accumulate_t<S> (&x)[1]) { *p = narrow<S>(x[0]); }
};

// x_j times the dropout factor of unit column + j.
template <typename Acc, int kSize>
__device__ __forceinline__ void drop(const Dropout& dropout, int64_t node, int column, Acc (&x)[kSize]) {
  if (dropout.threshold == 0) return;
  constexpr int kAtOnce = kSize < 4 ? kSize : 4;
#pragma unroll
  for (int j = 0; j < kSize; j += kAtOnce) {
    const Random4 words = dropout.words(node, (column + j) / 4);
    const int first = kSize < 4 ? column % 4 : 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) x[j + k] *= dropout.factor<Acc>(words.at(first + k));
  }
}

template <typename S, int kSize>
__global__ void __launch_bounds__(kBlock)
    hidden_kernel(const __grid_constant__ Joint<S> joint, int64_t rows, const int32_t* nodes, S* hidden) {
  using Acc = accumulate_t<S>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp_of_thread();
  if (row >= rows) return;
  const int64_t node = joint.grid.bounded(nodes[row]);
  const Node at = joint.grid.node_at(node);
  const S* f = joint.encoder + joint.encoder_row(at);
  const S* g = joint.decoder + joint.decoder_row(at);
  for (int column = lane_of_thread() * kSize; column < joint.H; column += kWarp * kSize) {
    const auto f_units = Units<S, kSize>::load(f + column), g_units = Units<S, kSize>::load(g + column);
    Acc x[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = f_units.at(j) + g_units.at(j);
    joint.activate(x);
    drop(joint.dropout, node, column, x);
    Units<S, kSize>::store(hidden + row * joint.H + column, x);
  }
}

// Adds the gradient of f + g, the argument of the activation, over the rows that the lanes in `chosen` name, in the
// order of the lanes.
template <typename S, int kSize>
__device__ __forceinline__ void add_rows(const Joint<S>& joint, const S* d_hidden, LaneMask chosen, int row, int node,
                                         int column, accumulate_t<S> (&sum)[kSize]) {
  using Acc = accumulate_t<S>;
  const bool inside = column < joint.H;
  while (chosen != 0) {
    Units<S, kSize> d[kRowsInFlight], f[kRowsInFlight], g[kRowsInFlight];
    int from[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const int lane = chosen != 0 ? first_of(chosen) : 0;
      const int64_t row_k = shuffle(kFullMask, row, lane);
      from[k] = shuffle(kFullMask, node, lane);
      if (chosen == 0 || !inside) from[k] = -1;
      chosen &= chosen - 1;
      if (from[k] < 0) continue;
      const Node at = joint.grid.node_at(from[k]);
      d[k] = Units<S, kSize>::load(d_hidden + row_k * joint.H + column);
      f[k] = Units<S, kSize>::load(joint.encoder + joint.encoder_row(at) + column);
      g[k] = Units<S, kSize>::load(joint.decoder + joint.decoder_row(at) + column);
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (from[k] < 0) continue;
      Acc x[kSize], d_x[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        x[j] = f[k].at(j) + g[k].at(j);
        d_x[j] = d[k].at(j);
      }
      joint.differentiate(x, d_x);
      drop(joint.dropout, from[k], column, d_x);
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[j] += d_x[j];
    }
  }
}

template <typename Acc, int kSize>
__device__ __forceinline__ void add_to(Acc* out, const Acc (&sum)[kSize]) {
  if constexpr (std::is_same_v<Acc, float> && kSize % 4 == 0) {
#pragma unroll
    for (int j = 0; j < kSize; j += 4) {
      float4* four = reinterpret_cast<float4*>(out + j);
      const float4 before = *four;
      *four = {before.x + sum[j], before.y + sum[j + 1], before.z + sum[j + 2], before.w + sum[j + 3]};
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) out[j] += sum[j];
  }
}

template <int kSize>
__device__ __forceinline__ int own_column() {
  return (blockIdx.y * kWarp + lane_of_thread()) * kSize;
}

template <typename S, int kSize>
__global__ void __launch_bounds__(kBlock, 2)
    encoder_gradient_kernel(const __grid_constant__ Joint<S> joint,
                            const __grid_constant__ HiddenGradient<S, accumulate_t<S>> p) {
  using Acc = accumulate_t<S>;
  const int lane = lane_of_thread(), column = own_column<kSize>();
  const auto frame_of = [&](int node) { return joint.grid.by_max_U1.quotient(joint.grid.bounded(node)); };
  int64_t row = (static_cast<int64_t>(blockIdx.x) * kWarps + warp_of_thread()) * kRowsPerWarp;
  const int64_t end = min(row + kRowsPerWarp, p.rows);
  while (row < end) {
    const uint32_t frame = frame_of(p.nodes[row]);
    if (row > 0 && frame_of(p.nodes[row - 1]) == frame) {  // another warp's, or done
      ++row;
      continue;
    }
    Acc sum[kSize] = {};
    LaneMask chosen = kFullMask;
    while (chosen == kFullMask) {
      const int own = row + lane < p.rows ? static_cast<int>(joint.grid.bounded(p.nodes[row + lane])) : -1;
      chosen = ballot(kFullMask, own >= 0 && frame_of(own) == frame);
      add_rows(joint, p.d_hidden, chosen, static_cast<int>(row + lane), own, column, sum);
      row += count_of(chosen);
    }
    if (column < joint.H) add_to(p.d_encoder + static_cast<int64_t>(frame) * joint.H + column, sum);
  }
}

template <typename S, int kSize>
__global__ void __launch_bounds__(kBlock, 2)
    decoder_gradient_kernel(const __grid_constant__ Joint<S> joint,
                            const __grid_constant__ HiddenGradient<S, accumulate_t<S>> p) {
  using Acc = accumulate_t<S>;
  const Grid& grid = joint.grid;
  const int lane = lane_of_thread(), column = own_column<kSize>();
  const int u = blockIdx.x * kWarps + warp_of_thread();
  if (u >= grid.max_U1) return;
  const Node first = grid.node_at(grid.bounded(p.nodes[0]));
  const Node last = grid.node_at(grid.bounded(p.nodes[p.rows - 1]));
  for (int b = first.b + blockIdx.z; b <= last.b; b += gridDim.z) {
    const int begin = b == first.b ? first.t : 0, end = b == last.b ? last.t + 1 : grid.max_T;
    Acc sum[kSize] = {};
    bool any = false;
    for (int t = begin; t < end; t += kWarp) {
      const int64_t node = grid.node(b, t + lane, u);
      const int64_t row = t + lane < end ? p.row_of_node[node] - p.first : -1;
      const LaneMask chosen = ballot(kFullMask, row >= 0 && row < p.rows);
      add_rows(joint, p.d_hidden, chosen, static_cast<int>(row), static_cast<int>(node), column, sum);
      any = any || chosen != 0;
    }
    if (any && column < joint.H)
      add_to(p.d_decoder + (static_cast<int64_t>(b) * grid.max_U1 + u) * joint.H + column, sum);
  }
}

// Calls f with the number of hidden units that a thread handles at a time; `rows`: where rows are read or written
// beside those of the joint network.
template <typename S, typename F>
void with_units(const Joint<S>& joint, std::initializer_list<const void*> rows, F&& f) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool inputs_aligned = joint.H % Vector<S>::kSize == 0 && aligned(joint.encoder) && aligned(joint.decoder);
  if (inputs_aligned && std::all_of(rows.begin(), rows.end(), aligned)) {
    f(std::integral_constant<int, Vector<S>::kSize>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::joint_hidden(const Tensor& like, const Joint<S>& joint, int64_t rows, const int32_t* nodes, S* hidden) {
  const cuda::LaunchScope scope(like);
  cuda::with_units(joint, {hidden}, [&](auto units) {
    const unsigned blocks = cuda::blocks_for(rows, cuda::kWarps);
    cuda::hidden_kernel<S, decltype(units)::value>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(joint, rows, nodes, hidden);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename S>
void Cuda::joint_hidden_backward(const Tensor& like, const Joint<S>& joint,
                                 const HiddenGradient<S, accumulate_t<S>>& p) {
  const cuda::LaunchScope scope(like);
  cuda::with_units(joint, {p.d_hidden, p.d_encoder, p.d_decoder}, [&](auto units) {
    constexpr int kSize = decltype(units)::value;
    const unsigned columns = cuda::blocks_for(joint.H, cuda::kWarp * kSize);
    if (p.d_encoder) {
      const dim3 grid(cuda::blocks_for(p.rows, cuda::kWarps * cuda::kRowsPerWarp), columns);
      cuda::encoder_gradient_kernel<S, kSize><<<grid, cuda::kBlock, 0, scope.stream()>>>(joint, p);
    }
    if (p.d_decoder) {
      const dim3 grid(cuda::blocks_for(joint.grid.max_U1, cuda::kWarps), columns,
                      std::min(joint.grid.B, cuda::kSamplesAtOnce));
      cuda::decoder_gradient_kernel<S, kSize><<<grid, cuda::kBlock, 0, scope.stream()>>>(joint, p);
    }
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _)                                                                    \
  template void Cuda::joint_hidden(const Tensor&, const Joint<S>&, int64_t, const int32_t*, S*); \
  template void Cuda::joint_hidden_backward(const Tensor&, const Joint<S>&, const HiddenGradient<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
