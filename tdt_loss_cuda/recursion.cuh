// One lane's part of the lattice: eq. 4 forward and eq. 5 backward for one column u, frame after frame
// (equations.h).
//
// Short durations live in registers, one slot per duration value: pending arrivals forward, past betas backward. All
// other arcs ("far": longer ones, and further columns of a duration that occurs more than once) read what was
// stored in global memory. Both recursions use the weights of the node that they visit and no other's.
//
// Where a node does not exist (a frame outside the sample, a column beyond U) all its weights are 0, and so is what it
// passes on: the march needs no branches.
#pragma once

#include "launch.cuh"

namespace tdt::cuda {

enum Direction { kBackward = 0, kForward = 1 };

// The arcs that a recursion keeps in registers: blanks of 1 to kBlanks frames, labels of 0 to kLabels. kChunk: steps
// between barriers (strip.cuh). Two stages of 8 would not fit the shared memory of every GPU with the long ring.
struct ShortRing {
  static constexpr int kBlanks = 4, kLabels = 4, kChunk = 8;
  static constexpr bool kFar = false, kRnnt = false;
};
struct LongRing {
  static constexpr int kBlanks = 8, kLabels = 8, kChunk = 4;
  static constexpr bool kFar = true, kRnnt = false;
};
// In the same launch as a TDT lattice, with its chunk, or alone.
template <int chunk>
struct RnntRing {
  static constexpr int kBlanks = 1, kLabels = 0, kChunk = chunk;
  static constexpr bool kFar = false, kRnnt = true;
};

template <typename Acc>
struct LatticeParams {
  Batch batch;
  Arcs arcs;  // of the first lattice
  int n_far;
  int far[kMaxDurations];             // indices i of the far arcs
  int column[LongRing::kLabels + 1];  // duration d of the ring -> its index i, or -1
  const Acc* node_lp;
  double* ll;          // (lattices, B)
  double* alpha_beta;  // (lattices, 2, B, T, U1), or null
  int strips, lattices, directions;
  int* ticket;       // null with one strip
  int* progress;     // frames handed on, (strips, lattices, directions, B)
  Scaled* handover;  // (strips, lattices, directions, B, max_T)

  __device__ double* stored(int lattice, Direction direction) const {
    return alpha_beta + (2 * lattice + (direction == kForward ? 0 : 1)) * batch.nodes();
  }
};

// One column of one sample.
template <typename Acc>
struct Column {
  const LatticeParams<Acc>& p;
  Extent extent;
  int b, u;

  __device__ bool has(int t) const { return u >= 0 && u <= extent.U && t >= 0 && t < extent.T; }
  __device__ const Acc* record(int t) const { return p.node_lp + p.batch.node(b, t, u) * record_size(p.batch.D); }
  __device__ Column left() const { return {p, extent, b, u - 1}; }
};

// The weights of the ring's arcs out of one node: blank[d - 1] and label[d] for duration d.
template <class Ring>
struct ArcWeights {
  Scaled blank[Ring::kBlanks], label[Ring::kLabels + 1];
};

// A stored alpha or beta as a number again.
__device__ __forceinline__ Scaled from_log(double x) {
  if (!(x >= kMinNodeExp * kLn2)) return {x != x ? x : 0.0, kZeroExp};
  const double whole = rint(x * kLog2e);
  return {exp2(fma(x, kLog2e, -whole)), static_cast<int>(whole)};
}

// eq. 4. Slot k of `own_`: what blanks have pushed to frame t + k of this column; of `next_`: labels, to the next
// column.
template <typename Acc, class Ring>
class Forward {
 public:
  __device__ __forceinline__ explicit Forward(const Column<Acc>& column) : column_(column) {
#pragma unroll
    for (int d = 0; d < kBlanks; ++d) own_[d] = scaled_zero();
#pragma unroll
    for (int d = 0; d <= kLabels; ++d) next_[d] = scaled_zero();
    if (column.u == 0) own_[0] = scaled_one();  // alpha(0, 0)
  }

  // Visits node (t, u) and returns its alpha. `in`: labels that arrive from column u - 1; `out`: those that leave for
  // column u + 1 and arrive at frame t.
  __device__ __forceinline__ Scaled visit(int t, Scaled in, const ArcWeights<Ring>& w, Scaled* out) {
    Scaled alpha = own_[0] + in;
    if constexpr (Ring::kFar) {
      for (int k = 0; k < column_.p.n_far; ++k) alpha = alpha + far(t, column_.p.far[k]);
    }
    alpha = normalized(alpha);
    *out = alpha * w.label[0];
    if constexpr (kLabels > 0) *out = next_[0] + *out;
#pragma unroll
    for (int d = 1; d < kBlanks; ++d) own_[d - 1] = own_[d] + alpha * w.blank[d - 1];
#pragma unroll
    for (int d = 1; d < kLabels; ++d) next_[d - 1] = next_[d] + alpha * w.label[d];
    own_[kBlanks - 1] = alpha * w.blank[kBlanks - 1];
    if constexpr (kLabels > 0) next_[kLabels - 1] = alpha * w.label[kLabels];
    return alpha;
  }

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels;

  // Arcs of duration i into (t, u), from the alpha stored d_i frames ago.
  __device__ __forceinline__ Scaled far(int t, int i) const {
    const int d = column_.p.arcs.d[i];
    if (!column_.has(t) || d > t) return scaled_zero();
    Scaled sum = scaled_zero();
    if (d > 0) sum = sum + from(column_, t - d, i, kBlankLp);
    if (column_.u > 0) sum = sum + from(column_.left(), t - d, i, kLabelLp);
    return sum;
  }
  __device__ __forceinline__ static Scaled from(const Column<Acc>& source, int t, int i, RecordField token) {
    const Acc* record = source.record(t);
    const double alpha = __ldcg(source.p.stored(0, kForward) + source.p.batch.node(source.b, t, source.u));
    return from_log(alpha) * (scaled_exp(record[token]) * scaled_exp(record[kDurLp + i]));
  }

  const Column<Acc>& column_;
  Scaled own_[kBlanks], next_[kLabels + 1];
};

// eq. 5. Slot d of `own_`: beta(t + d, u); of `next_`: beta(t + d, u + 1). Slots 0 are not used: beta(t, u) is being
// made, beta(t, u + 1) just comes in.
template <typename Acc, class Ring>
class Backward {
 public:
  __device__ __forceinline__ explicit Backward(const Column<Acc>& column) : column_(column) {
#pragma unroll
    for (int d = 0; d <= kBlanks; ++d) own_[d] = scaled_zero();
#pragma unroll
    for (int d = 0; d <= kLabels; ++d) next_[d] = scaled_zero();
    if (column.u == column.extent.U) own_[1] = scaled_one();  // the exit: frame T of column U, for blanks alone
  }

  // Visits node (t, u) and returns its beta, which is also what column u - 1 needs. `in`: beta(t, u + 1).
  __device__ __forceinline__ Scaled visit(int t, Scaled in, const ArcWeights<Ring>& w, Scaled* out) {
    // Terms whose weight is 0 stay in the sum: 0 * NaN carries a NaN of any node on to (0, 0). The terms that the last
    // step made are added last: the rest does not wait for them.
    Scaled beta = sum_of({w.blank[0] * own_[1], w.label[0] * in});
    if constexpr (kRest > 0) {
      Scaled rest[kRest];
#pragma unroll
      for (int d = 2; d <= kBlanks; ++d) rest[d - 2] = w.blank[d - 1] * own_[d];
#pragma unroll
      for (int d = 1; d <= kLabels; ++d) rest[kBlanks - 2 + d] = w.label[d] * next_[d];
      beta = sum_of({sum_of(rest), w.blank[0] * own_[1], w.label[0] * in});
    }
    if constexpr (Ring::kFar) {
      for (int k = 0; k < column_.p.n_far; ++k) beta = beta + far(t, column_.p.far[k]);
    }
    beta = normalized(beta);
#pragma unroll
    for (int d = kBlanks; d > 1; --d) own_[d] = own_[d - 1];
    own_[1] = beta;
#pragma unroll
    for (int d = kLabels; d > 1; --d) next_[d] = next_[d - 1];
    if constexpr (kLabels > 0) next_[1] = in;
    *out = beta;
    return beta;
  }

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels;
  static constexpr int kRest = kBlanks - 1 + kLabels;  // arcs other than the blank of one frame and the label of none

  // Arcs of duration i out of (t, u), to the beta stored d_i frames ago or to the exit.
  __device__ __forceinline__ Scaled far(int t, int i) const {
    const auto& [p, extent, b, u] = column_;
    const int d = p.arcs.d[i], left = extent.T - t;
    if (!column_.has(t)) return scaled_zero();
    const Acc* record = column_.record(t);
    const Scaled blank = scaled_exp(record[kBlankLp]), label = scaled_exp(record[kLabelLp]);
    const double* stored = p.stored(0, kBackward);
    Scaled onward = scaled_zero();
    if (d > 0 && d < left) onward = blank * from_log(__ldcg(stored + p.batch.node(b, t + d, u)));
    if (d > 0 && d == left && u == extent.U) onward = blank;
    if (u < extent.U && d < left) {
      onward = onward + label * from_log(__ldcg(stored + p.batch.node(b, t + d, u + 1)));
    }
    return scaled_exp(record[kDurLp + i]) * onward;
  }

  const Column<Acc>& column_;
  Scaled own_[kBlanks + 1], next_[kLabels + 1];
};

}  // namespace tdt::cuda
