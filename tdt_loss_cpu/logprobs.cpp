// Rows of logits on the CPU: eq. 1-3 forward, eq. 7-9 backward (equations: tdt_loss_cuda/lattice.cu).
//
// The twin of tdt_loss_cuda/logprobs.cu, function by function. Nodes are shared out over torch's threads; a row is read
// once per direction and nothing is kept per (t, u, v) but the gradient. Sums are float32 (float64 for float64 logits).
#include <cmath>

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/occupancy.h"
#include "rows.h"

namespace tdt {
namespace {

using namespace cpu;

constexpr int64_t kGrain = 16;  // rows per task at least: a row costs about a microsecond at V = 1024

}  // namespace

template <>
template <typename S>
void Cpu::log_probs(const Tensor&, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                    accumulate_t<S>* node_lp, const Emission& emission) {
  using Acc = accumulate_t<S>;
  const int R = record_size(batch.D);
  const Acc sigma = static_cast<Acc>(emission.sigma);
  torch::stable::parallel_for(0, list.n, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> buffer;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = list.at(row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      Acc* record = node_lp + node * R;
      std::fill(record, record + R, Acc(0));
      if (!extent.has(at.t, at.u)) continue;  // padding is not read

      const Acc* x = widened(logits.tokens.row(row, at), batch.V, buffer);
      const Acc lse = row_logsumexp(x, batch.V);
      const int y = at.u < extent.U ? batch.label(at.b, at.u) : -1;
      const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - at.t));
      record[kLse] = lse;
      record[kBlankLp] = x[emission.blank] - lse - sigma;                 // eq. 1
      record[kLabelLp] = y < 0 ? -INFINITY : x[y] - lse - sigma + delay;  // eq. 2
      if (batch.D == 0) continue;
      const Acc* z = widened(logits.durations.row(row, at), batch.D, buffer);
      const Acc lse_z = row_logsumexp(z, batch.D);
      for (int i = 0; i < batch.D; ++i) record[kDurLp + i] = z[i] - lse_z;  // eq. 3
    }
  });
}

namespace {

// Sums of a node's occupancies over its arcs and lattices, as the gradient takes them.
template <typename Acc>
struct NodeSums {
  Acc blank = 0, label = 0;    // G_blank, G_label
  std::vector<Acc> durations;  // G_i of the TDT lattice

  explicit NodeSums(int D) : durations(D) {}

  void collect(const Batch& batch, const Extent& extent, const Node& at, const Saved<Acc>& saved,
               const Shaping<Acc>& shaping) {
    blank = label = 0;
    std::fill(durations.begin(), durations.end(), Acc(0));
    for (int l = 0; l < shaping.lattices; ++l) {
      const Acc blank_share = shaping.blank_share[l], label_share = shaping.label_share[l];
      if (blank_share == 0) continue;
      const Arcs& arcs = shaping.arcs[l];
      const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, arcs, saved, l);
      for (int i = 0; i < arcs.n; ++i) {
        const ArcPair<Acc> occ = occupied.arc(i);
        blank += blank_share * occ.blank;
        label += label_share * occ.label;
        if (!arcs.rnnt) durations[i] = blank_share * occ.blank + label_share * occ.label;
      }
    }
  }
};

}  // namespace

template <>
template <typename S>
void Cpu::gradient(const Tensor&, const Batch& batch, const NodeList& list, const LogitRows<S>& logits,
                   const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved,
                   const Upstream<accumulate_t<S>>& upstream, const Shaping<accumulate_t<S>>& shaping) {
  using Acc = accumulate_t<S>;
  const int R = record_size(batch.D);
  torch::stable::parallel_for(0, list.n, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> buffer;
    NodeSums<Acc> G(batch.D);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = list.at(row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      const SampleState sample = SampleState::of(saved.ll, batch.B, at.b, shaping.lattices, shaping.blank_share);
      const Acc* record = saved.node_lp + node * R;
      const Acc scale = upstream.at(at.b);
      const Acc limit = shaping.limit(scale);
      const bool valid = extent.has(at.t, at.u);
      const bool lives = valid && sample.lives;
      if (lives) G.collect(batch, extent, at, saved, shaping);

      S* grad_x = grad.tokens.row(row, at);
      S* grad_z = grad.durations.row(row, at);
      const Acc G_all = G.blank + G.label;
      if (!lives || G_all == 0) {  // padding, no alignment through this node, or a malformed sample; x need not be read
        const S value = static_cast<S>(valid && sample.nan ? Acc(NAN) : Acc(0));
        std::fill(grad_x, grad_x + batch.V, value);
        std::fill(grad_z, grad_z + batch.D, value);
        continue;
      }
      const Acc* x = widened(logits.tokens.row(row, at), batch.V, buffer);
      Acc* result = row_for(grad_x, batch.V, buffer);  // may be x: nothing of x is read afterwards
      row_softmax(x, result, batch.V, record[kLse],
                  G_all * scale);  // eq. 8
      result[shaping.blank] -= G.blank * scale;
      if (at.u < extent.U) result[batch.label(at.b, at.u)] -= G.label * scale;
      if (limit < INFINITY) row_clamp(result, batch.V, limit);
      store_row(result, grad_x, batch.V);
      Acc G_tdt = 0;
      for (const Acc G_i : G.durations) G_tdt += G_i;
      for (int i = 0; i < batch.D; ++i) {
        const Acc value = (std::exp(record[kDurLp + i]) * G_tdt - G.durations[i]) * scale;  // eq. 9
        grad_z[i] = static_cast<S>(value > limit ? limit : value < -limit ? -limit : value);
      }
    }
  });
}

#define TDT_INSTANTIATE(S)                                                                                             \
  template void Cpu::log_probs<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&, accumulate_t<S>*, \
                                  const Emission&);                                                                    \
  template void Cpu::gradient<S>(const Tensor&, const Batch&, const NodeList&, const LogitRows<S>&,                    \
                                 const LogitRows<S>&, const Saved<accumulate_t<S>>&, const Upstream<accumulate_t<S>>&, \
                                 const Shaping<accumulate_t<S>>&);
TDT_INSTANTIATE(float)
TDT_INSTANTIATE(double)
TDT_INSTANTIATE(Half)
TDT_INSTANTIATE(BFloat16)

}  // namespace tdt
