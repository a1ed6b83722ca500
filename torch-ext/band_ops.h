// The ops of the losses without logits beside the hidden layer, once for both backends: tiles of rows, and the band of
// nodes that are computed in full. Schemas: torch_binding.cpp.
#pragma once

#include "../tdt_loss_common/band.h"
#include "../tdt_loss_common/checks.h"
#include "../tdt_loss_common/tile.h"

namespace tdt {

template <typename Acc>
Tile<Acc> tile_of(const Tensor& tile, const Tensor& bias, const Batch& batch, const NodeList& list) {
  return {batch, list, tile.stride(0), const_data<Acc>(tile), const_data<Acc>(bias)};
}

inline NodeList check_biased_tile(const Tensor& tile, const Tensor& bias, const Tensor& nodes, const Tensor& node_lp,
                                  int64_t columns) {
  const NodeList list = check_tile(tile, nodes, node_lp, columns);
  STD_TORCH_CHECK(tile.scalar_type() == node_lp.scalar_type(), "tile must have the dtype of node_lp");
  STD_TORCH_CHECK(tile.is_contiguous() && tile.size(1) % kTileColumns == 0 &&
                      reinterpret_cast<uintptr_t>(tile.const_data_ptr()) % 16 == 0,
                  "tile must be contiguous, of a multiple of ", kTileColumns, " columns, and aligned to 16 bytes");
  STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == tile.size(1) && bias.is_contiguous() &&
                      bias.scalar_type() == tile.scalar_type() && bias.device() == tile.device() &&
                      reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 == 0,
                  "bias must be contiguous, with a number of the tile's dtype for each of its columns");
  return list;
}

// eq. 1-3 of the nodes of a tile, into node_lp and row_max.
template <class Backend>
void log_probs_tile_(const Tensor& tile, const Tensor& bias, const Tensor& nodes, const Tensor& node_lp,
                     const Tensor& row_max, const Tensor& targets, const Tensor& logit_lengths,
                     const Tensor& target_lengths, int64_t blank, int64_t vocab, int64_t num_durations, double sigma,
                     double delay_penalty) {
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, num_durations);
  check_node_lp(node_lp, num_durations);
  check_row_max(row_max, node_lp);
  check_blank(blank, vocab);
  check_penalties(batch, sigma, delay_penalty);
  const NodeList list = check_biased_tile(tile, bias, nodes, node_lp, vocab + num_durations);
  if (list.n == 0) return;
  dispatch_accumulate(tile.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    Backend::template tile_log_probs<Acc>(tile, {tile_of<Acc>(tile, bias, batch, list),
                                                 {static_cast<int>(blank), sigma, delay_penalty},
                                                 {mutable_data<Acc>(node_lp), mutable_data<Acc>(row_max)}});
  });
}

// The gradient of a tile's logits into `out`, and the sums of each TileGradient::kRows of its rows into `column_sums`.
template <class Backend>
void gradient_tile_(const Tensor& out, const OptionalTensor& column_sums, const Tensor& grad_loss,
                    const Tensor& weights, const Tensor& tile, const Tensor& bias, const Tensor& nodes,
                    const Tensor& targets, const Tensor& logit_lengths, const Tensor& target_lengths,
                    const Tensor& node_lp, const Tensor& row_max, const Tensor& ll, const Tensor& alpha_beta,
                    int64_t blank, int64_t vocab, const DurationList& durations, double omega, double fastemit_lambda,
                    double clamp) {
  const auto D = static_cast<int64_t>(durations.size());
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, D);
  check_blank(blank, vocab);
  const NodeList list = check_biased_tile(tile, bias, nodes, node_lp, vocab + D);
  const Arcs arcs = arcs_of(durations);
  const int lattices = lattices_of(arcs, omega);
  check_saved(batch, lattices, tile.scalar_type(), node_lp, ll, alpha_beta);
  check_row_max(row_max, node_lp);
  check_upstream(grad_loss, weights, node_lp, batch.B);
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == tile.size(0) && out.size(1) == tile.size(1) && out.is_contiguous() &&
                      accumulate_type(out.scalar_type()) == tile.scalar_type() && out.device() == tile.device() &&
                      reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0,
                  "out must be contiguous, of the shape of the tile and a dtype that belongs to it");
  constexpr int64_t kRows = TileGradient<float, float>::kRows;
  STD_TORCH_CHECK(!column_sums || (column_sums->scalar_type() == tile.scalar_type() && column_sums->is_contiguous() &&
                                   column_sums->numel() == (list.n + kRows - 1) / kRows * tile.size(1) &&
                                   column_sums->device() == tile.device()),
                  "column_sums must have a row for each ", kRows, " rows of the tile");
  if (list.n == 0) return;
  dispatch_logits(out.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    const Saved<Acc> saved{const_data<Acc>(node_lp), const_data<Acc>(row_max), const_data<double>(ll),
                           const_data<double>(alpha_beta)};
    const Upstream<Acc> upstream{const_data<Acc>(grad_loss), grad_loss.dim() == 0 ? 0 : grad_loss.stride(0),
                                 weights.size(0) == 0 ? nullptr : const_data<Acc>(weights)};
    const auto shaping =
        Shaping<Acc>::of(static_cast<int>(blank), arcs, Mixture::of(lattices, omega), fastemit_lambda, clamp);
    Backend::template tile_gradient<S>(
        tile, {tile_of<Acc>(tile, bias, batch, list), saved, upstream, shaping, mutable_data<S>(out),
               column_sums ? mutable_data<Acc>(*column_sums) : nullptr});
  });
}

// The nodes of every so many rows from `first` on, one for each place of `nodes` (RowTable).
template <class Backend>
void list_rows_(const Tensor& nodes, const Tensor& table, int64_t first, int64_t step, int64_t max_T, int64_t max_U1) {
  STD_TORCH_CHECK(nodes.dim() == 1 && nodes.scalar_type() == ScalarType::Int && nodes.is_contiguous(),
                  "nodes must be a contiguous int32 vector");
  STD_TORCH_CHECK(table.dim() == 2 && table.size(0) == 4 && table.scalar_type() == ScalarType::Long &&
                      table.is_contiguous() && table.device() == nodes.device(),
                  "table must be a contiguous int64 tensor of shape (4, B)");
  if (nodes.size(0) == 0) return;
  STD_TORCH_CHECK(table.size(1) > 0, "table is empty");
  const RowTable rows{static_cast<int>(table.size(1)), static_cast<int>(max_T), static_cast<int>(max_U1), first, step,
                      const_data<int64_t>(table)};
  Backend::list_rows(nodes, rows, nodes.size(0), mutable_data<int32_t>(nodes));
}

inline BoundLayout layout_of(int64_t max_U1, int64_t frequent, int64_t groups, bool split, int64_t D) {
  STD_TORCH_CHECK(max_U1 >= 1 && frequent >= 0 && groups >= 0 && frequent < kMostColumns / 8 &&
                      groups < kMostColumns / 8 && max_U1 < kMostColumns / 8,
                  "the narrow rows are too wide");
  return {static_cast<int>(max_U1) - 1, static_cast<int>(frequent), static_cast<int>(groups), split,
          static_cast<int>(D)};
}

// What rows of the batch say about its tokens (Pilots): chosen (frequent,), share (V,), group_weight (groups, H),
// group_sums (3, groups), rounding (H + 1,). `logits`: of the pilots, without the bias.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pilots(const Tensor& logits, const Tensor& bias,
                                                          const Tensor& weight, int64_t blank, int64_t num_durations,
                                                          int64_t frequent, int64_t groups, int64_t activation,
                                                          double dropout) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(0) > num_durations && num_durations >= 0,
                  "weight must be a contiguous matrix with a row for each token and duration");
  const int64_t V = weight.size(0) - num_durations, H = weight.size(1);
  const ScalarType type = accumulate_type(weight.scalar_type());
  check_blank(blank, V);
  STD_TORCH_CHECK(frequent >= 0 && groups >= 1 && frequent < V && groups <= V, "frequent and groups must be below ", V);
  STD_TORCH_CHECK(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == type && logits.stride(1) == 1 && logits.size(0) > 0 &&
                      logits.size(1) >= weight.size(0) && logits.device() == weight.device(),
                  "logits must be a matrix in the accumulation dtype with a column for each row of the weight");
  STD_TORCH_CHECK(bias.scalar_type() == type && bias.is_contiguous() && bias.numel() >= weight.size(0) &&
                      bias.device() == weight.device(),
                  "bias must be contiguous, with a number for each row of the weight");
  Tensor chosen = empty_on(weight, {frequent}, ScalarType::Int), share = empty_on(weight, {V}, type);
  Tensor group_weight = empty_on(weight, {groups, H}, type), group_sums = empty_on(weight, {3, groups}, type);
  Tensor rounding = empty_on(weight, {H + 1}, type);
  dispatch_logits(weight.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    Pilots<S, Acc> p{};
    p.n = static_cast<int>(logits.size(0));
    p.V = static_cast<int>(V);
    p.D = static_cast<int>(num_durations);
    p.H = static_cast<int>(H);
    p.blank = static_cast<int>(blank);
    p.frequent = static_cast<int>(frequent);
    p.groups = static_cast<int>(groups);
    p.stride = logits.stride(0);
    p.logits = const_data<Acc>(logits);
    p.bias = const_data<Acc>(bias);
    p.weight = const_data<S>(weight);
    p.activation = static_cast<Activation>(activation);
    p.dropout_scale = 1 / (1 - dropout);
    p.share = mutable_data<Acc>(share);
    p.chosen = mutable_data<int32_t>(chosen);
    p.group_weight = mutable_data<Acc>(group_weight);
    p.group_sums = mutable_data<Acc>(group_sums);
    p.rounding = mutable_data<Acc>(rounding);
    Backend::template pilots<S>(weight, p);
  });
  return {chosen, share, group_weight, group_sums, rounding};
}

// The head narrowed for each sample: weight (B, columns, H), bias and counted (B, columns), for decoder states
// (B, max_U1, ...).
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> bound_columns(const Tensor& weight, const OptionalTensor& bias,
                                                 const Tensor& targets, const Tensor& target_lengths,
                                                 const Tensor& frequent, const Tensor& share,
                                                 const Tensor& group_weight, const Tensor& group_sums,
                                                 const Tensor& rounding, int64_t blank, int64_t max_U1,
                                                 int64_t num_durations, int64_t columns) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be a contiguous matrix");
  const int64_t H = weight.size(1), V = weight.size(0) - num_durations, M = group_weight.size(0);
  const ScalarType type = accumulate_type(weight.scalar_type());
  const bool split = type != weight.scalar_type();
  check_blank(blank, V);
  const BoundLayout layout = layout_of(max_U1, frequent.size(0), M, split, num_durations);
  STD_TORCH_CHECK(columns >= layout.columns() && columns <= kMostColumns, "columns must be at least ", layout.columns(),
                  ", got ", columns);
  const auto check = [&](const Tensor& t, int64_t count, ScalarType expected, const char* name) {
    STD_TORCH_CHECK(
        t.is_contiguous() && t.numel() == count && t.scalar_type() == expected && t.device() == weight.device(), name,
        " must be contiguous, with ", count, " elements on the device of the weight");
  };
  if (bias) check(*bias, V + num_durations, type, "bias");
  check(frequent, frequent.size(0), ScalarType::Int, "frequent");
  check(share, V, type, "share");
  check(group_weight, M * H, type, "group_weight");
  check(group_sums, 3 * M, type, "group_sums");
  check(rounding, H + 1, type, "rounding");
  const int64_t B = targets.size(0);
  // Of the lengths only those of the labels count: those of the frames are their own.
  const Tensor shape = empty_on(weight, {B, 1, max_U1, 0}, type);
  Batch batch = batch_of(shape, targets, target_lengths, target_lengths, V, num_durations);
  batch.max_T = std::numeric_limits<int>::max();
  Tensor out_weight = empty_on(weight, {B, columns, H}, weight.scalar_type());
  Tensor out_bias = empty_on(weight, {B, columns}, type), counted = empty_on(weight, {B, columns}, type);
  if (B == 0) return {out_weight, out_bias, counted};
  dispatch_logits(weight.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    Backend::template bound_columns<S>(
        weight, {batch, layout, static_cast<int>(blank), static_cast<int>(H), const_data<S>(weight),
                 bias ? const_data<Acc>(*bias) : nullptr, const_data<int32_t>(frequent), const_data<Acc>(share),
                 const_data<Acc>(group_weight), const_data<Acc>(group_sums), const_data<Acc>(rounding),
                 static_cast<int>(columns), mutable_data<S>(out_weight), mutable_data<Acc>(out_bias),
                 mutable_data<Acc>(counted)});
  });
  return {out_weight, out_bias, counted};
}

// Upper bounds of eq. 1-3 of the nodes of narrow rows, into node_lp. `split`: as the weights were 16-bit.
template <class Backend>
void bound_rows_(const Tensor& rows, const Tensor& bias, const Tensor& counted, const Tensor& nodes,
                 const Tensor& node_lp, const Tensor& targets, const Tensor& logit_lengths,
                 const Tensor& target_lengths, int64_t vocab, int64_t num_durations, int64_t frequent, int64_t groups,
                 bool split, double sigma, double delay_penalty, double rounding) {
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, num_durations);
  check_node_lp(node_lp, num_durations);
  check_penalties(batch, sigma, delay_penalty);
  const BoundLayout layout = layout_of(batch.max_U1, frequent, groups, split, num_durations);
  const NodeList list = check_tile(rows, nodes, node_lp, layout.columns());
  STD_TORCH_CHECK(rows.scalar_type() == node_lp.scalar_type() && rows.is_contiguous(),
                  "rows must be contiguous and of the dtype of node_lp");
  for (const Tensor* t : {&bias, &counted}) {
    STD_TORCH_CHECK(t->scalar_type() == rows.scalar_type() && t->is_contiguous() && t->device() == rows.device() &&
                        t->numel() == batch.B * rows.size(1),
                    "bias and counted must be contiguous and of shape (B, columns)");
  }
  if (list.n == 0) return;
  dispatch_accumulate(rows.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    Backend::template bound_rows<Acc>(rows, {batch,
                                             layout,
                                             list,
                                             static_cast<int>(rows.size(1)),
                                             const_data<Acc>(rows),
                                             const_data<Acc>(bias),
                                             const_data<Acc>(counted),
                                             {0, sigma, delay_penalty},
                                             static_cast<Acc>(rounding),
                                             mutable_data<Acc>(node_lp)});
  });
}

inline int check_lattices(const Tensor& ll, const Batch& batch) {
  STD_TORCH_CHECK(ll.dim() == 2 && ll.size(0) >= 1 && ll.size(0) <= kMaxLattices && ll.size(1) == batch.B &&
                      ll.is_contiguous() && ll.scalar_type() == ScalarType::Double,
                  "ll must be a contiguous float64 tensor of shape (lattices, B)");
  return static_cast<int>(ll.size(0));
}

// The posterior probability of each node, `factor` times: exp(alpha + beta - ll) (B, T, U1), in the dtype of `like`
// (B, T, U1, ...).
template <class Backend>
Tensor posterior(const Tensor& like, const Tensor& alpha_beta, const Tensor& ll, const Tensor& targets,
                 const Tensor& logit_lengths, const Tensor& target_lengths, double omega, double factor) {
  const Batch batch = batch_of(like, targets, logit_lengths, target_lengths, 1, 0);
  const int lattices = check_lattices(ll, batch);
  STD_TORCH_CHECK(alpha_beta.scalar_type() == ScalarType::Double && alpha_beta.is_contiguous() &&
                      alpha_beta.numel() == 2 * lattices * batch.nodes() && alpha_beta.device() == like.device() &&
                      ll.device() == like.device(),
                  "alpha_beta must be a contiguous float64 tensor of shape (lattices, 2, B, T, U1)");
  Tensor out = empty_on(like, {batch.B, batch.max_T, batch.max_U1}, like.scalar_type());
  if (batch.nodes() == 0) return out;
  dispatch_accumulate(like.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    Backend::template posterior<Acc>(like, {batch, Mixture::of(lattices, omega), const_data<double>(alpha_beta),
                                            const_data<double>(ll), factor, mutable_data<Acc>(out)});
  });
  return out;
}

// Which nodes to keep (Budget): the list of them, as long as all nodes; the place of each node in it, or -1 (B, T, U1);
// how many there are (1,); what is left out of each sample (B,). Nodes that are `known` are no candidates; those that
// are kept become known.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> select_nodes_(const OptionalTensor& known, const Tensor& mass,
                                                         const Tensor& ll, const Tensor& targets,
                                                         const Tensor& logit_lengths, const Tensor& target_lengths,
                                                         double omega, double tolerance) {
  STD_TORCH_CHECK(mass.dim() == 3 && mass.is_contiguous(), "mass must be contiguous and of shape (B, T, U1)");
  STD_TORCH_CHECK(tolerance >= 0, "tolerance must be at least 0, got ", tolerance);
  const Tensor shape = empty_on(mass, {mass.size(0), mass.size(1), mass.size(2), 0}, mass.scalar_type());
  const Batch batch = batch_of(shape, targets, logit_lengths, target_lengths, 1, 0);
  const int lattices = check_lattices(ll, batch);
  STD_TORCH_CHECK(!known || (known->scalar_type() == ScalarType::Byte && known->is_contiguous() &&
                             known->numel() == batch.nodes() && known->device() == mass.device()),
                  "known must be a contiguous uint8 tensor with an element for each node");
  Tensor nodes = empty_on(mass, {batch.nodes()}, ScalarType::Int);
  Tensor row_of_node = empty_on(mass, {batch.B, batch.max_T, batch.max_U1}, ScalarType::Int);
  if (batch.nodes() == 0) {
    return {nodes, row_of_node, zeros_on(mass, {1}, ScalarType::Int), zeros_on(mass, {batch.B}, ScalarType::Double)};
  }
  Tensor count = empty_on(mass, {1}, ScalarType::Int), dropped = empty_on(mass, {batch.B}, ScalarType::Double);
  dispatch_accumulate(mass.scalar_type(), [&](auto zero) {
    using Acc = decltype(zero);
    Backend::template select<Acc>(
        mass, {batch, const_data<Acc>(mass), Mixture::of(lattices, omega), const_data<double>(ll), tolerance,
               known ? mutable_data<uint8_t>(*known) : nullptr, mutable_data<int32_t>(nodes),
               mutable_data<int32_t>(row_of_node), mutable_data<int32_t>(count), mutable_data<double>(dropped)});
  });
  return {nodes, row_of_node, count, dropped};
}

}  // namespace tdt
