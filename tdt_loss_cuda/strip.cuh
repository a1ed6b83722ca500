// A strip of the lattice: 32 columns u of one sample in one direction, by one block (equations.h).
//
// Lane j of the block's first warp handles frame n - j at step n, so the wavefront t + u = const moves through the
// strip, and what a lane needs of its left neighbour is what that lane made one step ago: one shuffle. The march is a
// chain of dependent steps, so everything else is taken off it: steps come in chunks, and while the first warp works on
// one chunk, the other warps, one for each of its steps, turn the records of the next into arc weights and store the
// results of the last. One barrier a chunk. A strip hands its last column on through global memory, by a warp that
// sends and one that receives, and the next strip follows at a distance. beta is the same march in mirrored coordinates
// (T-1-t, U-u). No limit on U.
#pragma once

#include "march.cuh"

namespace tdt::cuda {

// The first warp marches, the last one sends and receives, those between have a step of each chunk.
template <class Ring>
constexpr int kThreadsOf = (Ring::kChunk + 2) * kWarp;

__device__ __forceinline__ void publish(int* p, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ int acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ int peek(const int* p) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// One access of 16 bytes that is not torn, and no order beside it: each says itself what it is of.
__device__ __forceinline__ void hand_over(Handover* p, Handover x) {
  asm volatile(
      "{ .reg .b64 high; .reg .b128 both; mov.b64 high, {%2, %3}; mov.b128 both, {%1, high}; "
      "st.relaxed.gpu.global.b128 [%0], both; }" ::"l"(p),
      "l"(__double_as_longlong(x.m)), "r"(x.e), "r"(x.frame_plus_1)
      : "memory");
}
__device__ __forceinline__ Handover look_at(const Handover* p) {
  long long m;
  int e, frame_plus_1;
  asm volatile(
      "{ .reg .b64 high; .reg .b128 both; ld.relaxed.gpu.global.b128 both, [%3]; mov.b128 {%0, high}, both; "
      "mov.b64 {%1, %2}, high; }"
      : "=l"(m), "=r"(e), "=r"(frame_plus_1)
      : "l"(p)
      : "memory");
  return {__longlong_as_double(m), e, frame_plus_1};
}

template <typename Acc, class Ring, Direction direction>
class Strip {
 public:
  __device__ Strip(const LatticeParams<Acc>& p, const Extent& extent, int lattice, int b, int strip,
                   Shared<Ring>& shared)
      : p_(p), extent_(extent), lattice_(lattice), b_(b), strip_(strip), shared_(shared) {
    const int64_t chains = static_cast<int64_t>(p.lattices) * p.directions * p.batch.B;
    chain_ = strip * chains + (lattice * p.directions + direction) * static_cast<int64_t>(p.batch.B) + b;
    chain_before_ = chain_ - chains;
    const int columns = extent.U + 1 - strip * kWarp;  // of this strip and those after it
    steps_ = extent.T + min(kWarp, columns) - 1;
    hands_on_ = columns > kWarp;
    stored_ = p.alpha_beta ? p.stored(lattice, direction) : nullptr;
  }

  __device__ void run() {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int chunks = (steps_ + kChunk - 1) / kChunk;
    const Column<Acc> own = column(lane);
    if (warp == 0) {
      March<Acc, Ring, direction> march(own, shared_, stored_, lane);
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        march.chunk(stage(chunk), frame(chunk, 0, lane));
        meet();
      }
    } else if (warp == Ring::kChunk + 1) {
      receive(0, lane, look(0, lane));
      Handover next = look(1, lane);
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk > 0) send(chunk - 1, lane);  // first, since receive waits
        receive(chunk + 1, lane, next);
        next = look(chunk + 2, lane);
        meet();
      }
      send(chunks - 1, lane);
      __syncwarp();
      if (p_.ended && lane == 0) publish(p_.ended + chain_, 1);
    } else {
      const int step = warp - 1;
      weigh(0, step, lane, load(0, step, lane, own));
      Record next = load(1, step, lane, own);
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const Record after_next = load(chunk + 2, step, lane, own);
        weigh(chunk + 1, step, lane, next);
        next = after_next;
        if (chunk > 0) store(chunk - 1, step, lane, own);
        meet();
      }
      store(chunks - 1, step, lane, own);
    }
  }

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels, kChunk = Ring::kChunk;
  static constexpr int kLongest = Ring::kRnnt ? 0 : kBlanks > kLabels ? kBlanks : kLabels;

  // All warps of the block, each in its own loop. The form for warps that are whole, which __syncthreads has too; but
  // compute-sanitizer's synccheck takes that one only where all warps come to the same instruction, and is given the
  // other, which costs a sixth of the lattice's time.
  __device__ __forceinline__ static void meet() {
#ifdef TDT_SYNCCHECK
    asm volatile("barrier.sync 1, %0;" ::"n"(kThreadsOf<Ring>) : "memory");
#else
    asm volatile("bar.sync 1, %0;" ::"n"(kThreadsOf<Ring>) : "memory");
#endif
  }

  __device__ __forceinline__ Column<Acc> column(int lane) const {
    const int position = strip_ * kWarp + lane;
    return {p_, extent_, b_, direction == kForward ? position : extent_.U - position};
  }
  // The frame that a lane visits in a step of a chunk, which may lie outside the sample.
  __device__ __forceinline__ int frame(int chunk, int step, int lane) const {
    const int index = chunk * kChunk + step - lane;
    return direction == kForward ? index : extent_.T - 1 - index;
  }

  __device__ __forceinline__ Stage<Ring>& stage(int chunk) const { return shared_.stages[chunk % 2]; }

  // The log-probabilities of a node that the weights are made of; -inf where there is no node.
  struct Record {
    Acc blank, label, duration[kLongest + 1];
  };

  // By the warp of each step, two chunks ahead: nothing waits for these loads.
  __device__ __forceinline__ Record load(int chunk, int step, int lane, const Column<Acc>& column) const {
    const int t = frame(chunk, step, lane);
    constexpr Acc kNone = -static_cast<Acc>(INFINITY);
    Record r{kNone, kNone, {}};
#pragma unroll
    for (int d = 0; d <= kLongest; ++d) r.duration[d] = kNone;
    if (!column.has(t)) return r;
    const Acc* record = column.record(t);
    if constexpr (std::is_same_v<Acc, float> && !Ring::kFar) {
      if (p_.whole_records) {
        const float4 a = *reinterpret_cast<const float4*>(record);
        r.blank = a.y;
        r.label = a.z;
        if constexpr (!Ring::kRnnt) {
          const float4 b = reinterpret_cast<const float4*>(record)[1];
          const float durations[] = {a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int d = 0; d <= kLongest; ++d) r.duration[d] = d < p_.arcs.n ? durations[d] : kNone;
        }
        return r;
      }
    }
    r.blank = record[kBlankLp];
    r.label = record[kLabelLp];
    if constexpr (!Ring::kRnnt) {
#pragma unroll
      for (int d = 0; d <= kLongest; ++d) {
        if (p_.column[d] >= 0) r.duration[d] = record[kDurLp + p_.column[d]];
      }
    }
    return r;
  }

  // One chunk ahead: the weights of a node's arcs, plain where those of all lanes are within range.
  __device__ __forceinline__ void weigh(int chunk, int step, int lane, const Record& r) {
    bool in_range = has_plain_exp(r.blank) & has_plain_exp(r.label);
    if constexpr (!Ring::kRnnt) {
#pragma unroll
      for (int d = 0; d <= kLongest; ++d) in_range = in_range & has_plain_exp(r.duration[d]);
    }
    const bool plain_step = !Ring::kFar && __all_sync(kFullMask, in_range);
    if (plain_step) {
      weigh(chunk, step, lane, r, [](Acc log_prob) { return plain_exp(log_prob); });
    } else {
      weigh(chunk, step, lane, r, [](Acc log_prob) { return scaled_exp(log_prob); });
    }
    if (lane == 0) stage(chunk).plain[step] = plain_step;
  }
  template <typename Exp>
  __device__ __forceinline__ void weigh(int chunk, int step, int lane, const Record& r, const Exp& exp) {
    ArcWeights<decltype(exp(Acc(0))), Ring> w;
    const auto blank = exp(r.blank), label = exp(r.label);
#pragma unroll
    for (int d = 0; d <= kLongest; ++d) {
      if constexpr (Ring::kRnnt) {
        w.blank(1) = blank;
        w.label(0) = label;
      } else {
        const auto duration = exp(r.duration[d]);
        if (d > 0 && d <= kBlanks) w.blank(d) = blank * duration;
        if (d <= kLabels) w.label(d) = label * duration;
      }
    }
    stage(chunk).put(w.at, step, lane);
  }

  // One chunk behind: what the march made of a node.
  __device__ __forceinline__ void store(int chunk, int step, int lane, const Column<Acc>& column) {
    const int t = frame(chunk, step, lane);
    if (!column.has(t)) return;
    const Scaled value = normalized(stage(chunk).value_at(step, lane));
    if (stored_ && !Ring::kFar) stored_[p_.batch.node(b_, t, column.u)] = node_log(value, Acc(0));
    if (direction == kBackward && column.u == 0 && t == 0) {  // LL of eq. 5
      p_.ll[static_cast<int64_t>(lattice_) * p_.batch.B + b_] = log_of(value);
    }
  }

  // Whether lane n of a chunk waits for what enters the first column, which is at frame n in step n.
  __device__ __forceinline__ bool expects(int chunk, int lane) const {
    return strip_ > 0 && lane < kChunk && chunk * kChunk + lane < extent_.T;
  }
  __device__ __forceinline__ const Handover* enters(int chunk, int lane) const {
    return p_.handover + chain_before_ * p_.batch.max_T + chunk * kChunk + lane;
  }
  // Two chunks ahead: what may be there already.
  __device__ __forceinline__ Handover look(int chunk, int lane) const {
    return expects(chunk, lane) ? look_at(enters(chunk, lane)) : Handover{0.0, 0, 0};
  }
  // One chunk ahead: what `seen` lacks is waited for, until the strip before this one hands on no more.
  __device__ __forceinline__ void receive(int chunk, int lane, Handover seen) {
    if (expects(chunk, lane)) {
      const int frame_plus_1 = chunk * kChunk + lane + 1;
      while (seen.frame_plus_1 != frame_plus_1) {
        // Relaxed, so that both are on their way together and neither empties the L1 cache.
        const bool ended = peek(p_.ended + chain_before_) != 0;
        seen = look_at(enters(chunk, lane));
        if (!ended || seen.frame_plus_1 == frame_plus_1) continue;
        acquire(p_.ended + chain_before_);  // what it wrote before its end
        seen = look_at(enters(chunk, lane));
        break;
      }
      if (seen.frame_plus_1 != frame_plus_1) seen.m = 0.0;
    }
    if (lane < kChunk) stage(chunk).edge_in[lane] = seen.m == 0.0 ? scaled_zero() : Scaled{seen.m, seen.e};
    __syncwarp();
  }

  // One chunk behind: what has left the last column, which is kWarp - 1 frames late.
  __device__ __forceinline__ void send(int chunk, int lane) {
    const int index = chunk * kChunk + lane - (kWarp - 1);
    if (hands_on_ && lane < kChunk && index >= 0 && index < extent_.T) {
      const Scaled edge = normalized(stage(chunk).edge_at(lane));
      hand_over(p_.handover + chain_ * p_.batch.max_T + index, {edge.m, edge.e, index + 1});
    }
  }

  const LatticeParams<Acc>& p_;
  const Extent extent_;
  const int lattice_, b_, strip_;
  Shared<Ring>& shared_;
  int64_t chain_, chain_before_;  // this strip's and the one's before in `ended` and `handover`
  int steps_;
  bool hands_on_;
  double* stored_;
};

}  // namespace tdt::cuda
