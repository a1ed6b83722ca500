// The best alignment on the CPU (align.h).
//
// The twin of tdt_loss_cuda/align.cu. A task is one sample; its nodes are visited from the last frame to the first and,
// in a frame, from the last label to the first, since an arc of duration 0 leads to (t, u + 1).
#include <algorithm>
#include <cmath>
#include <vector>

#include "../tdt_loss_common/backend.h"

namespace tdt {
namespace {

// Writes frames and durations (U,) of sample b, -1 before, and returns its score.
template <typename Acc>
double align_sample(const AlignTask<Acc>& task, int b, int64_t* frames, int64_t* durations) {
  const Batch& batch = task.batch;
  const Extent extent = batch.extent(b);
  if (!batch.well_formed(b)) return NAN;
  if (extent.T == 0) return -INFINITY;
  const size_t size = static_cast<size_t>(lattice_index(extent, extent.T, 0));
  std::vector<double> best(size);
  std::vector<uint8_t> best_arcs(size);
  bool nan = false;
  for (int t = extent.T - 1; t >= 0; --t) {
    for (int u = extent.U; u >= 0; --u) {
      const Acc* record = task.node_lp + batch.node(b, t, u) * record_size(batch.D);
      const BestStep step = best_step(task.arcs, extent, t, u, record, best.data());
      best[lattice_index(extent, t, u)] = step.best;
      best_arcs[lattice_index(extent, t, u)] = step.arc;
      nan = nan || step.nan;
    }
  }
  if (nan) return NAN;
  if (best[0] > -INFINITY) trace(task.arcs, extent, best_arcs.data(), frames, durations);
  return best[0];
}

}  // namespace

template <>
template <typename Acc>
void Cpu::align(const Tensor&, const AlignTask<Acc>& task) {
  torch::stable::parallel_for(0, task.batch.B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t *frames = task.frames + b * task.U, *durations = task.durations + b * task.U;
      std::fill(frames, frames + task.U, -1);
      std::fill(durations, durations + task.U, -1);
      task.score[b] = static_cast<Acc>(align_sample(task, static_cast<int>(b), frames, durations));
    }
  });
}

#define TDT_INSTANTIATE(Acc, _) template void Cpu::align(const Tensor&, const AlignTask<Acc>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
