// The band on the CPU (band.h): the twin of tdt_loss_cuda/band.cu and tdt_loss_cuda/select.cu.
#include "../tdt_loss_common/band.h"

#include "rows.h"

namespace tdt {

using namespace cpu;

template <>
template <typename S>
void Cpu::pilots(const Tensor&, const Pilots<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  std::vector<Acc> row(p.V), weight(p.H);
  std::fill(p.share, p.share + p.V, Acc(0));
  for (int i = 0; i < p.n; ++i) {
    for (int k = 0; k < p.V; ++k) row[k] = p.logits[i * p.stride + k] + p.bias[k];
    const Row<Acc> sums(row.data(), p.V);
    row_softmax(row.data(), row.data(), p.V, sums.max, Acc(1) / (sums.sum * p.n));
    for (int k = 0; k < p.V; ++k) p.share[k] += row[k];
  }
  p.share[p.blank] = 0;
  for (int k = 0; k < p.V; ++k) {
    if (!(p.share[k] >= Acc(kUnseen))) p.share[k] = 0;
  }
  std::vector<int32_t> order(p.V);
  for (int k = 0; k < p.V; ++k) order[k] = k;
  const auto more = [&](int a, int b) { return p.share[a] != p.share[b] ? p.share[a] > p.share[b] : a < b; };
  std::nth_element(order.begin(), order.begin() + p.frequent, order.end(), more);
  std::copy(order.begin(), order.begin() + p.frequent, p.chosen);
  std::sort(p.chosen, p.chosen + p.frequent);
  for (int f = 0; f < p.frequent; ++f) p.share[p.chosen[f]] = 0;

  std::fill(p.group_weight, p.group_weight + static_cast<int64_t>(p.groups) * p.H, Acc(0));
  std::fill(p.group_sums, p.group_sums + 3 * p.groups, Acc(0));
  std::vector<Acc> largest(p.H, Acc(0));
  Acc largest_bias = 0;
  for (int k = 0; k < p.V + p.D; ++k) {
    for (int h = 0; h < p.H; ++h) weight[h] = static_cast<Acc>(p.weight[static_cast<int64_t>(k) * p.H + h]);
    for (int h = 0; h < p.H; ++h) largest[h] = std::max(largest[h], std::abs(weight[h]));
    largest_bias = std::max(largest_bias, std::abs(p.bias[k]));
    if (k >= p.V || p.share[k] == 0) continue;
    const int m = k % p.groups;
    const Acc q = p.share[k];
    for (int h = 0; h < p.H; ++h) p.group_weight[static_cast<int64_t>(m) * p.H + h] += q * weight[h];
    p.group_sums[m] += q;
    p.group_sums[p.groups + m] += q * std::log(q);
    p.group_sums[2 * p.groups + m] += q * p.bias[k];
  }
  Acc bias = largest_bias < INFINITY ? largest_bias : Acc(0);  // a bias of -inf masks a token
  for (int h = 0; h < p.H; ++h) {
    p.rounding[h] = rounding_weight(p, largest[h]);
    bias += rounding_bias(p, largest[h]);
  }
  p.rounding[p.H] = bias;
}

template <>
template <typename S>
void Cpu::bound_columns(const Tensor&, const BoundColumns<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  const BoundLayout& layout = p.layout;
  const auto bias_of = [&](int k) { return p.bias ? p.bias[k] : Acc(0); };
  torch::stable::parallel_for(0, p.batch.B, 1, [&](int64_t begin, int64_t end) {
    std::vector<Acc> row(p.H);
    std::vector<uint8_t> is_label(p.batch.V);
    std::vector<int> labels;  // the distinct ones of a sample
    for (int b = static_cast<int>(begin); b < end; ++b) {
      S* weight = p.out_weight + static_cast<int64_t>(b) * p.out_columns * p.H;
      Acc* bias = p.out_bias + static_cast<int64_t>(b) * p.out_columns;
      Acc* counted = p.out_counted + static_cast<int64_t>(b) * p.out_columns;
      std::fill(weight, weight + static_cast<int64_t>(p.out_columns) * p.H, static_cast<S>(0.0f));
      std::fill(bias, bias + p.out_columns, Acc(0));
      std::fill(counted, counted + p.out_columns, -static_cast<Acc>(INFINITY));
      const auto copy = [&](int column, int k, bool counts) {
        std::copy(p.weight + static_cast<int64_t>(k) * p.H, p.weight + static_cast<int64_t>(k + 1) * p.H,
                  weight + static_cast<int64_t>(column) * p.H);
        bias[column] = bias_of(k);
        counted[column] = counts ? bias[column] : -static_cast<Acc>(INFINITY);
      };

      labels.clear();
      copy(0, p.blank, true);
      const int U = p.batch.extent(b).U;
      for (int u = 0; u < U; ++u) {
        const int y = p.batch.label(b, u);
        if (y < 0) continue;
        const bool fresh = y != p.blank && !is_label[y];
        copy(layout.label(u), y, fresh);
        if (fresh) labels.push_back(y);
        if (fresh) is_label[y] = 1;
      }
      for (int f = 0; f < layout.frequent; ++f) {
        copy(layout.first_frequent() + f, p.frequent[f], !is_label[p.frequent[f]]);
      }
      for (int m = 0; m < layout.groups; ++m) {
        const Acc whole = p.group_sums[m];
        GroupSums<Acc> sums{whole, p.group_sums[layout.groups + m], p.group_sums[2 * layout.groups + m]};
        std::copy(p.group_weight + static_cast<int64_t>(m) * p.H, p.group_weight + static_cast<int64_t>(m + 1) * p.H,
                  row.begin());
        for (const int y : labels) {
          if (!p.in_group(y, m)) continue;
          sums.remove(p.share[y], bias_of(y));
          for (int h = 0; h < p.H; ++h) {
            row[h] -= p.share[y] * static_cast<Acc>(p.weight[static_cast<int64_t>(y) * p.H + h]);
          }
        }
        bias[layout.centroid(m)] = -static_cast<Acc>(INFINITY);
        if (!sums.usable(whole)) continue;
        S* centroid = weight + static_cast<int64_t>(layout.centroid(m)) * p.H;
        S* residual = weight + static_cast<int64_t>(layout.residual(m)) * p.H;
        for (int h = 0; h < p.H; ++h) {
          const Acc value = row[h] / sums.share;
          centroid[h] = static_cast<S>(value);
          if (layout.split) residual[h] = static_cast<S>(value - static_cast<Acc>(centroid[h]));
        }
        bias[layout.centroid(m)] = sums.bias();
      }
      for (int h = 0; h < p.H; ++h) {
        weight[static_cast<int64_t>(layout.rounding()) * p.H + h] = static_cast<S>(p.rounding[h]);
      }
      bias[layout.rounding()] = p.rounding[p.H];
      for (int i = 0; i < layout.D; ++i) copy(layout.duration(i), p.batch.V + i, false);
      for (const int y : labels) is_label[y] = 0;
    }
  });
}

template <>
template <typename Acc>
void Cpu::bound_rows(const Tensor&, const BoundRows<Acc>& p) {
  const BoundLayout& layout = p.layout;
  const int R = record_size(layout.D);
  torch::stable::parallel_for(0, p.list.n, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<Acc> x(p.stride);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t node = p.list.at(p.batch, i);
      const Node at = p.batch.node_at(node);
      const Extent extent = p.batch.extent(at.b);
      if (!extent.has(at.t, at.u)) continue;
      const Acc* row = p.rows + i * p.stride;
      const Acc* bias = p.bias + static_cast<int64_t>(at.b) * p.stride;
      const Acc* counted = p.counted + static_cast<int64_t>(at.b) * p.stride;
      const Acc blank = row[0] + bias[0];
      const Acc label = row[layout.label(at.u)] + bias[layout.label(at.u)];
      for (int c = 0; c < layout.centroid(0); ++c) x[c] = row[c] + counted[c];
      for (int m = 0; m < layout.groups; ++m) {
        const int c = layout.centroid(m);
        x[c] = row[c] + (layout.split ? row[layout.residual(m)] : Acc(0)) + bias[c];
      }
      const Row<Acc> tokens(x.data(), layout.summed());
      const Acc margin = p.rounding * (row[layout.rounding()] + bias[layout.rounding()]);
      write_bound(p, node, at, extent, {blank, label, tokens.max + tokens.log_sum, margin});
      if (layout.D == 0) continue;
      Acc* durations = p.node_lp + node * R + kDurLp;
      for (int d = 0; d < layout.D; ++d) x[d] = row[layout.duration(d)] + bias[layout.duration(d)];
      const Row<Acc> z(x.data(), layout.D);
      for (int d = 0; d < layout.D; ++d) durations[d] = x[d] - z.max - z.log_sum + margin;
    }
  });
}

template <>
template <typename Acc>
void Cpu::posterior(const Tensor&, const Posterior<Acc>& p) {
  torch::stable::parallel_for(0, p.batch.nodes(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t node = begin; node < end; ++node) p.out[node] = posterior_of(p, node, p.batch.node_at(node));
  });
}

template <>
template <typename Acc>
void Cpu::select(const Tensor&, const Selection<Acc>& p) {
  const int64_t of_sample = static_cast<int64_t>(p.batch.max_T) * p.batch.max_U1;
  int32_t count = 0;
  std::vector<uint64_t> bins(Budget::kBins);
  for (int b = 0; b < p.batch.B; ++b) {
    const Budget budget = Budget::of(p.ll, p.batch.B, b, p.mixture, p.tolerance);
    const int64_t first = b * of_sample;
    std::fill(bins.begin(), bins.end(), 0);
    for (int64_t node = first; node < first + of_sample; ++node) {
      if (p.known && p.known[node]) continue;
      const uint64_t units = budget.units(p.mass[node]);
      if (Budget::may_go(units)) bins[Budget::bin(units)] += units;
    }
    int cut = 0;
    uint64_t dropped = 0;
    while (cut < Budget::kBins && Budget::may_go(dropped + bins[cut])) dropped += bins[cut++];
    p.dropped[b] = budget.mass(dropped);
    for (int64_t node = first; node < first + of_sample; ++node) {
      const uint64_t units = budget.units(p.mass[node]);
      const bool kept = !(p.known && p.known[node]) && budget.keeps(units, cut);
      p.row_of_node[node] = kept ? count : -1;
      if (!kept) continue;
      p.nodes[count++] = static_cast<int32_t>(node);
      if (p.known) p.known[node] = 1;
    }
  }
  std::fill(p.nodes + count, p.nodes + p.batch.nodes(), -1);
  *p.count = count;
}

template <>
void Cpu::list_rows(const Tensor&, const RowTable& table, int64_t n, int32_t* nodes) {
  torch::stable::parallel_for(0, n, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) nodes[i] = table.node(i);
  });
}

#define TDT_INSTANTIATE(S, _)                                                     \
  template void Cpu::pilots<S>(const Tensor&, const Pilots<S, accumulate_t<S>>&); \
  template void Cpu::bound_columns<S>(const Tensor&, const BoundColumns<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)
#define TDT_INSTANTIATE_ACCUMULATE(S, _)                                \
  template void Cpu::bound_rows<S>(const Tensor&, const BoundRows<S>&); \
  template void Cpu::posterior<S>(const Tensor&, const Posterior<S>&);  \
  template void Cpu::select<S>(const Tensor&, const Selection<S>&);
TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_INSTANTIATE_ACCUMULATE)

}  // namespace tdt
