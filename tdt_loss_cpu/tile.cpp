// Tiles of the loss without the logits on the CPU, eq. 1-3 and 7-9 (equations.h): the twin of
// tdt_loss_cuda/tile.cu. The bias is added to a copy of the row.
#include "../tdt_loss_common/tile.h"

#include "rows.h"

namespace tdt {

using namespace cpu;

namespace {

template <typename Acc>
void add_bias(const Tile<Acc>& tile, int64_t row, Acc* x) {
  const Acc* own = tile.rows + row * tile.stride;
  for (int v = 0; v < tile.batch.V + tile.batch.D; ++v) x[v] = own[v] + tile.bias[v];
}

}  // namespace

template <>
template <typename Acc>
void Cpu::tile_log_probs(const Tensor&, const TileLogProbs<Acc>& p) {
  const Batch& batch = p.tile.batch;
  const int R = record_size(batch.D);
  torch::stable::parallel_for(0, p.tile.list.n, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> x(batch.V + batch.D);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t node = p.tile.list.at(batch, row);
      const Node at = batch.node_at(node);
      const Extent extent = batch.extent(at.b);
      Acc* record = p.out.node_lp + node * R;
      std::fill(record, record + R, Acc(0));
      if (!extent.has(at.t, at.u)) continue;

      add_bias(p.tile, row, x.data());
      write_token_fields(batch, node, at, extent, x.data(), p.out, p.emission);
      write_duration_fields(record, x.data() + batch.V, batch.D);
    }
  });
}

template <>
template <typename S>
void Cpu::tile_gradient(const Tensor&, const TileGradient<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  constexpr int64_t kRows = TileGradient<S, Acc>::kRows;
  const Batch& batch = p.tile.batch;
  const int64_t n = p.tile.list.n, stride = p.tile.stride;
  torch::stable::parallel_for(0, (n + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    std::vector<Acc> x(stride), durations(batch.D + 1), sums(stride);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      std::fill(sums.begin(), sums.end(), Acc(0));
      for (int64_t i = chunk * kRows; i < std::min(n, (chunk + 1) * kRows); ++i) {
        const Node at = batch.node_at(p.tile.list.at(batch, i));
        const RowGradient<Acc> row = row_gradient(p, at, durations.data());
        std::fill(x.begin(), x.end(), Acc(0));
        if (row.reads) {
          add_bias(p.tile, i, x.data());
          row_softmax(x.data(), x.data(), batch.V, row.max, row.share);  // eq. 8
          x[p.shaping.blank] -= row.scaled_blank;
          if (row.label >= 0) x[row.label] -= row.scaled_label;
          if (row.limit < INFINITY) row_clamp(x.data(), batch.V, row.limit);
        } else {
          std::fill(x.begin(), x.begin() + batch.V, row.filled);
        }
        std::copy(durations.begin(), durations.begin() + batch.D, x.begin() + batch.V);
        std::fill(x.begin() + batch.V + batch.D, x.end(), Acc(0));
        S* out = p.out + i * stride;
        for (int64_t v = 0; v < stride; ++v) {
          out[v] = static_cast<S>(x[v]);
          sums[v] += x[v];
        }
      }
      if (p.column_sums) std::copy(sums.begin(), sums.end(), p.column_sums + chunk * stride);
    }
  });
}

#define TDT_INSTANTIATE(S, _) \
  template void Cpu::tile_gradient<S>(const Tensor&, const TileGradient<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)
#define TDT_INSTANTIATE_ACCUMULATE(S, _) template void Cpu::tile_log_probs<S>(const Tensor&, const TileLogProbs<S>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE_ACCUMULATE)

}  // namespace tdt
