// The problem as kernels see it: plain structs, passed by value to the CPU loops and to the CUDA kernels alike.
//
// Names of sizes: B samples; max_T frames and max_U1 = max(U) + 1 label positions of the tensors; T and U of one
// sample.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "scaled.h"

namespace tdt {

constexpr int kMaxDurations = 64;
// The most columns that a row of logits may have: a loop over a row adds less than 2^16 to its index, which then still
// fits an int.
constexpr int kMostColumns = std::numeric_limits<int>::max() - (1 << 16);

// What leaves a node by one pair of arcs. Both land where their frame t + d_i is inside the sample. A blank from the
// last label position may also take the exit, where t + d_i = T.
struct Departures {
  bool lands, blank, label;
};

// The arcs that may leave a node: for each i a blank and a label arc of d_i frames. TDT has one such pair for each of
// its durations; RNN-T a blank of one frame and a label of none, without duration log-probabilities. By value: no
// device memory, so that a call can be captured in a CUDA graph.
struct Arcs {
  int n;
  bool rnnt;
  int d[kMaxDurations];

  TDT_HD bool has_blank(int i) const { return d[i] > 0; }
  TDT_HD bool has_label(int i) const { return !rnnt || d[i] == 0; }
  // frames_left: T - t; labels_left: U - u
  TDT_HD Departures departures(int i, int frames_left, int labels_left) const {
    const bool lands = d[i] < frames_left, emits = labels_left > 0, exits = d[i] == frames_left && !emits;
    return {lands, has_blank(i) && (lands || exits), has_label(i) && emits && lands};
  }
  // eq. 3 of arc pair i, from a node's record
  template <typename Acc>
  TDT_HD Acc dur_lp(const Acc* record, int i) const;
};

inline Arcs rnnt_arcs() { return {2, true, {1, 0}}; }

// The lattices over one set of log-probabilities whose losses are added with weights: one of weight 1, or the two of
// eq. 11 where 0 < omega. A lattice of weight 0 does not count.
constexpr int kMaxLattices = 2;

struct Mixture {
  int n;
  double weight[kMaxLattices];

  TDT_HD static Mixture of(int lattices, double omega) {
    return lattices == 1 ? Mixture{1, {1.0, 0.0}} : Mixture{2, {1.0 - omega, omega}};
  }
};

// A vector or matrix of int32 or int64, of any strides, read as int64 so that no value is cut before it is checked.
struct IndexView {
  const void* data;
  bool wide;
  int64_t row_stride, stride;

  TDT_HD int64_t at(uint32_t row, uint32_t i = 0) const {
    const int64_t offset = row * row_stride + i * stride;
    return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

// n / divisor for 0 <= n < 2^31 by a multiplication, which is what locates a row: with q = ceil(log2 divisor) and
// factor = floor(2^32 (2^q - divisor) / divisor) + 1, n / divisor = (n factor / 2^32 + n) / 2^q.
struct Divider {
  uint32_t divisor, factor, shift;

  static Divider of(int divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(divisor)) ++shift;
    const uint64_t factor = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
    return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(factor), shift};
  }

  TDT_HD uint32_t quotient(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * factor) >> 32);
    return (high + n) >> shift;
  }
};

struct Node {
  int b, t, u;
};

struct Extent {
  int T, U;
  bool ok;  // lengths inside the tensor; otherwise T = U = 0 and no node is valid

  TDT_HD bool has(int t, int u) const { return ok && t < T && u <= U; }
  TDT_HD uint32_t nodes() const { return ok ? static_cast<uint32_t>(T) * (U + 1) : 0; }
};

// How the nodes of the tensors, padding among them, are counted: (b * max_T + t) * max_U1 + u. `Sizes` has B, max_T,
// max_U1 and the dividers by the last two. This base has no members of its own: where the sizes stand among the
// parameters of a kernel decides how they are loaded, and the kernels are tuned with the order that Batch has.
template <class Sizes>
struct NodeIndexing {
  TDT_HD int64_t nodes() const { return static_cast<int64_t>(its().B) * its().max_T * its().max_U1; }
  // A node index back to (b, t, u); there are fewer than 2^31 nodes.
  TDT_HD Node node_at(int64_t node) const {
    const uint32_t frame = its().by_max_U1.quotient(static_cast<uint32_t>(node)), b = its().by_max_T.quotient(frame);
    return {static_cast<int>(b), static_cast<int>(frame - b * its().max_T),
            static_cast<int>(node - static_cast<int64_t>(frame) * its().max_U1)};
  }
  // A node index from a list that nobody has checked, brought into the tensors.
  TDT_HD int64_t bounded(int32_t node) const {
    const uint32_t last = static_cast<uint32_t>(its().B) * its().max_T * its().max_U1 - 1;
    const uint32_t given = static_cast<uint32_t>(node);
    return given < last ? given : last;
  }
  TDT_HD int64_t node(int b, int t, int u) const {
    return static_cast<int>((static_cast<uint32_t>(b) * its().max_T + t) * its().max_U1 + u);
  }

 private:
  TDT_HD const Sizes& its() const { return static_cast<const Sizes&>(*this); }
};

// The nodes alone, for what needs neither labels nor lengths.
struct Grid : NodeIndexing<Grid> {
  int B, max_T, max_U1;
  Divider by_max_T, by_max_U1;

  Grid(int64_t B, int64_t max_T, int64_t max_U1)
      : B(static_cast<int>(B)),
        max_T(static_cast<int>(max_T)),
        max_U1(static_cast<int>(max_U1)),
        by_max_T(Divider::of(std::max(1, this->max_T))),
        by_max_U1(Divider::of(std::max(1, this->max_U1))) {}
};

struct Batch : NodeIndexing<Batch> {
  int B, max_T, max_U1, V, D;
  IndexView targets;         // (B, >= max_U1 - 1)
  IndexView logit_lengths;   // (B,)
  IndexView target_lengths;  // (B,)
  Divider by_max_T, by_max_U1;

  TDT_HD Extent extent(int b) const {
    const int64_t T = logit_lengths.at(b), U = target_lengths.at(b);
    if (T < 0 || T > max_T || U < 0 || U >= max_U1) return {0, 0, false};
    return {static_cast<int>(T), static_cast<int>(U), true};
  }

  // y_{u+1} of eq. 2, or -1 where it is not a token.
  TDT_HD int label(int b, int u) const {
    const int64_t y = targets.at(b, u);
    return y >= 0 && y < V ? static_cast<int>(y) : -1;
  }

  // Whether the lengths are inside the tensors and every label is a token. On the GPU the threads of a block share the
  // labels instead.
  bool well_formed(int b) const {
    const Extent e = extent(b);
    for (int u = 0; u < e.U; ++u) {
      if (label(b, u) < 0) return false;
    }
    return e.ok;
  }
};

// The nodes whose rows are processed: all of the batch in their order, or those of a tile, a list.
struct NodeList {
  int64_t n;
  const int32_t* nodes;  // (n,), or null for all

  TDT_HD int64_t at(const Batch& batch, int64_t row) const { return nodes ? batch.bounded(nodes[row]) : row; }
};

// The rows of a (B, T, U1, n) tensor, or of a tile (rows, n), whose last dimension is contiguous. Strides in elements:
// of a tile all but the first are 0, of a tensor the first.
template <typename S>
struct Rows {
  S* data;
  int64_t stride_row, stride_b, stride_t, stride_u;

  // Unsigned, as no index is negative: a product of 64 bits then takes fewer registers.
  TDT_HD S* row(uint32_t row, const Node& at) const {
    return data + row * stride_row + uint32_t(at.b) * stride_b + uint32_t(at.t) * stride_t + uint32_t(at.u) * stride_u;
  }
  // Whether the rows of a tensor lie one behind the other, each n elements after the last.
  bool are_packed(const Batch& batch, int64_t n) const {
    return stride_u == n && stride_t == n * batch.max_U1 && stride_b == stride_t * batch.max_T;
  }
};

// Where the columns of durations lie: behind the tokens of the same row, or in rows of their own.
enum class Layout { kJoint, kApart };

template <typename S>
struct LogitRows {
  Rows<S> tokens, durations;
  Layout layout;
};

// One record per node: the sum of exp(x - max(x)) over its row of token logits, eq. 1, eq. 2, then eq. 3 for each
// duration. Padded so that a record is a multiple of 16 bytes; for five durations in float32 it is one 32-byte sector,
// which a lattice thread and a gradient row each read whole.
//
// With max(x), which is kept apart, softmax(x)_v = exp(x_v - max) / sum. lse(x) = max + log(sum) as one number would
// round log(sum) to the magnitude of the logits. A second number in the record would take it beyond its sector.
enum RecordField { kRowSum = 0, kBlankLp = 1, kLabelLp = 2, kDurLp = 3 };

TDT_HD int record_size(int D) { return (kDurLp + D + 3) / 4 * 4; }

template <typename Acc>
TDT_HD Acc Arcs::dur_lp(const Acc* record, int i) const {
  return rnnt ? Acc(0) : record[kDurLp + i];
}

// What ll (B,) holds beside log-likelihoods: a malformed sample (a length outside the tensor, a label outside [0, V))
// has loss NaN and gradient 0. -inf says that there is no alignment (loss +inf, gradient 0), NaN that a logit was NaN
// or +inf.
constexpr double kMalformed = INFINITY;

}  // namespace tdt
