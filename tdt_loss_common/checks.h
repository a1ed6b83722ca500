// Argument checks of the ops, and with them the way from their arguments to the plain structs of problem.h.
//
// The Python API has raised ValueError or TypeError long before; these checks keep a direct call of an op from reading
// out of bounds. Values on a device are never read here.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "problem.h"
#include "tensors.h"

namespace tdt {

using DurationList = std::vector<int64_t>;

// The arcs of these durations; none: RNN-T.
inline Arcs arcs_of(const DurationList& durations) {
  if (durations.empty()) return rnnt_arcs();
  STD_TORCH_CHECK(durations.size() <= kMaxDurations, "durations: at most ", kMaxDurations, " are supported, got ",
                  durations.size());
  Arcs out{static_cast<int>(durations.size()), false, {}};
  for (size_t i = 0; i < durations.size(); ++i) {
    STD_TORCH_CHECK(durations[i] >= 0, "durations must not be negative, got ", durations[i]);
    // A duration beyond every frame never lands, whatever its exact value.
    out.d[i] = static_cast<int>(std::min<int64_t>(durations[i], std::numeric_limits<int>::max() / 2));
  }
  return out;
}

// How many lattices the loss mixes: TDT and RNN-T, or one.
inline int lattices_of(const Arcs& arcs, double omega) {
  STD_TORCH_CHECK(omega >= 0 && omega <= 1, "omega must be in [0, 1], got ", omega);
  return omega > 0 && !arcs.rnnt ? 2 : 1;
}

inline IndexView index_view(const Tensor& t, int64_t dims, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, name, " must be int32 or int64");
  STD_TORCH_CHECK(t.dim() == dims, name, " must have ", dims, " dimension(s), got ", t.dim());
  return {t.const_data_ptr(), type == ScalarType::Long, t.stride(0), dims == 2 ? t.stride(1) : 0};
}

// The batch of logits (B, T, U1, ...) with `V` tokens and `D` durations.
inline Batch batch_of(const Tensor& logits, const Tensor& targets, const Tensor& logit_lengths,
                      const Tensor& target_lengths, int64_t V, int64_t D) {
  STD_TORCH_CHECK(logits.dim() == 4, "logits must have 4 dimensions (B, T, U+1, V), got ", logits.dim());
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  STD_TORCH_CHECK(logits.size(0) <= kMax && logits.size(0) * logits.size(1) * logits.size(2) <= kMax,
                  "more than 2^31 - 1 samples or nodes");
  STD_TORCH_CHECK(D >= 0 && D <= kMaxDurations, "durations: from 0 to ", kMaxDurations, " are supported, got ", D);
  STD_TORCH_CHECK(V <= kMostColumns - D, "at most ", kMostColumns, " tokens and durations are supported, got ", V + D);
  const int64_t B = logits.size(0);
  STD_TORCH_CHECK(targets.dim() == 2 && logit_lengths.dim() == 1 && target_lengths.dim() == 1,
                  "targets must have 2 dimensions and lengths one, got ", targets.dim(), ", ", logit_lengths.dim(),
                  " and ", target_lengths.dim());
  STD_TORCH_CHECK(targets.size(0) == B && logit_lengths.size(0) == B && target_lengths.size(0) == B,
                  "targets, logit_lengths and target_lengths must have the batch size of the logits, ", B);
  STD_TORCH_CHECK(targets.size(1) + 1 >= logits.size(2), "targets must have a column for each label position");
  for (const Tensor* t : {&targets, &logit_lengths, &target_lengths}) {
    STD_TORCH_CHECK(t->device() == logits.device(), "targets and lengths must be on the device of the logits");
  }
  const Grid grid(B, logits.size(1), logits.size(2));
  return {{},
          grid.B,
          grid.max_T,
          grid.max_U1,
          static_cast<int>(V),
          static_cast<int>(D),
          index_view(targets, 2, "targets"),
          index_view(logit_lengths, 1, "logit_lengths"),
          index_view(target_lengths, 1, "target_lengths"),
          grid.by_max_T,
          grid.by_max_U1};
}

// What sigma and delay_penalty add to an arc and to a path stays inside what the lattice can represent, -2.9e6 and
// -1.86e8 nats (kMinLogWeight and kMinNodeExp of scaled.h), with 1e5 and 6e6 left for the logits. A path has at most
// T + U arcs, U of them labels, and the penalty of a label is at most delay_penalty * (T - 1) / 2. torch-ext/tdt_loss
// has the same rule in checks.py.
constexpr double kMostPenaltyOfArc = 2.8e6, kMostPenaltyOfPath = 1.8e8;

inline void check_penalties(const Batch& batch, double sigma, double delay_penalty) {
  const double U = batch.max_U1 - 1, of_label = std::abs(delay_penalty) * 0.5 * std::max(batch.max_T - 1, 0);
  const double of_path = std::abs(sigma) * (batch.max_T + U) + of_label * U;
  STD_TORCH_CHECK(std::abs(sigma) + of_label <= kMostPenaltyOfArc && of_path <= kMostPenaltyOfPath,
                  "sigma and delay_penalty are too large for ", batch.max_T, " frames and ", batch.max_U1 - 1,
                  " labels, got ", sigma, " and ", delay_penalty);
}

// Tokens of a logits tensor: all columns, or for joint logits all but the last D.
inline int64_t vocab_of(const Tensor& logits, const OptionalTensor& duration_logits, int64_t D) {
  STD_TORCH_CHECK(logits.dim() == 4, "logits must have 4 dimensions (B, T, U+1, V), got ", logits.dim());
  const int64_t V = logits.size(3) - (duration_logits.has_value() ? 0 : D);
  STD_TORCH_CHECK(V > 0, "logits have ", logits.size(3), " columns: no token is left beside ", D, " durations");
  return V;
}

inline void check_blank(int64_t blank, int64_t V) {
  STD_TORCH_CHECK(blank >= 0 && blank < V, "blank must be in [0, ", V, "), got ", blank);
}

inline void check_logits(const Tensor& logits, const OptionalTensor& duration_logits, int64_t D, int64_t V,
                         int64_t blank) {
  STD_TORCH_CHECK(logits.stride(3) == 1 || logits.size(3) == 1, "logits must be contiguous in their last dimension");
  check_blank(blank, V);
  if (!duration_logits) return;
  const Tensor& z = *duration_logits;
  STD_TORCH_CHECK(z.dim() == 4 && z.size(0) == logits.size(0) && z.size(1) == logits.size(1) &&
                      z.size(2) == logits.size(2) && z.size(3) == D,
                  "duration_logits must have the shape of the logits with ", D, " columns");
  STD_TORCH_CHECK(z.scalar_type() == logits.scalar_type() && z.device() == logits.device(),
                  "duration_logits must have the dtype and device of the logits");
  STD_TORCH_CHECK(z.stride(3) == 1 || D == 1, "duration_logits must be contiguous in their last dimension");
}

inline void check_node_lp(const Tensor& node_lp, int64_t D) {
  const int columns = record_size(static_cast<int>(D));
  STD_TORCH_CHECK(node_lp.is_contiguous() && node_lp.size(3) == columns, "node_lp must be contiguous with ", columns,
                  " columns for ", D, " durations, got ", node_lp.size(3));
}

inline void check_row_max(const Tensor& row_max, const Tensor& node_lp) {
  STD_TORCH_CHECK(row_max.scalar_type() == node_lp.scalar_type() && row_max.is_contiguous() &&
                      row_max.numel() == node_lp.size(0) * node_lp.size(1) * node_lp.size(2) &&
                      row_max.device() == node_lp.device(),
                  "row_max does not belong to these logits");
}

// What the forward saved, against the batch it was saved for. `type`: of the log-probabilities.
inline void check_saved(const Batch& batch, int lattices, ScalarType type, const Tensor& node_lp, const Tensor& ll,
                        const Tensor& alpha_beta) {
  STD_TORCH_CHECK(node_lp.scalar_type() == type && node_lp.numel() == batch.nodes() * record_size(batch.D) &&
                      node_lp.is_contiguous(),
                  "node_lp does not belong to these logits");
  STD_TORCH_CHECK(ll.scalar_type() == ScalarType::Double && ll.numel() == static_cast<int64_t>(lattices) * batch.B &&
                      ll.is_contiguous(),
                  "ll does not belong to these logits");
  STD_TORCH_CHECK(alpha_beta.scalar_type() == ScalarType::Double &&
                      alpha_beta.numel() == 2 * lattices * batch.nodes() && alpha_beta.is_contiguous(),
                  "alpha_beta does not belong to these logits; was the forward run with need_grad?");
  for (const Tensor* t : {&ll, &alpha_beta}) {
    STD_TORCH_CHECK(t->device() == node_lp.device(), "all tensors must be on the device of the logits");
  }
}

inline void check_upstream(const Tensor& grad_loss, const Tensor& weights, const Tensor& node_lp, int64_t B) {
  const bool one_each = grad_loss.dim() == 1 && grad_loss.size(0) == B;
  STD_TORCH_CHECK(grad_loss.scalar_type() == node_lp.scalar_type() && (grad_loss.dim() == 0 || one_each),
                  "grad_loss must be one number or ", B, ", of the dtype of the losses");
  STD_TORCH_CHECK(weights.scalar_type() == node_lp.scalar_type() && weights.dim() == 1 && weights.is_contiguous() &&
                      (weights.size(0) == B || weights.size(0) == 0),
                  "weights must be ", B, " contiguous numbers of the dtype of the losses, or none");
  STD_TORCH_CHECK(grad_loss.device() == node_lp.device() && weights.device() == node_lp.device(),
                  "all tensors must be on the device of the logits");
}

// Node indices that lie on the host; on a GPU the kernels bring each into the tensors.
inline void check_nodes(const Tensor& nodes, int64_t count) {
  if (nodes.device().type() != torch::headeronly::DeviceType::CPU) return;
  const auto* const data = static_cast<const int32_t*>(nodes.const_data_ptr());
  for (int64_t row = 0; row < nodes.size(0); ++row) {
    STD_TORCH_CHECK(data[row] >= 0 && data[row] < count, "nodes must be in [0, ", count, "), got ", data[row]);
  }
}

// A tile: rows of logits, tokens then durations, and the node index of each.
inline NodeList check_tile(const Tensor& tile, const Tensor& nodes, const Tensor& node_lp, int64_t columns) {
  STD_TORCH_CHECK(tile.dim() == 2 && tile.size(1) >= columns && (tile.stride(1) == 1 || tile.size(1) == 1),
                  "tile must be a matrix of at least ", columns, " columns, contiguous in its rows");
  STD_TORCH_CHECK(accumulate_type(tile.scalar_type()) == node_lp.scalar_type() && tile.device() == node_lp.device(),
                  "tile must be on the device of node_lp and of a dtype that belongs to it");
  STD_TORCH_CHECK(nodes.dim() == 1 && nodes.size(0) == tile.size(0) && nodes.scalar_type() == ScalarType::Int &&
                      nodes.is_contiguous() && nodes.device() == tile.device(),
                  "nodes must be a contiguous int32 vector with an index for each row of the tile");
  check_nodes(nodes, node_lp.size(0) * node_lp.size(1) * node_lp.size(2));
  return {tile.size(0), static_cast<const int32_t*>(nodes.const_data_ptr())};
}

}  // namespace tdt
