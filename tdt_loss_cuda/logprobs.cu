// Rows of logits on the GPU: the log-probabilities of every node, eq. 1-3 (equations: lattice.cu).
//
// A row is read once, and the kernel is bound by that if what is done once per row stays small: so as few threads as
// possible share a row, kThreads of them: 8 for a short row, a warp for a longer one, a block where rows are too few to
// fill the GPU otherwise. Offsets within a row are int, offsets of rows int64. Sums are float32 (float64 for float64
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
void Cuda::log_probs(const Tensor& like, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                     const NodeRecords<accumulate_t<S>>& out, const Emission& emission) {
  const cuda::LaunchScope scope(like);
  const auto launch = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const unsigned blocks = cuda::blocks_for(list.n, cuda::kBlock / kThreads);
    cuda::log_probs_kernel<S, kThreads>
        <<<blocks, cuda::kBlock, 0, scope.stream()>>>(batch, list, logits, out, emission);
  };
  if (cuda::is_short_row<S>(batch.V) && list.n * 8 >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, 8>{});
  } else if (cuda::is_short_row<S>(batch.V) || list.n * cuda::kWarp >= cuda::kFillsGpu) {
    launch(std::integral_constant<int, cuda::kWarp>{});
  } else {
    launch(std::integral_constant<int, cuda::kBlock>{});
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(S)                                                                            \
  template void Cuda::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, \
                                   const NodeRecords<accumulate_t<S>>&, const Emission&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
