// Tiles of the loss without the logits on the GPU, eq. 1-3 and 7-9 (equations.h).
//
// Log-probabilities are the row kernel's of dense logits with the bias added on the way (row_sums.cuh). The gradient is
// two kernels: a thread a row for what the row needs of its node, and then threads that own eight columns each and go
// down kRows rows with them, so that the sums of columns, the gradient of the bias, stay in registers. Every row of a
// tile starts at a 16-byte boundary.
#include "../tdt_loss_common/tile.h"

#include "row_sums.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kNodeBlock = 128;
constexpr int kMostThreads = 128;  // of a block of columns
constexpr int kRowsInFlight = 4;

template <typename Acc, int kThreads>
__global__ void __launch_bounds__(kSumBlock, kRowThreads<Acc> / kSumBlock)
    tile_log_probs_kernel(const __grid_constant__ TileLogProbs<Acc> p) {
  const Tile<Acc>& tile = p.tile;
  const int64_t row = group_row<kThreads>();
  if (row >= tile.list.n) return;
  const int64_t node = tile.list.at(tile.batch, row);
  const Acc* const x = tile.rows + row * tile.stride;
  write_record<kThreads, true>(tile.batch, node, tile.batch.node_at(node), x, x + tile.batch.V, tile.bias, p.out,
                               p.emission);
}

template <typename S>
__global__ void __launch_bounds__(kNodeBlock, 4)
    row_gradient_kernel(const __grid_constant__ TileGradient<S, accumulate_t<S>> p, RowGradient<accumulate_t<S>>* rows,
                        accumulate_t<S>* durations) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kNodeBlock + threadIdx.x;
  if (row >= p.tile.list.n) return;
  const Node at = p.tile.batch.node_at(p.tile.list.at(p.tile.batch, row));
  rows[row] = row_gradient(p, at, durations + row * p.tile.batch.D);
}

// Eight neighbouring elements of a row.
template <typename S>
struct Eight {
  static constexpr int kVectors = kTileColumns / Vector<S>::kSize;
  Vector<S> vectors[kVectors];

  __device__ __forceinline__ static Eight load(const S* p) {
    Eight e;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) e.vectors[k] = Vector<S>::load(p + k * Vector<S>::kSize);
    return e;
  }
  __device__ __forceinline__ accumulate_t<S> at(int j) const {
    return vectors[j / Vector<S>::kSize].at(j % Vector<S>::kSize);
  }
  __device__ __forceinline__ static void store(S* p, const accumulate_t<S> (&x)[kTileColumns]) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      accumulate_t<S> part[Vector<S>::kSize];
#pragma unroll
      for (int j = 0; j < Vector<S>::kSize; ++j) part[j] = x[k * Vector<S>::kSize + j];
      Vector<S>::pack(part).store(p + k * Vector<S>::kSize);
    }
  }
};

template <typename S>
__global__ void __launch_bounds__(kMostThreads, sizeof(S) == 8 ? 2 : 6)
    tile_gradient_kernel(const __grid_constant__ TileGradient<S, accumulate_t<S>> p,
                         const RowGradient<accumulate_t<S>>* rows, const accumulate_t<S>* durations) {
  using Acc = accumulate_t<S>;
  constexpr int kRows = TileGradient<S, Acc>::kRows;
  __shared__ RowGradient<Acc> shared[kRows];
  const int V = p.tile.batch.V, D = p.tile.batch.D, blank = p.shaping.blank;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows, stride = p.tile.stride;
  const int n = static_cast<int>(min(static_cast<int64_t>(kRows), p.tile.list.n - first));
  for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = rows[first + i];
  __syncthreads();
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kTileColumns;
  if (column >= stride) return;
  const bool tokens_alone = column + kTileColumns <= V;

  Acc bias[kTileColumns], sums[kTileColumns];
#pragma unroll
  for (int j = 0; j < kTileColumns; ++j) {
    bias[j] = p.tile.bias[column + j];
    sums[j] = 0;
  }
  for (int begin = 0; begin < n; begin += kRowsInFlight) {
    Eight<Acc> x[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (begin + k < n && shared[begin + k].reads) {
        x[k] = Eight<Acc>::load(p.tile.rows + (first + begin + k) * stride + column);
      }
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      if (begin + k >= n) break;
      const RowGradient<Acc>& row = shared[begin + k];
      Acc values[kTileColumns];
#pragma unroll
      for (int j = 0; j < kTileColumns; ++j) {
        values[j] = row.filled;
        if (row.reads) values[j] = row.at(exp_of(x[k].at(j) + bias[j] - row.max) * row.share, column + j, blank);
      }
      if (!tokens_alone) {
        for (int j = 0; j < kTileColumns; ++j) {
          const int i = column + j - V;
          if (i >= 0) values[j] = i < D ? durations[(first + begin + k) * D + i] : Acc(0);
        }
      }
      Eight<S>::store(p.out + (first + begin + k) * stride + column, values);
#pragma unroll
      for (int j = 0; j < kTileColumns; ++j) sums[j] += values[j];
    }
  }
  if (p.column_sums) {
#pragma unroll
    for (int j = 0; j < kTileColumns; ++j) p.column_sums[blockIdx.x * stride + column + j] = sums[j];
  }
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::tile_log_probs(const Tensor& like, const TileLogProbs<Acc>& p) {
  const cuda::LaunchScope scope(like);
  const int64_t rows = p.tile.list.n;
  const auto launch = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(rows, cuda::kSumBlock / kThreads);
    cuda::tile_log_probs_kernel<Acc, kThreads><<<blocks, cuda::kSumBlock, 0, scope.stream()>>>(p);
  };
  if (rows * cuda::kWarp >= cuda::kFillsGpu || cuda::is_short_row<Acc>(p.tile.batch.V)) {
    launch(std::integral_constant<int, cuda::kWarp>{});
  } else {
    launch(std::integral_constant<int, cuda::kSumBlock>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename S>
void Cuda::tile_gradient(const Tensor& like, const TileGradient<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  const cuda::LaunchScope scope(like);
  const int64_t rows = p.tile.list.n, D = p.tile.batch.D;
  Tensor workspace =
      empty_on(like, {rows * static_cast<int64_t>(sizeof(RowGradient<Acc>) + D * sizeof(Acc))}, ScalarType::Byte);
  auto* const of_rows = static_cast<RowGradient<Acc>*>(workspace.mutable_data_ptr());
  auto* const durations = reinterpret_cast<Acc*>(of_rows + rows);
  cuda::row_gradient_kernel<S>
      <<<cuda::blocks_for(rows, cuda::kNodeBlock), cuda::kNodeBlock, 0, scope.stream()>>>(p, of_rows, durations);
  // Blocks of columns as equal as may be, so that none is left with a few.
  const unsigned vectors = cuda::blocks_for(p.tile.stride, kTileColumns);
  const unsigned parts = cuda::blocks_for(vectors, cuda::kMostThreads);
  const unsigned threads = cuda::blocks_for(cuda::blocks_for(vectors, parts), cuda::kWarp) * cuda::kWarp;
  const dim3 grid(cuda::blocks_for(rows, TileGradient<S, Acc>::kRows), parts);
  cuda::tile_gradient_kernel<S><<<grid, threads, 0, scope.stream()>>>(p, of_rows, durations);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) \
  template void Cuda::tile_gradient<S>(const Tensor&, const TileGradient<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)
#define TDT_INSTANTIATE_ACCUMULATE(S, _) template void Cuda::tile_log_probs<S>(const Tensor&, const TileLogProbs<S>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE_ACCUMULATE)

}  // namespace tdt
