// The lattice on the GPU: alpha, beta and the log-likelihood of every sample, eq. 4-6, in one launch.
//
// The equations of the package; every file cites them by number. Node (t, u): t frames and u labels behind us; x and z
// its token and duration logits; d_0 ... d_{D-1} the durations.
//
//   lp_blank(t,u)  = x[blank]   - lse(x) - sigma                                                               (1)
//   lp_label(t,u)  = x[y_{u+1}] - lse(x) - sigma          (u < U)                                              (2)
//   lp_dur_i(t,u)  = z_i - lse(z)                                                                              (3)
//   Arcs out of (t,u), for each i: blank (d_i > 0) to (t + d_i, u); label (u < U) to (t + d_i, u + 1); weight lp_blank
//   or lp_label plus lp_dur_i. An arc lands on a frame t < T, but for the final blank from (t, U) with t + d_i = T, the
//   exit. alpha(0,0) = 0; alpha(t,u) = logsumexp over arcs into (t,u) of alpha(source) + weight (4) beta(t,u)  =
//   logsumexp over arcs out of (t,u) of weight + beta(target); beta(exit) = 0                     (5) LL = beta(0,0);
//   loss = -LL                                                                                 (6) occ(arc) =
//   exp(alpha(source) + weight + beta(target) - LL)                                                 (7) G_blank,
//   G_label = sums of occ over i; G_i = both arcs of duration i; G = G_blank + G_label d loss / d x_v = softmax(x)_v G
//   - [v = blank] G_blank - [v = y_{u+1}] G_label                              (8) d loss / d z_i = softmax(z)_i G -
//   G_i                                                                      (9)
//
// Work: a warp is a block and owns a strip of 32 columns u of one sample in one direction. Lane j handles the frame n -
// j at step n, so the wavefront t + u = const moves through the strip and what a lane needs of its left neighbour is
// what that lane made one step ago: one shuffle. No barrier, no limit on U. A strip hands its last column on through
// global memory, kChunk frames at a time, and the next strip follows at that distance. beta is the same march in
// mirrored coordinates (T-1-t, U-u).
//
// Numbers are Scaled (scaled.h), exact to double precision however long the path; alpha and beta are stored as float64
// logarithms. Records are copied to shared memory kDepth - 1 steps ahead, since their addresses do not depend on the
// recursion; a lane reads only what it copied itself.
//
// Durations up to kRing keep their pending values in registers, one per duration value. All other arcs ("far": longer
// ones, and second columns of a duration that occurs twice) read alpha and beta back from global memory, written steps
// ago.
#include <cuda_pipeline.h>

#include "launch.cuh"

namespace tdt {
namespace cuda {
namespace {

constexpr int kDepth = 4;  // records in flight per lane, the current one included
constexpr int kChunk = 8;  // frames a strip hands on at a time

// The value of a strip's last column at one frame, on its way to the next strip.
struct alignas(16) Handover {
  Scaled value;
};

template <typename Acc>
struct LatticeParams {
  Batch batch;
  Durations durations;
  int n_far;
  int far[kMaxDurations];  // indices i of the far arcs
  int column[9];           // ring position d -> its index i, or -1; kRing + 1 are used
  const Acc* node_lp;
  LatticeOutput<Acc> out;
  bool store;  // alpha and beta are wanted
  int strips, directions;
  int* ticket;         // null with one strip
  int* progress;       // frames handed on, (strips, directions, B)
  Handover* handover;  // (strips, directions, B, max_T)
};

enum Direction { kBackward = 0, kForward = 1 };

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
__device__ __forceinline__ Scaled shuffle_from(Scaled x, int lane) {
  return {__shfl_sync(kFullMask, x.m, lane), __shfl_sync(kFullMask, x.e, lane)};
}

// Natural logarithm of a node's value, as precise as the records it was made of.
__device__ __forceinline__ double node_log(Scaled x, float) {
  return (static_cast<double>(log2f(static_cast<float>(x.m))) + x.e) * kLn2;
}
__device__ __forceinline__ double node_log(Scaled x, double) { return log_of(x); }

// A stored alpha or beta as a number again.
__device__ __forceinline__ Scaled from_log(double x) {
  if (!(x >= kMinNodeExp * kLn2)) return {x != x ? x : 0.0, kZeroExp};
  const double whole = rint(x * kLog2e);
  return {exp2(fma(x, kLog2e, -whole)), static_cast<int>(whole)};
}

// The records of a lane's column, kDepth of them in shared memory: quads of 16 bytes, [slot][quad][lane].
template <typename Acc>
class RecordPipe {
 public:
  static constexpr int kPerQuad = 16 / sizeof(Acc);

  __device__ RecordPipe(char* shared, int record) : base_(shared + threadIdx.x * 16), quads_(record / kPerQuad) {}

  __device__ void prefetch(int step, const Acc* record) {
    if (record) {
      for (int q = 0; q < quads_; ++q) __pipeline_memcpy_async(quad(step, q), record + q * kPerQuad, 16);
    }
    __pipeline_commit();
  }
  __device__ void wait() const { __pipeline_wait_prior(kDepth - 1); }

  __device__ Acc field(int step, int i) const {
    return reinterpret_cast<const Acc*>(quad(step, i / kPerQuad))[i % kPerQuad];
  }

 private:
  __device__ char* quad(int step, int q) const { return base_ + (step % kDepth * quads_ + q) * kWarp * 16; }

  char* base_;
  int quads_;
};

// One lane's place: its column and the sample.
template <typename Acc>
struct Column {
  const LatticeParams<Acc>& p;
  Extent extent;
  int b, u;

  __device__ const Acc* record(int t, int u_at) const {
    return p.node_lp + p.batch.node(b, t, u_at) * record_size(p.batch.D);
  }
};

// The weights of the arcs out of one node; ring durations in registers, the others asked for one by one.
template <typename Acc, int kRing>
struct NodeWeights {
  Scaled blank, label, ring[kRing + 1];

  __device__ __forceinline__ NodeWeights(const LatticeParams<Acc>& p, const RecordPipe<Acc>& pipe, int step)
      : blank(scaled_exp(pipe.field(step, kBlankLp))), label(scaled_exp(pipe.field(step, kLabelLp))) {
#pragma unroll
    for (int d = 0; d <= kRing; ++d)
      ring[d] = p.column[d] < 0 ? scaled_zero() : scaled_exp(pipe.field(step, kDurLp + p.column[d]));
  }
};

// eq. 4. What has been pushed to frames t + 1 ... t + kRing of this column by blanks, and of the next column by labels.
template <typename Acc, int kRing>
class Forward {
 public:
  __device__ __forceinline__ explicit Forward(const Column<Acc>& column) : column_(column) {
#pragma unroll
    for (int d = 0; d < kRing; ++d) own_[d] = next_[d] = scaled_zero();
    if (column.u == 0) own_[0] = scaled_one();  // alpha(0, 0)
  }

  // Visits node (t, u). `in`: labels that arrive from column u - 1. Returns those that leave for column u + 1 at this
  // frame.
  __device__ __forceinline__ Scaled visit(int t, Scaled in, const NodeWeights<Acc, kRing>& w, const RecordPipe<Acc>&,
                                          int, Scaled* here) {
    Scaled alpha = own_[0] + in;
    for (int k = 0; k < column_.p.n_far; ++k) alpha = alpha + far(t, column_.p.far[k]);
    alpha = normalized(alpha);
    *here = alpha;
    const Scaled blank = alpha * w.blank, label = alpha * w.label;
    const Scaled out = next_[0] + label * w.ring[0];
#pragma unroll
    for (int d = 1; d < kRing; ++d) {
      own_[d - 1] = own_[d] + blank * w.ring[d];
      next_[d - 1] = next_[d] + label * w.ring[d];
    }
    own_[kRing - 1] = blank * w.ring[kRing];
    next_[kRing - 1] = label * w.ring[kRing];
    return out;
  }

 private:
  // Arc i into (t, u), from the alpha stored d_i frames ago.
  __device__ __forceinline__ Scaled far(int t, int i) const {
    const auto& [p, extent, b, u] = column_;
    const int d = p.durations.d[i], source = t - d;
    Scaled sum = scaled_zero();
    if (source < 0) return sum;
    if (d > 0) sum = sum + from_log(__ldcg(p.out.alpha + p.batch.node(b, source, u))) * weight(source, u, kBlankLp, i);
    if (u > 0)
      sum = sum + from_log(__ldcg(p.out.alpha + p.batch.node(b, source, u - 1))) * weight(source, u - 1, kLabelLp, i);
    return sum;
  }
  __device__ __forceinline__ Scaled weight(int t, int u, RecordField token, int i) const {
    const Acc* record = column_.record(t, u);
    return scaled_exp(record[token]) * scaled_exp(record[kDurLp + i]);
  }

  const Column<Acc>& column_;
  Scaled own_[kRing], next_[kRing];
};

// eq. 5. The beta of frames t + 1 ... t + kRing in this column, and of t ... t + kRing in column u + 1.
template <typename Acc, int kRing>
class Backward {
 public:
  __device__ __forceinline__ explicit Backward(const Column<Acc>& column) : column_(column) {
#pragma unroll
    for (int d = 0; d <= kRing; ++d) own_[d] = next_[d] = scaled_zero();
    if (column.u == column.extent.U) own_[1] = scaled_one();  // the exit: frame T of column U, for blanks alone
  }

  // Visits node (t, u). `in`: beta(t, u + 1). Returns beta(t, u).
  __device__ __forceinline__ Scaled visit(int t, Scaled in, const NodeWeights<Acc, kRing>& w,
                                          const RecordPipe<Acc>& pipe, int step, Scaled* here) {
    next_[0] = in;
    // Terms whose weight is 0 stay in the sum: 0 * NaN carries a NaN of any node on to (0, 0).
    Scaled beta = w.ring[0] * (w.label * next_[0]);
#pragma unroll
    for (int d = 1; d <= kRing; ++d) beta = beta + w.ring[d] * (w.blank * own_[d] + w.label * next_[d]);
    for (int k = 0; k < column_.p.n_far; ++k) beta = beta + far(t, column_.p.far[k], w, pipe, step);
    beta = normalized(beta);
#pragma unroll
    for (int d = kRing; d > 1; --d) own_[d] = own_[d - 1];
    own_[1] = beta;
#pragma unroll
    for (int d = kRing; d > 0; --d) next_[d] = next_[d - 1];
    *here = beta;
    return beta;
  }

 private:
  // Arc i out of (t, u), to the beta stored d_i frames ago or to the exit.
  __device__ __forceinline__ Scaled far(int t, int i, const NodeWeights<Acc, kRing>& w, const RecordPipe<Acc>& pipe,
                                        int step) const {
    const auto& [p, extent, b, u] = column_;
    const int d = p.durations.d[i], left = extent.T - t;
    Scaled onward = scaled_zero();
    if (d > 0 && d < left) onward = w.blank * from_log(__ldcg(p.out.beta + p.batch.node(b, t + d, u)));
    if (d > 0 && d == left && u == extent.U) onward = w.blank;
    if (u < extent.U && d < left)
      onward = onward + w.label * from_log(__ldcg(p.out.beta + p.batch.node(b, t + d, u + 1)));
    return scaled_exp(pipe.field(step, kDurLp + i)) * onward;
  }

  const Column<Acc>& column_;
  Scaled own_[kRing + 1], next_[kRing + 1];
};

template <typename Acc, int kRing, Direction direction>
__device__ __forceinline__ void march(const LatticeParams<Acc>& p, const Extent& extent, int b, int strip,
                                      char* shared) {
  const int lane = threadIdx.x, columns = extent.U + 1, position = strip * kWarp + lane;
  const bool has_column = position < columns, hands_on = lane == kWarp - 1 && position + 1 < columns;
  const Column<Acc> column{p, extent, b, direction == kForward ? position : extent.U - position};
  const auto frame = [&](int index) { return direction == kForward ? index : extent.T - 1 - index; };
  const int64_t chain = (static_cast<int64_t>(strip) * p.directions + direction) * p.batch.B + b;
  const int64_t chain_before = chain - static_cast<int64_t>(p.directions) * p.batch.B;
  double* stored = direction == kForward ? p.out.alpha : p.out.beta;

  RecordPipe<Acc> pipe(shared, record_size(p.batch.D));
  const auto prefetch = [&](int step) {
    const int index = step - lane;
    pipe.prefetch(step, has_column && index >= 0 && index < extent.T ? column.record(frame(index), column.u) : nullptr);
  };
  for (int step = 0; step < kDepth - 1; ++step) prefetch(step);

  std::conditional_t<direction == kForward, Forward<Acc, kRing>, Backward<Acc, kRing>> recursion(column);
  Scaled out = scaled_zero(),
         received = scaled_zero();  // received: lane k holds frame (chunk start + k) of the strip before
  const int steps = extent.T + min(kWarp, columns - strip * kWarp) - 1;
  for (int step = 0; step < steps; ++step) {
    prefetch(step + kDepth - 1);
    pipe.wait();
    const int index = step - lane;  // frames visited by this lane so far

    Scaled in = shuffle_up(out);
    if (lane == 0) in = scaled_zero();
    if (strip > 0 && step < extent.T) {
      if (step % kChunk == 0) {
        while (acquire(p.progress + chain_before) < min(step + kChunk, extent.T)) {
        }
        const int wanted = step + lane % kChunk;
        if (wanted < extent.T) {
          const int4 raw = __ldcg(reinterpret_cast<const int4*>(p.handover + chain_before * p.batch.max_T + wanted));
          received = {__hiloint2double(raw.y, raw.x), raw.z};
        }
      }
      const Scaled first = shuffle_from(received, step % kChunk);
      if (lane == 0) in = first;
    }
    if (p.n_far > 0) __syncwarp();  // what neighbours stored in earlier steps is read below

    if (has_column && index >= 0 && index < extent.T) {
      const int t = frame(index);
      Scaled here;
      const NodeWeights<Acc, kRing> weights(p, pipe, step);
      out = recursion.visit(t, in, weights, pipe, step, &here);
      if (p.store) stored[p.batch.node(b, t, column.u)] = node_log(here, Acc(0));
      if (hands_on) {
        p.handover[chain * p.batch.max_T + index] = {out};
        if ((index + 1) % kChunk == 0 || index + 1 == extent.T) publish(p.progress + chain, index + 1);
      }
      if (direction == kBackward && column.u == 0 && t == 0) {  // eq. 6
        const double ll = log_of(here);
        p.out.ll[b] = ll;
        p.out.losses[b] = static_cast<Acc>(loss_of(ll, p.out.zero_infinity));
      }
    }
  }
}

template <typename Acc, int kRing>
__global__ void __launch_bounds__(kWarp) lattice_kernel(const __grid_constant__ LatticeParams<Acc> p) {
  extern __shared__ __align__(16) char shared[];
  // Tickets, not block indices: a strip waits for the one before it, which has then certainly started.
  unsigned ticket = blockIdx.x;
  if (p.ticket) {
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(p.ticket), 1u);
    ticket = __shfl_sync(kFullMask, ticket, 0);
  }
  const unsigned lattices = static_cast<unsigned>(p.batch.B) * p.directions;
  const int strip = ticket / lattices, direction = ticket % lattices / p.batch.B, b = ticket % p.batch.B;
  const Extent extent = p.batch.extent(b);
  if (strip * kWarp > extent.U) return;

  bool bad_label = false;
  for (int u = threadIdx.x; u < extent.U; u += kWarp) bad_label = bad_label || p.batch.label(b, u) < 0;
  const bool malformed = !extent.ok || __any_sync(kFullMask, bad_label);
  if (malformed || extent.T == 0) {
    if (strip == 0 && direction == kBackward && threadIdx.x == 0) {
      p.out.ll[b] = malformed ? kMalformed : -static_cast<double>(INFINITY);
      p.out.losses[b] = static_cast<Acc>(loss_of(p.out.ll[b], p.out.zero_infinity));
    }
    return;
  }
  if (direction == kForward) {
    march<Acc, kRing, kForward>(p, extent, b, strip, shared);
  } else {
    march<Acc, kRing, kBackward>(p, extent, b, strip, shared);
  }
}

// Sorts the durations into those of the ring, by value, and the far ones.
template <typename Acc>
void assign_arcs(LatticeParams<Acc>& p, int ring) {
  for (int d = 0; d <= ring; ++d) p.column[d] = -1;
  p.n_far = 0;
  for (int i = 0; i < p.durations.n; ++i) {
    const int d = p.durations.d[i];
    if (d <= ring && p.column[d] < 0) {
      p.column[d] = i;
    } else {
      p.far[p.n_far++] = i;
    }
  }
}

template <typename Acc, int kRing>
void launch_lattice(const LatticeParams<Acc>& params, cudaStream_t stream) {
  LatticeParams<Acc> p = params;
  assign_arcs(p, kRing);
  const size_t shared = static_cast<size_t>(kDepth) * record_size(p.batch.D) * sizeof(Acc) * kWarp;
  if (shared > 48 * 1024) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(lattice_kernel<Acc, kRing>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
  }
  const unsigned blocks = static_cast<unsigned>(p.batch.B) * p.directions * p.strips;
  lattice_kernel<Acc, kRing><<<blocks, kWarp, shared, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::lattice(const Tensor& like, const Batch& batch, const Durations& durations, const Acc* node_lp,
                   const LatticeOutput<Acc>& out) {
  const cuda::LaunchScope scope(like);
  cuda::LatticeParams<Acc> p{};
  p.batch = batch;
  p.durations = durations;
  p.node_lp = node_lp;
  p.out = out;
  p.store = out.alpha != nullptr;
  p.directions = p.store ? 2 : 1;
  p.strips = (batch.max_U1 + cuda::kWarp - 1) / cuda::kWarp;
  int longest = 0;
  for (int i = 0; i < durations.n; ++i) longest = std::max(longest, durations.d[i]);

  // Far arcs read beta back even when no gradient is wanted. How many are far depends on the ring; 8 is the largest.
  OptionalTensor beta;
  cuda::assign_arcs(p, 4);
  if (!p.store && p.n_far > 0) {
    beta = zeros_on(like, {batch.nodes()}, ScalarType::Double);
    p.out.beta = static_cast<double*>(beta->mutable_data_ptr());
    p.store = true;
  }
  OptionalTensor counters, handover;
  if (p.strips > 1) {
    const int64_t chains = static_cast<int64_t>(p.strips) * p.directions * batch.B;
    counters = zeros_on(like, {chains + 1}, ScalarType::Int);
    handover = empty_on(like, {chains * batch.max_T * 2}, ScalarType::Double);
    p.ticket = static_cast<int*>(counters->mutable_data_ptr());
    p.progress = p.ticket + 1;
    p.handover = static_cast<cuda::Handover*>(handover->mutable_data_ptr());
  }
  if (longest <= 4) {
    cuda::launch_lattice<Acc, 4>(p, scope.stream());
  } else {
    cuda::launch_lattice<Acc, 8>(p, scope.stream());
  }
}

template void Cuda::lattice<float>(const Tensor&, const Batch&, const Durations&, const float*,
                                   const LatticeOutput<float>&);
template void Cuda::lattice<double>(const Tensor&, const Batch&, const Durations&, const double*,
                                    const LatticeOutput<double>&);

}  // namespace tdt
