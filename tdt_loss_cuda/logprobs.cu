// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3 (equations.h).
//
// A row is read once, and the kernel is bound by that as long as what is done once per row stays small. So as few
// threads as possible share a row: 8 for a short row, a warp for a longer one, a block where rows are too few to fill
// the GPU otherwise. Offsets within a row are int, offsets of rows int64. Sums are float32 (float64 for float64
// logits). Padding is never read. Loops over the fields of a record mostly run once and are not unrolled.
#include "row_sums.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = kSumBlock;

template <typename S, int kThreads>
__global__ void __launch_bounds__(kBlock, kRowThreads<S> / kBlock)
    log_probs_kernel(const __grid_constant__ Batch batch, const NodeList list,
                     const __grid_constant__ LogitRows<S> logits,
                     const __grid_constant__ NodeRecords<accumulate_t<S>> out,
                     const __grid_constant__ Emission emission) {
  const int64_t row = group_row<kThreads>();
  if (row >= list.n) return;
  const int64_t node = list.at(batch, row);
  const Node at = batch.node_at(node);
  write_record<kThreads, false>(batch, node, at, logits.tokens.row(row, at), logits.durations.row(row, at), nullptr,
                                out, emission);
}

}  // namespace
}  // namespace cuda

template <>
template <typename S>
void Cuda::log_probs(const Tensor& like, const LogProbsTask<S>& task) {
  const cuda::LaunchScope scope(like);
  const int64_t rows = task.list.n;
  const auto launch = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(rows, cuda::kBlock / kThreads);
    cuda::log_probs_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(task.batch, task.list, task.logits, task.out, task.emission);
  };
  if (cuda::is_short_row<S>(task.batch.V) && rows * 8 >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, 8>{});
  } else if (cuda::is_short_row<S>(task.batch.V) || rows * cuda::kWarp >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, cuda::kWarp>{});
  } else {
    launch(std::integral_constant<int, cuda::kBlock>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S, _) template void Cuda::log_probs(const Tensor&, const LogProbsTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
