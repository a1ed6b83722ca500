// The occupancy of every arc and of every node as tensors, eq. 7, on the CPU: the twin of tdt_loss_cuda/occupancy.cu.
#include "../tdt_loss_common/occupancy.h"

#include <cmath>

namespace tdt {

constexpr int64_t kGrain = 256;  // nodes per task at least

template <>
template <typename Acc>
void Cpu::occupancy(const Tensor&, const OccupancyTask<Acc>& task) {
  torch::stable::parallel_for(0, task.batch.nodes(), kGrain, [&](int64_t begin, int64_t end) {
    const auto& [batch, arcs, saved, blank, label] = task;
    const int columns = arcs.rnnt ? 1 : arcs.n;
    for (int64_t node = begin; node < end; ++node) {
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      const bool counts = true;
      const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, 1, &counts);
      const bool valid = extent.has(at.t, at.u);
      const Acc otherwise = valid && sample.nan ? Acc(NAN) : Acc(0);
      std::fill(blank + node * columns, blank + (node + 1) * columns, otherwise);
      std::fill(label + node * columns, label + (node + 1) * columns, otherwise);
      if (!valid || !sample.feasible) continue;
      const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, arcs, saved, 0);
      for (int i = 0; i < arcs.n; ++i) {  // RNN-T: one of the two has the blank, the other the label
        const ArcPair<Acc> occ = occupied.arc(i);
        if (!arcs.rnnt || arcs.has_blank(i)) blank[node * columns + i % columns] = occ.blank;
        if (arcs.has_label(i)) label[node * columns + i % columns] = occ.label;
      }
    }
  });
}

template <>
template <typename Acc>
void Cpu::node_occupancy(const Tensor&, const NodeOccupancyTask<Acc>& task) {
  torch::stable::parallel_for(0, task.batch.nodes(), kGrain, [&](int64_t begin, int64_t end) {
    const auto& [batch, saved, shaping, G] = task;
    for (int64_t node = begin; node < end; ++node) {
      const Node at = batch.node_at(node);
      Acc G_tdt;
      const NodeSums<Acc> sums = node_sums(batch, batch.extent(at.b), at, saved, shaping, &G_tdt);
      G[node] = sums.blank + sums.label;
    }
  });
}

#define TDT_INSTANTIATE(Acc, _)                                           \
  template void Cpu::occupancy(const Tensor&, const OccupancyTask<Acc>&); \
  template void Cpu::node_occupancy(const Tensor&, const NodeOccupancyTask<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
