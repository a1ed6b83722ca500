// The first warp of a strip: its march over the frames, chunk by chunk (strip.cuh).
//
// A lane's numbers are plain doubles in units of 2^e, with one e a lane that stays as it is for many chunks. Whether
// that is as good as Scaled is known after a chunk. By induction over its steps: let every alpha (or beta) be 0 or
// within 2^+-kSafe. A weight is 0 or within 2^+-kWeightRange, the units of neighbours differ by 2^kReach at most, so
// what the next step adds up is 0 or a normal number, and a sum is 0 only where all its terms are. So if the values of
// all steps were within bounds nothing was lost, and the chunk errs by 2^-53 a step like the exact one. If not, or if a
// weight, a neighbour or what enters the strip was out of range, the chunk is gone through in Scaled numbers, from what
// was kept of its start. So it is where anything is NaN, which is out of every range.
#pragma once

#include "recursion.cuh"

namespace tdt::cuda {

// What the warps of a block exchange for one chunk; there are two, used in turn. Indexed [..][step of the chunk][lane].
template <class Ring>
struct Stage {
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels, kChunk = Ring::kChunk;
  static constexpr int kWeights = kBlanks + kLabels + 1;  // blank[d - 1], then label[d]
  double2 weight_pairs[kWeights / 2][kChunk][kWarp];  // weights 2 k and 2 k + 1, since accesses of 16 bytes are fewer
  double weight_last[kWeights % 2][kChunk][kWarp];    // and the last of an odd number
  int weight_e[kWeights][kChunk][kWarp];              // written of steps that are not plain
  double value[kChunk][kWarp];                        // alpha or beta: mantissas, or in units of 2^unit
  int value_e[kChunk][kWarp];                         // written of chunks without units
  Scaled edge_in[kChunk];                             // what enters the strip's first column, normalized
  double edge_out[kChunk];                            // what leaves its last one, like the values
  int edge_out_e[kChunk];
  int unit[kWarp];
  bool in_units;       // whether the chunk was gone through in plain numbers
  bool plain[kChunk];  // whether all weights of a step are within range, and plain numbers

  __device__ __forceinline__ void put(const double (&w)[kWeights], int step, int lane) {
#pragma unroll
    for (int k = 0; k < kWeights / 2; ++k) weight_pairs[k][step][lane] = {w[2 * k], w[2 * k + 1]};
    if constexpr (kWeights % 2) weight_last[0][step][lane] = w[kWeights - 1];
  }
  __device__ __forceinline__ void put(const Scaled (&w)[kWeights], int step, int lane) {
    double m[kWeights];
#pragma unroll
    for (int k = 0; k < kWeights; ++k) {
      m[k] = w[k].m;
      weight_e[k][step][lane] = w[k].e;
    }
    put(m, step, lane);
  }
  __device__ __forceinline__ void get(ArcWeights<double, Ring>& w, int step, int lane) const {
#pragma unroll
    for (int k = 0; k < kWeights / 2; ++k) {
      const double2 pair = weight_pairs[k][step][lane];
      w.at[2 * k] = pair.x;
      w.at[2 * k + 1] = pair.y;
    }
    if constexpr (kWeights % 2) w.at[kWeights - 1] = weight_last[0][step][lane];
  }
  __device__ __forceinline__ void get(ArcWeights<Scaled, Ring>& w, int step, int lane) const {
    ArcWeights<double, Ring> m;
    get(m, step, lane);
#pragma unroll
    for (int k = 0; k < kWeights; ++k) {
      w.at[k] = {m.at[k], !plain[step] ? weight_e[k][step][lane] : m.at[k] == 0.0 ? kZeroExp : 0};
    }
  }
  // A node's value and what left the last column, with their exponents.
  __device__ __forceinline__ Scaled value_at(int step, int lane) const {
    return {value[step][lane], in_units ? unit[lane] : value_e[step][lane]};
  }
  __device__ __forceinline__ Scaled edge_at(int step) const {
    return {edge_out[step], in_units ? unit[kWarp - 1] : edge_out_e[step]};
  }
};

// The march's state at the start of a chunk.
template <class Ring>
struct Kept {
  static constexpr int kSize = State<double, Ring>::kSize;
  double m[kSize][kWarp];
  int e[kSize][kWarp];  // of a plain state e[0] alone, for all
};

template <class Ring>
struct Shared {
  Stage<Ring> stages[2];
  Kept<Ring> kept;
  double entering[2][Ring::kChunk];  // what enters in each step of the march's chunk, for the first lane; 0, for others
};

// Natural logarithm of a node's value, as precise as the records it was made of.
__device__ __forceinline__ double node_log(Scaled x, float) {
  return (static_cast<double>(log2f(static_cast<float>(x.m))) + x.e) * kLn2;
}
__device__ __forceinline__ double node_log(Scaled x, double) { return log_of(x); }

__device__ __forceinline__ Scaled shuffle_up(Scaled x) {
  return {__shfl_up_sync(kFullMask, x.m, 1), __shfl_up_sync(kFullMask, x.e, 1)};
}

template <typename Acc, class Ring, Direction direction>
class March {
 public:
  // `stored`: where far arcs read alpha or beta back.
  __device__ March(const Column<Acc>& column, Shared<Ring>& shared, double* stored, int lane)
      : column_(column), kept_(shared.kept), entering_(shared.entering), stored_(stored), lane_(lane) {
    from_left_ = lane == 0 ? 0.0 : 1.0;
    if (lane < kChunk) entering_[1][lane] = 0.0;
    const bool starts = Recursion::starts(column);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      x_.at[k] = k == 0 && starts ? 1.0 : 0.0;
      far_.at[k] = k == 0 && starts ? scaled_one() : scaled_zero();
    }
  }

  // The steps of one chunk; lanes visit frame `t`, then the next ones in their direction.
  __device__ __forceinline__ void chunk(Stage<Ring>& stage, int t) {
    if constexpr (Ring::kFar) {
      march_exactly(stage, t, far_);
    } else {
      const Scaled edge = lane_ < kChunk ? stage.edge_in[lane_] : scaled_zero();  // of step `lane`
      const bool in_range = lane_ >= kChunk || stage.plain[lane_];
      if (!exact_) keep();
      if (__all_sync(kFullMask, !exact_ && !drifted_ && in_range && is_near(edge)) ||
          (find_units(edge) && __all_sync(kFullMask, in_range))) {
        const bool was_exact = exact_;
        exact_ = !march_plainly(stage, edge);
        if (!exact_) return;
        if (!was_exact) spread_exponent();
      } else if (!exact_) {
        spread_exponent();
        exact_ = true;
      }
      State<Scaled, Ring> x;
#pragma unroll
      for (int k = 0; k < kSize; ++k) x.at[k] = {kept_.m[k][lane_], kept_.e[k][lane_]};
      march_exactly(stage, t, x);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        kept_.m[k][lane_] = x.at[k].m;
        kept_.e[k][lane_] = x.at[k].e;
      }
    }
  }

 private:
  using Recursion = std::conditional_t<direction == kForward, Forward<Acc, Ring>, Backward<Acc, Ring>>;
  static constexpr int kChunk = Ring::kChunk, kSize = State<double, Ring>::kSize;
  // Powers of two: values of a plain chunk, neighbouring units and what enters the strip, spread of a lane's state. The
  // largest number of a lane starts at 2^kHead, since values mostly fall; beyond kLow and kHigh the unit is set anew.
  static constexpr int kSafe = 500, kReach = 200, kEdgeReach = 400, kSpread = 600, kHead = 200, kLow = 200, kHigh = 400;
  static_assert(kSafe + kWeightRange + kReach + 10 < 1022);
  static constexpr unsigned high_word_of(int exponent) { return static_cast<unsigned>(1023 + exponent) << 20; }

  __device__ __forceinline__ bool is_near(Scaled edge) const {
    return edge.m == 0.0 || (edge.m < 4.0 && abs(edge.e - e_first_) <= kEdgeReach);
  }

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int k = 0; k < kSize; ++k) kept_.m[k][lane_] = x_.at[k];
    kept_.e[0][lane_] = e_;
  }
  __device__ __forceinline__ void spread_exponent() {
    const int e = kept_.e[0][lane_];
    for (int k = 0; k < kSize; ++k) kept_.e[k][lane_] = kept_.m[k][lane_] == 0.0 ? kZeroExp : e;
  }

  // Units for a lane's numbers and what it needs of its left neighbour; from kept ones after an exact chunk. Whether
  // there are any that hold everything exactly.
  __device__ bool find_units(Scaled edge) {
    bool holds = true;
    if (exact_) {
      e_ = kZeroExp;
      for (int k = 0; k < kSize; ++k) e_ = kept_.m[k][lane_] == 0.0 ? e_ : max(e_, kept_.e[k][lane_]);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const double m = kept_.m[k][lane_];
        const int e = kept_.e[k][lane_] - e_;
        holds = holds && (m == 0.0 || e >= -kSpread / 2);
        x_.at[k] = m == 0.0 ? 0.0 : m * pow2_or_zero(e);
      }
    }
    unsigned most = 0, least = ~0u;  // positive numbers compare as their high words do
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const auto high = static_cast<unsigned>(high_word(x_.at[k]));
      most = max(most, high);
      least = min(least, high - 1);
    }
    bool filled = most != 0;
    holds = holds && most < high_word_of(1023) && (!filled || (most >> 20) - (least >> 20) <= kSpread);
    const int shift = min(max(1023 + kHead - static_cast<int>(most >> 20), -1000), 1000);
    int e = filled ? e_ - shift : 0;
    const unsigned edges = __ballot_sync(kFullMask, edge.m != 0.0);
    const int entering = __shfl_sync(kFullMask, edge.e, edges ? __ffs(edges) - 1 : 0);
    if (lane_ == 0 && !filled && edges) {
      e = entering;
      filled = true;
    }
    // A lane without anything yet takes the unit of what comes to it: that of the next lane to the left that has one.
    const unsigned lanes = __ballot_sync(kFullMask, filled), to_left = lanes & ((2u << lane_) - 1);
    e = __shfl_sync(kFullMask, e, to_left ? 31 - __clz(to_left) : lanes ? __ffs(lanes) - 1 : lane_);
    const double factor = pow2_or_zero(shift);
#pragma unroll
    for (int k = 0; k < kSize; ++k) x_.at[k] *= factor;
    e_ = e;
    e_first_ = __shfl_sync(kFullMask, e, 0);
    const int step = __shfl_up_sync(kFullMask, e, 1) - e;
    from_left_ = lane_ == 0 ? 0.0 : pow2_or_zero(min(max(step, -kReach), kReach));
    return __all_sync(kFullMask, holds && abs(step) <= kReach && is_near(edge));
  }

  // Whether nothing was lost.
  __device__ __forceinline__ bool march_plainly(Stage<Ring>& stage, Scaled edge) {
    if (lane_ < kChunk) entering_[0][lane_] = edge.m * pow2_or_zero(edge.e - e_first_);
    __syncwarp();
    const double* const entering = entering_[lane_ == 0 ? 0 : 1];
    // Weights are read one step ahead: a read below the stores of this step would wait for them, since they might be of
    // one address.
    ArcWeights<double, Ring> next_weights;
    stage.get(next_weights, 0, lane_);
    double next_entering = entering[0];
    unsigned most = 0, least = ~0u;
#pragma unroll
    for (int step = 0; step < kChunk; ++step) {
      const ArcWeights<double, Ring> weights = next_weights;
      const double enters = next_entering;
      if (step + 1 < kChunk) {
        stage.get(next_weights, step + 1, lane_);
        next_entering = entering[step + 1];
      }
      const double left = __shfl_up_sync(kFullMask, x_.out(), 1);  // lane 0 gets its own, and multiplies it by 0
      const double value = Recursion::visit(x_, left, from_left_, enters, weights);
      stage.value[step][lane_] = value;
      if (lane_ == kWarp - 1) stage.edge_out[step] = x_.out();
      const auto high = static_cast<unsigned>(high_word(value));
      most = max(most, high);
      least = min(least, high - 1);
    }
    stage.unit[lane_] = e_;
    if (lane_ == 0) stage.in_units = true;
    drifted_ = most > high_word_of(kHigh) || least < high_word_of(-kLow);
    return __all_sync(kFullMask, most < high_word_of(kSafe) && least > high_word_of(-kSafe));
  }

  __device__ __forceinline__ void march_exactly(Stage<Ring>& stage, int t, State<Scaled, Ring>& x) {
    if (lane_ == 0) stage.in_units = false;
    // With far arcs this is all there is, so weights are read one step ahead as well. Without, it is rare, and should
    // not cost the plain march its registers.
    ArcWeights<Scaled, Ring> weights, next_weights;
    if constexpr (Ring::kFar) stage.get(next_weights, 0, lane_);
#pragma unroll(Ring::kFar ? kChunk : 1)
    for (int step = 0; step < kChunk; ++step) {
      if constexpr (Ring::kFar) {
        weights = next_weights;
        if (step + 1 < kChunk) stage.get(next_weights, step + 1, lane_);
      } else {
        stage.get(weights, step, lane_);
      }
      Scaled in = shuffle_up(x.out());
      if (lane_ == 0) in = stage.edge_in[step];
      const Scaled value = Recursion::visit(column_, t, x, in, weights);
      stage.value[step][lane_] = value.m;
      stage.value_e[step][lane_] = value.e;
      if (lane_ == kWarp - 1) {
        stage.edge_out[step] = x.out().m;
        stage.edge_out_e[step] = x.out().e;
      }
      if constexpr (Ring::kFar) {  // far arcs of the next steps read this
        if (stored_ && column_.has(t)) {
          stored_[column_.p.batch.node(column_.b, t, column_.u)] = node_log(value, Acc(0));
        }
        __syncwarp();
      }
      t += direction == kForward ? 1 : -1;
    }
  }

  const Column<Acc>& column_;
  Kept<Ring>& kept_;
  double (&entering_)[2][kChunk];
  double* const stored_;
  const int lane_;
  State<double, Ring> x_;    // in units of 2^e_
  State<Scaled, Ring> far_;  // with far arcs, instead of it
  double from_left_;         // the unit of the lane to the left in those of this one; 0 where there is none
  int e_ = 0, e_first_ = 0;  // own, and that of the first lane
  bool exact_ = false;       // the last chunk was gone through in Scaled numbers, and kept_ holds its end
  bool drifted_ = false;     // the unit no longer suits
};

}  // namespace tdt::cuda
