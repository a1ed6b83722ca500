// One lane's part of the lattice: eq. 4 forward and eq. 5 backward for one column u, frame after frame
// (equations.h).
//
// Short durations live in registers, one slot per duration value: pending arrivals forward, past betas backward. All
// other arcs ("far": longer ones, and further columns of a duration that occurs more than once) read what was
// stored in global memory. Both recursions use the weights of the node that they visit and no other's.
//
// Each recursion is written for two kinds of numbers. With Scaled it is exact whatever the values. With plain doubles,
// all of a lane's in units of one power of two, a step is a shuffle and a few fused multiply-adds; strip.cuh says when
// that is as exact.
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

// What a strip hands on for one frame, written and read as one access of 16 bytes: `frame` + 1 says that it is there.
struct alignas(16) Handover {
  double m;
  int e, frame_plus_1;
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
  bool whole_records;  // a record may be read as vectors of 16 bytes, and holds duration d, if any, in column d
  int* ticket;         // null with one strip
  int* ended;          // whether a strip hands on no more, (strips, lattices, directions, B)
  Handover* handover;  // (strips, lattices, directions, B, max_T)

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

// The weights of the ring's arcs out of one node.
template <typename Number, class Ring>
struct ArcWeights {
  static constexpr int kSize = Ring::kBlanks + Ring::kLabels + 1;
  Number at[kSize];

  __device__ __forceinline__ Number& blank(int d) { return at[d - 1]; }  // of duration d
  __device__ __forceinline__ Number& label(int d) { return at[Ring::kBlanks + d]; }
  __device__ __forceinline__ const Number& blank(int d) const { return at[d - 1]; }
  __device__ __forceinline__ const Number& label(int d) const { return at[Ring::kBlanks + d]; }
};

// What a column carries from step to step. Forward: own(k), what blanks have pushed to frame t + k of this column;
// next(k), what labels have, to the next column; out, the labels that leave for column u + 1 and arrive at frame t.
// Backward: own(k), beta(t + 1 + k, u); next(k), beta(t + 1 + k, u + 1); out, beta(t, u), which column u - 1 needs.
template <typename Number, class Ring>
struct State {
  static constexpr int kSize = Ring::kBlanks + Ring::kLabels + 1;
  Number at[kSize];

  __device__ __forceinline__ Number& own(int k) { return at[k]; }
  __device__ __forceinline__ Number& next(int k) { return at[Ring::kBlanks + k]; }
  __device__ __forceinline__ Number& out() { return at[kSize - 1]; }
};

// A stored alpha or beta as a number again.
__device__ __forceinline__ Scaled from_log(double x) {
  if (!(x >= kMinNodeExp * kLn2)) return {x != x ? x : 0.0, kZeroExp};
  const double whole = rint(x * kLog2e);
  return {exp2(fma(x, kLog2e, -whole)), static_cast<int>(whole)};
}

// eq. 4.
template <typename Acc, class Ring>
class Forward {
 public:
  // Visits node (t, u) and returns its alpha. `in`: labels that arrive from column u - 1.
  __device__ __forceinline__ static Scaled visit(const Column<Acc>& column, int t, State<Scaled, Ring>& x, Scaled in,
                                                 const ArcWeights<Scaled, Ring>& w) {
    Scaled alpha = x.own(0) + in;
    if constexpr (Ring::kFar) {
      for (int k = 0; k < column.p.n_far; ++k) alpha = alpha + far(column, t, column.p.far[k]);
    }
    alpha = normalized(alpha);
    x.out() = alpha * w.label(0);
    if constexpr (kLabels > 0) x.out() = x.next(0) + x.out();
#pragma unroll
    for (int d = 1; d < kBlanks; ++d) x.own(d - 1) = x.own(d) + alpha * w.blank(d);
#pragma unroll
    for (int d = 1; d < kLabels; ++d) x.next(d - 1) = x.next(d) + alpha * w.label(d);
    x.own(kBlanks - 1) = alpha * w.blank(kBlanks);
    if constexpr (kLabels > 0) x.next(kLabels - 1) = alpha * w.label(kLabels);
    return alpha;
  }

  // The same in plain numbers; what arrives is left * scale, and for the strip's first column `entering`. Everything
  // that `left` does not decide is made beside the shuffle that brings it.
  __device__ __forceinline__ static double visit(State<double, Ring>& x, double left, double scale, double entering,
                                                 const ArcWeights<double, Ring>& w) {
    const double known = x.own(0) + entering, alpha = fma(left, scale, known);
    x.out() = fma(left, scale * w.label(0), kLabels > 0 ? fma(known, w.label(0), x.next(0)) : known * w.label(0));
#pragma unroll
    for (int d = 1; d < kBlanks; ++d) x.own(d - 1) = fma(alpha, w.blank(d), x.own(d));
#pragma unroll
    for (int d = 1; d < kLabels; ++d) x.next(d - 1) = fma(alpha, w.label(d), x.next(d));
    x.own(kBlanks - 1) = alpha * w.blank(kBlanks);
    if constexpr (kLabels > 0) x.next(kLabels - 1) = alpha * w.label(kLabels);
    return alpha;
  }

  __device__ __forceinline__ static bool starts(const Column<Acc>& column) { return column.u == 0; }  // alpha(0, 0) = 1

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels;

  // Arcs of duration i into (t, u), from the alpha stored d_i frames ago.
  __device__ __forceinline__ static Scaled far(const Column<Acc>& column, int t, int i) {
    const int d = column.p.arcs.d[i];
    if (!column.has(t) || d > t) return scaled_zero();
    Scaled sum = scaled_zero();
    if (d > 0) sum = sum + from(column, t - d, i, kBlankLp);
    if (column.u > 0) sum = sum + from(column.left(), t - d, i, kLabelLp);
    return sum;
  }
  __device__ __forceinline__ static Scaled from(const Column<Acc>& source, int t, int i, RecordField token) {
    const Acc* record = source.record(t);
    const double alpha = __ldcg(source.p.stored(0, kForward) + source.p.batch.node(source.b, t, source.u));
    return from_log(alpha) * (scaled_exp(record[token]) * scaled_exp(record[kDurLp + i]));
  }
};

// eq. 5.
template <typename Acc, class Ring>
class Backward {
 public:
  // Visits node (t, u) and returns its beta. `in`: beta(t, u + 1).
  __device__ __forceinline__ static Scaled visit(const Column<Acc>& column, int t, State<Scaled, Ring>& x, Scaled in,
                                                 const ArcWeights<Scaled, Ring>& w) {
    // Terms whose weight is 0 stay in the sum: 0 * NaN carries a NaN of any node on to (0, 0). The terms that the last
    // step made are added last: the rest does not wait for them.
    Scaled beta = sum_of({w.blank(1) * x.own(0), w.label(0) * in});
    if constexpr (kRest > 0) {
      Scaled rest[kRest];
#pragma unroll
      for (int d = 2; d <= kBlanks; ++d) rest[d - 2] = w.blank(d) * x.own(d - 1);
#pragma unroll
      for (int d = 1; d <= kLabels; ++d) rest[kBlanks - 2 + d] = w.label(d) * x.next(d - 1);
      beta = sum_of({sum_of(rest), w.blank(1) * x.own(0), w.label(0) * in});
    }
    if constexpr (Ring::kFar) {
      for (int k = 0; k < column.p.n_far; ++k) beta = beta + far(column, t, column.p.far[k]);
    }
    beta = normalized(beta);
    shift(x, beta, in);
    return beta;
  }

  // The same in plain numbers; beta(t, u + 1) is left * scale, and for the strip's first column `entering`.
  __device__ __forceinline__ static double visit(State<double, Ring>& x, double left, double scale, double entering,
                                                 const ArcWeights<double, Ring>& w) {
    double part[2] = {w.label(0) * entering, 0.0};  // two chains of additions, one of them with what comes last
#pragma unroll
    for (int d = 1; d <= kLabels; ++d) part[d % 2] = fma(w.label(d), x.next(d - 1), part[d % 2]);
#pragma unroll
    for (int d = 2; d <= kBlanks; ++d) part[d % 2] = fma(w.blank(d), x.own(d - 1), part[d % 2]);
    const double rest = kRest > 0 ? part[0] + part[1] : part[0];
    const double beta = fma(left, scale * w.label(0), fma(w.blank(1), x.own(0), rest));
    shift(x, beta, fma(left, scale, entering));
    return beta;
  }

  // The exit: frame T of column U, for blanks alone.
  __device__ __forceinline__ static bool starts(const Column<Acc>& column) { return column.u == column.extent.U; }

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels;
  static constexpr int kRest = kBlanks - 1 + kLabels;  // arcs other than the blank of one frame and the label of none

  template <typename Number>
  __device__ __forceinline__ static void shift(State<Number, Ring>& x, Number beta, Number in) {
#pragma unroll
    for (int k = kBlanks - 1; k > 0; --k) x.own(k) = x.own(k - 1);
    x.own(0) = beta;
#pragma unroll
    for (int k = kLabels - 1; k > 0; --k) x.next(k) = x.next(k - 1);
    if constexpr (kLabels > 0) x.next(0) = in;
    x.out() = beta;
  }

  // Arcs of duration i out of (t, u), to the beta stored d_i frames ago or to the exit.
  __device__ __forceinline__ static Scaled far(const Column<Acc>& column, int t, int i) {
    const auto& [p, extent, b, u] = column;
    const int d = p.arcs.d[i], left = extent.T - t;
    if (!column.has(t)) return scaled_zero();
    const Acc* record = column.record(t);
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
};

}  // namespace tdt::cuda
