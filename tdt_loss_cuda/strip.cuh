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

#include "recursion.cuh"

namespace tdt::cuda {

template <class Ring>
constexpr int kThreadsOf = (1 + Ring::kChunk + 2) * kWarp;  // marches; a step each; receives, sends

// What the warps of a block exchange for one chunk; there are two, used in turn. Indexed [..][step of the chunk][lane].
template <class Ring>
struct Stage {
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels, kChunk = Ring::kChunk;
  static constexpr int kWeights = kBlanks + kLabels + 1;  // blank[d - 1], then label[d]
  double weight_m[kWeights][kChunk][kWarp];
  int weight_e[kWeights][kChunk][kWarp];
  double value_m[kChunk][kWarp];  // alpha or beta
  int value_e[kChunk][kWarp];
  Scaled edge_in[kChunk];   // what enters the strip's first column
  Scaled edge_out[kChunk];  // what leaves its last one

  __device__ __forceinline__ void put_blank(int d, int step, int lane, Scaled x) { put(d - 1, step, lane, x); }
  __device__ __forceinline__ void put_label(int d, int step, int lane, Scaled x) { put(kBlanks + d, step, lane, x); }
  __device__ __forceinline__ ArcWeights<Ring> weights(int step, int lane) const {
    ArcWeights<Ring> w;
#pragma unroll
    for (int d = 1; d <= kBlanks; ++d) w.blank[d - 1] = get(d - 1, step, lane);
#pragma unroll
    for (int d = 0; d <= kLabels; ++d) w.label[d] = get(kBlanks + d, step, lane);
    return w;
  }

 private:
  __device__ __forceinline__ void put(int k, int step, int lane, Scaled x) {
    weight_m[k][step][lane] = x.m;
    weight_e[k][step][lane] = x.e;
  }
  __device__ __forceinline__ Scaled get(int k, int step, int lane) const {
    return {weight_m[k][step][lane], weight_e[k][step][lane]};
  }
};

// The progress of a strip that will hand on no more.
constexpr int kEnded = std::numeric_limits<int>::max();

__device__ __forceinline__ void publish(int* p, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ int acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ Scaled shuffle_up(Scaled x) {
  return {__shfl_up_sync(kFullMask, x.m, 1), __shfl_up_sync(kFullMask, x.e, 1)};
}

// Natural logarithm of a node's value, as precise as the records it was made of.
__device__ __forceinline__ double node_log(Scaled x, float) {
  return (static_cast<double>(log2f(static_cast<float>(x.m))) + x.e) * kLn2;
}
__device__ __forceinline__ double node_log(Scaled x, double) { return log_of(x); }

template <typename Acc, class Ring, Direction direction>
class Strip {
 public:
  __device__ Strip(const LatticeParams<Acc>& p, const Extent& extent, int lattice, int b, int strip,
                   Stage<Ring>* stages)
      : p_(p), extent_(extent), lattice_(lattice), b_(b), strip_(strip), stages_(stages) {
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
      std::conditional_t<direction == kForward, Forward<Acc, Ring>, Backward<Acc, Ring>> recursion(own);
      Scaled out = scaled_zero();
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        march(chunk, lane, recursion, own, &out);
        meet();
      }
    } else if (warp <= kChunk) {
      const int step = warp - 1;
      Record next = load(0, step, lane, own);
      weigh(0, step, lane, next);
      next = load(1, step, lane, own);
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk > 0) store(chunk - 1, step, lane, own);
        weigh(chunk + 1, step, lane, next);
        next = load(chunk + 2, step, lane, own);
        meet();
      }
      store(chunks - 1, step, lane, own);
    } else if (warp == kChunk + 1) {
      receive(0, lane);
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        receive(chunk + 1, lane);
        meet();
      }
    } else {
      meet();
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk > 0) send(chunk - 1, lane);
        meet();
      }
      send(chunks - 1, lane);
      if (p_.progress && lane == 0) publish(p_.progress + chain_, kEnded);
    }
  }

 private:
  static constexpr int kBlanks = Ring::kBlanks, kLabels = Ring::kLabels, kChunk = Ring::kChunk;
  static constexpr int kLongest = kBlanks > kLabels ? kBlanks : kLabels;

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

  // The recursion over one chunk, by one warp.
  template <typename Recursion>
  __device__ __forceinline__ void march(int chunk, int lane, Recursion& recursion, const Column<Acc>& own,
                                        Scaled* out) {
    Stage<Ring>& stage = stages_[chunk % 2];
    // Read one step ahead: a read below the stores of this step would wait for them, since they might be of one
    // address.
    ArcWeights<Ring> next_weights = stage.weights(0, lane);
    Scaled next_edge = stage.edge_in[0];
#pragma unroll
    for (int step = 0; step < kChunk; ++step) {
      const ArcWeights<Ring> weights = next_weights;
      const Scaled edge = next_edge;
      if (step + 1 < kChunk) {
        next_weights = stage.weights(step + 1, lane);
        next_edge = stage.edge_in[step + 1];
      }
      Scaled in = shuffle_up(*out);
      if (lane == 0) in = edge;
      const int t = frame(chunk, step, lane);
      const Scaled value = recursion.visit(t, in, weights, out);
      stage.value_m[step][lane] = value.m;
      stage.value_e[step][lane] = value.e;
      if (lane == kWarp - 1) stage.edge_out[step] = *out;
      if constexpr (Ring::kFar) {  // far arcs of the next steps read this
        if (stored_ && own.has(t)) stored_[p_.batch.node(b_, t, own.u)] = node_log(value, Acc(0));
        __syncwarp();
      }
    }
  }

  // The log-probabilities of a node that the weights are made of; none where there is no node.
  struct Record {
    bool exists;
    Acc blank, label, duration[kLongest + 1];
  };

  // By the warp of each step, two chunks ahead: nothing waits for these loads.
  __device__ __forceinline__ Record load(int chunk, int step, int lane, const Column<Acc>& column) const {
    const int t = frame(chunk, step, lane);
    Record r;
    r.exists = column.has(t);
    if (!r.exists) return r;
    const Acc* record = column.record(t);
    r.blank = record[kBlankLp];
    r.label = record[kLabelLp];
#pragma unroll
    for (int d = 0; d <= kLongest; ++d) {
      if constexpr (Ring::kRnnt) {
        r.duration[d] = 0;
      } else {
        r.duration[d] = p_.column[d] < 0 ? -static_cast<Acc>(INFINITY) : record[kDurLp + p_.column[d]];
      }
    }
    return r;
  }

  // One chunk ahead: the weights of a node's arcs.
  __device__ __forceinline__ void weigh(int chunk, int step, int lane, const Record& r) {
    Stage<Ring>& stage = stages_[chunk % 2];
    const auto weight = [&](Acc log_prob) { return r.exists ? scaled_exp(log_prob) : scaled_zero(); };
    const Scaled blank = weight(r.blank), label = weight(r.label);
#pragma unroll
    for (int d = 0; d <= kLongest; ++d) {
      const Scaled duration = weight(r.duration[d]);
      if (d > 0 && d <= kBlanks) stage.put_blank(d, step, lane, blank * duration);
      if (d <= kLabels) stage.put_label(d, step, lane, label * duration);
    }
  }

  // One chunk behind: what the march made of a node.
  __device__ __forceinline__ void store(int chunk, int step, int lane, const Column<Acc>& column) {
    const Stage<Ring>& stage = stages_[chunk % 2];
    const int t = frame(chunk, step, lane);
    if (!column.has(t)) return;
    const Scaled value{stage.value_m[step][lane], stage.value_e[step][lane]};
    if (stored_ && !Ring::kFar) stored_[p_.batch.node(b_, t, column.u)] = node_log(value, Acc(0));
    if (direction == kBackward && column.u == 0 && t == 0) {  // LL of eq. 5
      p_.ll[static_cast<int64_t>(lattice_) * p_.batch.B + b_] = log_of(value);
    }
  }

  // One chunk ahead: what enters the first column, which is at frame n in step n.
  __device__ __forceinline__ void receive(int chunk, int lane) {
    const int index = chunk * kChunk + lane;
    Scaled edge = scaled_zero();
    if (lane >= kChunk) return;
    if (strip_ > 0 && index < extent_.T) {
      while (acquire(p_.progress + chain_before_) <= index) {
      }
      const int4 raw = __ldcg(reinterpret_cast<const int4*>(p_.handover + chain_before_ * p_.batch.max_T + index));
      edge = {__hiloint2double(raw.y, raw.x), raw.z};
    }
    stages_[chunk % 2].edge_in[lane] = edge;
  }

  // One chunk behind: what has left the last column, which is kWarp - 1 frames late.
  __device__ __forceinline__ void send(int chunk, int lane) {
    if (!hands_on_) return;
    const int index = chunk * kChunk + lane - (kWarp - 1);
    if (lane < kChunk && index >= 0 && index < extent_.T) {
      p_.handover[chain_ * p_.batch.max_T + index] = stages_[chunk % 2].edge_out[lane];
    }
    __syncwarp();
    const int done = min((chunk + 1) * kChunk - (kWarp - 1), extent_.T);
    if (lane == 0 && done > 0) publish(p_.progress + chain_, done);
  }

  const LatticeParams<Acc>& p_;
  const Extent extent_;
  const int lattice_, b_, strip_;
  Stage<Ring>* const stages_;
  int64_t chain_, chain_before_;  // this strip's and the one's before in progress and handover
  int steps_;
  bool hands_on_;
  double* stored_;
};

}  // namespace tdt::cuda
