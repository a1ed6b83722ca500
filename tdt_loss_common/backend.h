// What a backend provides: the stages of the loss on plain structs. The ops of torch-ext/*_ops.h check their
// arguments, allocate, and call these; tdt_loss_cpu and tdt_loss_cuda implement them under the same names.
#pragma once

#include <algorithm>
#include <limits>

#include "align.h"
#include "joint.h"
#include "reduction.h"
#include "tensors.h"

namespace tdt {

// What turns logits into token log-probabilities, beside the softmax: the options of eq. 1 and 2.
struct Emission {
  int blank;
  double sigma;
  double delay_penalty;  // eq. 10
};

// Where eq. 1-3 go.
template <typename Acc>
struct NodeRecords {
  Acc* node_lp;  // (B, T, U1, record_size(D))
  Acc* row_max;  // (B, T, U1)
};

// What the forward keeps for the gradient.
template <typename Acc>
struct Saved {
  const Acc* node_lp;        // (B, T, U1, record_size(D))
  const Acc* row_max;        // (B, T, U1); null where no row is transformed
  const double* ll;          // (lattices, B)
  const double* alpha_beta;  // (lattices, 2, B, T, U1)

  TDT_HD const double* alpha(const Batch& batch, int lattice) const { return alpha_beta + 2 * lattice * batch.nodes(); }
  TDT_HD const double* beta(const Batch& batch, int lattice) const {
    return alpha_beta + (2 * lattice + 1) * batch.nodes();
  }
};

// d (what the user differentiates) / d losses_b.
template <typename Acc>
struct Upstream {
  const Acc* grad;     // () or (B,)
  int64_t stride;      // 0 for ()
  const Acc* weights;  // (B,) of the reduction, or null

  TDT_HD Acc at(int b) const { return weights ? grad[b * stride] * weights[b] : grad[b * stride]; }
};

// What the gradient is taken of: which lattices, and how the occupancies of their arcs enter.
template <typename Acc>
struct Shaping {
  int blank;  // the token
  int lattices;
  Arcs arcs[kMaxLattices];
  bool counts[kMaxLattices];      // whether its weight is not 0
  Acc blank_share[kMaxLattices];  // of a blank arc in the sums, eq. 11: the weight of its lattice
  Acc label_share[kMaxLattices];  // of a label arc: that times 1 + fastemit_lambda, eq. 12
  Acc clamp;                      // eq. 13; 0: none

  static Shaping of(int blank, const Arcs& arcs, const Mixture& mixture, double fastemit_lambda, double clamp) {
    Shaping s{blank, mixture.n, {arcs, rnnt_arcs()}, {}, {}, {}, static_cast<Acc>(0)};
    // A clamp too small for Acc must not become none.
    if (clamp > 0) s.clamp = std::max(static_cast<Acc>(clamp), std::numeric_limits<Acc>::denorm_min());
    for (int l = 0; l < mixture.n; ++l) {
      s.counts[l] = mixture.weight[l] != 0.0;
      s.blank_share[l] = static_cast<Acc>(mixture.weight[l]);
      s.label_share[l] = static_cast<Acc>(mixture.weight[l] * (1.0 + fastemit_lambda));
    }
    return s;
  }

  // eq. 13: the bound of every entry once the upstream gradient, `scale`, has multiplied.
  TDT_HD Acc limit(Acc scale) const {
    return clamp > 0 ? clamp * (scale < 0 ? -scale : scale) : static_cast<Acc>(INFINITY);
  }
};

// x within [-limit, limit]; NaN stays.
template <typename Acc>
TDT_HD Acc clamped(Acc x, Acc limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

// G_blank and G_label of a node. Where its sample's logits were NaN, NaN.
template <typename Acc>
struct NodeSums {
  Acc blank, label;
};

// Where the lattice stage writes. Without a gradient, alpha_beta is null and only ll is wanted.
struct LatticeOutput {
  double* ll;          // (lattices, B)
  double* alpha_beta;  // (lattices, 2, B, T, U1): written at valid nodes alone
};

// Of the losses without logits: tile.h and band.h.
template <typename Acc>
struct TileLogProbs;
template <typename S, typename Acc>
struct TileGradient;
template <typename S, typename Acc>
struct Pilots;
template <typename S, typename Acc>
struct BoundColumns;
template <typename Acc>
struct BoundRows;
template <typename Acc>
struct Posterior;
template <typename Acc>
struct Selection;
struct RowTable;

enum class Device { kCpu, kCuda };

// What a stage reads, where it writes, and what it is told, as one value. S: the dtype of logits.
template <typename S>
struct LogProbsTask {
  Batch batch;
  NodeList list;
  LogitRows<S> logits;
  NodeRecords<accumulate_t<S>> out;
  Emission emission;
};

template <typename S>
struct GradientTask {
  Batch batch;
  NodeList list;
  LogitRows<S> logits, grad;  // these may be the same
  Saved<accumulate_t<S>> saved;
  Upstream<accumulate_t<S>> upstream;
  Shaping<accumulate_t<S>> shaping;
};

template <typename Acc>
struct OccupancyTask {
  Batch batch;
  Arcs arcs;
  Saved<Acc> saved;
  Acc *blank, *label;  // (B, T, U1, arcs.n), for RNN-T (B, T, U1)
};

template <typename Acc>
struct NodeOccupancyTask {
  Batch batch;
  Saved<Acc> saved;
  Shaping<Acc> shaping;
  Acc* G;  // (B, T, U1)
};

// `like` names the device, and allocates what a stage needs for itself.
template <Device device>
struct Backend {
  // eq. 1-3 of the listed nodes
  template <typename S>
  static void log_probs(const Tensor& like, const LogProbsTask<S>& task);
  // eq. 4 and 5, of one or two lattices; the first has the given arcs, the second is RNN-T's
  template <typename Acc>
  static void lattice(const Tensor& like, const Batch& batch, const Arcs& arcs, int lattices, const Acc* node_lp,
                      const LatticeOutput& out);
  // eq. 6, 11 and the reduction
  template <typename Acc>
  static void reduce(const Tensor& like, const Reducing& problem, const Reduced<Acc>& out);
  // eq. 7-9 and 11-13 of the listed nodes
  template <typename S>
  static void gradient(const Tensor& like, const GradientTask<S>& task);
  // eq. 7 of every arc
  template <typename Acc>
  static void occupancy(const Tensor& like, const OccupancyTask<Acc>& task);
  // G, the sum of a node's occupancies
  template <typename Acc>
  static void node_occupancy(const Tensor& like, const NodeOccupancyTask<Acc>& task);
  // the best alignment
  template <typename Acc>
  static void align(const Tensor& like, const AlignTask<Acc>& task);
  // the hidden layer of a joint network at the nodes of a tile
  template <typename S>
  static void joint_hidden(const Tensor& like, const Joint<S>& joint, int64_t rows, const int32_t* nodes, S* hidden);
  // and its gradient, added to that of encoder and decoder
  template <typename S>
  static void joint_hidden_backward(const Tensor& like, const Joint<S>& joint,
                                    const HiddenGradient<S, accumulate_t<S>>& gradient);
  // eq. 1-3 of a tile, and eq. 7-9
  template <typename Acc>
  static void tile_log_probs(const Tensor& like, const TileLogProbs<Acc>& task);
  template <typename S>
  static void tile_gradient(const Tensor& like, const TileGradient<S, accumulate_t<S>>& task);
  // The band: what pilots say, the narrowed head, upper bounds of nodes, their posterior probabilities, which are kept
  template <typename S>
  static void pilots(const Tensor& like, const Pilots<S, accumulate_t<S>>& task);
  template <typename S>
  static void bound_columns(const Tensor& like, const BoundColumns<S, accumulate_t<S>>& task);
  template <typename Acc>
  static void bound_rows(const Tensor& like, const BoundRows<Acc>& task);
  template <typename Acc>
  static void posterior(const Tensor& like, const Posterior<Acc>& task);
  template <typename Acc>
  static void select(const Tensor& like, const Selection<Acc>& task);
  // The nodes of the first n rows of a table
  static void list_rows(const Tensor& like, const RowTable& table, int64_t n, int32_t* nodes);
};

using Cpu = Backend<Device::kCpu>;
using Cuda = Backend<Device::kCuda>;

}  // namespace tdt
