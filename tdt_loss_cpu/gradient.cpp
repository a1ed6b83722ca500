// The gradient of the logits on the CPU, eq. 7-9 and 11-13 (equations.h).
//
// The twin of tdt_loss_cuda/gradient.cu. Nodes are shared out over torch's threads; a row is read once, where it has
// occupancy, and nothing is kept per (t, u, v) but the gradient. Sums are float32 (float64 for float64 logits).
#include <cmath>

#include "../tdt_loss_common/occupancy.h"
#include "rows.h"

namespace tdt {

using namespace cpu;

template <>
template <typename S>
void Cpu::gradient(const Tensor&, const GradientTask<S>& task) {
  using Acc = accumulate_t<S>;
  torch::stable::parallel_for(0, task.list.n, kGrain, [&](int64_t begin, int64_t end) {
    const auto& [batch, list, logits, grad, saved, upstream, shaping] = task;
    std::vector<Acc> buffer;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = list.at(batch, row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      const Acc scale = upstream.at(at.b), limit = shaping.limit(scale);
      Acc G_tdt;
      const NodeSums<Acc> G = node_sums(batch, extent, at, saved, shaping, &G_tdt);
      const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, shaping.arcs[0], saved, 0);
      S* grad_z = grad.durations.row(row, at);
      for (int i = 0; i < batch.D; ++i) {
        const ArcPair<Acc> occ = G_tdt == 0 ? ArcPair<Acc>{0, 0} : occupied.arc(i);
        grad_z[i] = static_cast<S>(duration_entry(shaping, occupied.record[kDurLp + i], occ, G_tdt, scale));
      }

      const Acc G_both = G.blank + G.label;
      S* grad_x = grad.tokens.row(row, at);
      if (G_both == 0 || std::isnan(G_both)) {  // the logits need not be read
        std::fill(grad_x, grad_x + batch.V, static_cast<S>(G_both));
        continue;
      }
      const Acc* x = widened(logits.tokens.row(row, at), batch.V, buffer);
      Acc* result = row_for(grad_x, batch.V, buffer);  // may be x: nothing of x is read afterwards
      row_softmax(x, result, batch.V, saved.row_max[node], G_both * scale / occupied.record[kRowSum]);  // eq. 8
      result[shaping.blank] -= G.blank * scale;
      const int y = at.u < extent.U ? batch.label(at.b, at.u) : -1;
      if (y >= 0) result[y] -= G.label * scale;
      if (limit < INFINITY) row_clamp(result, batch.V, limit);
      store_row(result, grad_x, batch.V);
    }
  });
}

#define TDT_INSTANTIATE(S, _) template void Cpu::gradient(const Tensor&, const GradientTask<S>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
