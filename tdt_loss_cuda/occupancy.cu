// Occupancies as tensors, eq. 7 (equations.h): of every arc, for alignment-based losses and plots, by a
// thread for each node and arc pair; and the sum of each node, which says which rows the backward of the fused losses
// needs, by a thread for each node.
#include "../tdt_loss_common/occupancy.h"

#include "launch.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kBlock = 256;

template <typename Acc>
__global__ void __launch_bounds__(kBlock) occupancy_kernel(const __grid_constant__ OccupancyTask<Acc> task) {
  const auto& [batch, arcs, saved, blank, label] = task;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t node = index / arcs.n;
  if (node >= batch.nodes()) return;
  const int i = static_cast<int>(index % arcs.n);
  const Node at = batch.node_at(node);
  const Extent extent = batch.extent(at.b);
  const bool counts = true;
  const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, 1, &counts);
  const bool valid = extent.has(at.t, at.u);
  ArcPair<Acc> occ{0, 0};
  if (valid && sample.nan) occ = {static_cast<Acc>(NAN), static_cast<Acc>(NAN)};
  if (valid && sample.feasible) occ = occupied_node(batch, extent, at, arcs, saved, 0).arc(i);
  const int64_t out = arcs.rnnt ? node : index;  // RNN-T: one of the two pairs has the blank, the other the label
  if (!arcs.rnnt || arcs.has_blank(i)) blank[out] = occ.blank;
  if (arcs.has_label(i)) label[out] = occ.label;
}

template <typename Acc>
__global__ void __launch_bounds__(kBlock, 4)
    node_occupancy_kernel(const __grid_constant__ NodeOccupancyTask<Acc> task) {
  const auto& [batch, saved, shaping, G] = task;
  const int64_t node = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (node >= batch.nodes()) return;
  const Node at = batch.node_at(node);
  Acc G_tdt;
  const NodeSums<Acc> sums = node_sums(batch, batch.extent(at.b), at, saved, shaping, &G_tdt);
  G[node] = sums.blank + sums.label;
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::occupancy(const Tensor& like, const OccupancyTask<Acc>& task) {
  const cuda::LaunchScope scope(like);
  const unsigned blocks = cuda::blocks_for(task.batch.nodes() * task.arcs.n, cuda::kBlock);
  cuda::occupancy_kernel<Acc><<<blocks, cuda::kBlock, 0, scope.stream()>>>(task);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <>
template <typename Acc>
void Cuda::node_occupancy(const Tensor& like, const NodeOccupancyTask<Acc>& task) {
  const cuda::LaunchScope scope(like);
  const unsigned blocks = cuda::blocks_for(task.batch.nodes(), cuda::kBlock);
  cuda::node_occupancy_kernel<Acc><<<blocks, cuda::kBlock, 0, scope.stream()>>>(task);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define TDT_INSTANTIATE(Acc, _)                                            \
  template void Cuda::occupancy(const Tensor&, const OccupancyTask<Acc>&); \
  template void Cuda::node_occupancy(const Tensor&, const NodeOccupancyTask<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
