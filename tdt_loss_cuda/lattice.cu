// clang-format off
// The lattice on the GPU: alpha, beta and the log-likelihood of every sample, eq. 4-6, in one launch.
//
// The equations of the package; every file cites them by number. Node (t, u): t frames and u labels behind us; x and z
// its token and duration logits; d_0 ... d_{D-1} the durations.
//
//   lp_blank(t,u)  = x[blank]   - lse(x) - sigma                                                                (1)
//   lp_label(t,u)  = x[y_{u+1}] - lse(x) - sigma          (u < U)                                               (2)
//   lp_dur_i(t,u)  = z_i - lse(z)                                                                               (3)
//
// Arcs out of (t,u), for each i: blank (d_i > 0) to (t + d_i, u); label (u < U) to (t + d_i, u + 1); their weight is
// lp_blank or lp_label, plus lp_dur_i. An arc lands on a frame t < T, but for the final blank from (t, U) with
// t + d_i = T, the exit.
//
//   alpha(0,0) = 0; alpha(t,u) = logsumexp over the arcs into (t,u) of alpha(source) + weight                   (4)
//   beta(t,u)  = logsumexp over the arcs out of (t,u) of weight + beta(target); beta(exit) = 0                  (5)
//   LL = beta(0,0); loss = -LL                                                                                  (6)
//   occ(arc) = exp(alpha(source) + weight + beta(target) - LL)                                                  (7)
//
// G_blank, G_label: sums of occ over i; G_i: both arcs of duration i; G = G_blank + G_label.
//
//   d loss / d x_v = softmax(x)_v G - [v = blank] G_blank - [v = y_{u+1}] G_label                               (8)
//   d loss / d z_i = softmax(z)_i G - G_i                                                                       (9)
// clang-format on
//
// Work: a block owns a strip of 32 columns u of one sample in one direction (strip.cuh), so there is no limit on U.
// beta is the same march in mirrored coordinates (T-1-t, U-u), and both directions of all samples are one launch.
//
// Numbers are Scaled (scaled.h), exact to double precision however long the path; alpha and beta are stored as float64
// logarithms.
#include "strip.cuh"

namespace tdt {
namespace cuda {
namespace {

template <typename Acc, int kRing, bool kFar>
__global__ void __launch_bounds__(kThreadsOf<kRing>, kRing <= kShortRing ? 2 : 1)
    lattice_kernel(const __grid_constant__ LatticeParams<Acc> p) {
  extern __shared__ __align__(16) char shared[];
  auto* stages = reinterpret_cast<Stage<kRing>*>(shared);
  // Tickets, not block indices: a strip waits for the one before it, which has then certainly started.
  unsigned ticket = blockIdx.x;
  if (p.ticket) {
    auto* drawn = reinterpret_cast<unsigned*>(shared);
    if (threadIdx.x == 0) *drawn = atomicAdd(reinterpret_cast<unsigned*>(p.ticket), 1u);
    __syncthreads();
    ticket = *drawn;
    __syncthreads();
  }
  const unsigned lattices = static_cast<unsigned>(p.batch.B) * p.directions;
  const int strip = ticket / lattices, direction = ticket % lattices / p.batch.B, b = ticket % p.batch.B;
  const Extent extent = p.batch.extent(b);
  if (strip * kWarp > extent.U) return;

  bool bad_label = false;
  for (int u = threadIdx.x; u < extent.U; u += blockDim.x) bad_label = bad_label || p.batch.label(b, u) < 0;
  const bool malformed = __syncthreads_or(bad_label || !extent.ok);
  if (malformed || extent.T == 0) {
    if (strip == 0 && direction == kBackward && threadIdx.x == 0) {
      p.out.ll[b] = malformed ? kMalformed : -static_cast<double>(INFINITY);
      p.out.losses[b] = static_cast<Acc>(loss_of(p.out.ll[b], p.out.zero_infinity));
    }
    return;
  }
  if (direction == kForward) {
    Strip<Acc, kRing, kFar, kForward>(p, extent, b, strip, stages).run();
  } else {
    Strip<Acc, kRing, kFar, kBackward>(p, extent, b, strip, stages).run();
  }
}

// Sorts the durations into those of the ring, by value, and the far ones. Returns whether none is far.
template <typename Acc>
bool assign_arcs(LatticeParams<Acc>& p, int ring) {
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
  return p.n_far == 0;
}

template <typename Acc, int kRing, bool kFar>
void launch_lattice(const LatticeParams<Acc>& p, cudaStream_t stream) {
  constexpr int kShared = 2 * sizeof(Stage<kRing>);
  STD_CUDA_CHECK(
      cudaFuncSetAttribute(lattice_kernel<Acc, kRing, kFar>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const unsigned blocks = static_cast<unsigned>(p.batch.B) * p.directions * p.strips;
  lattice_kernel<Acc, kRing, kFar><<<blocks, kThreadsOf<kRing>, kShared, stream>>>(p);
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

  // Far arcs read beta back even when no gradient is wanted.
  const bool far = !cuda::assign_arcs(p, cuda::kShortRing) && !cuda::assign_arcs(p, cuda::kLongRing);
  OptionalTensor beta;
  if (far && !p.store) {
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
    p.handover = static_cast<Scaled*>(handover->mutable_data_ptr());
  }
  if (cuda::assign_arcs(p, cuda::kShortRing)) {
    cuda::launch_lattice<Acc, cuda::kShortRing, false>(p, scope.stream());
  } else {
    cuda::assign_arcs(p, cuda::kLongRing);
    cuda::launch_lattice<Acc, cuda::kLongRing, true>(p, scope.stream());
  }
}

template void Cuda::lattice<float>(const Tensor&, const Batch&, const Durations&, const float*,
                                   const LatticeOutput<float>&);
template void Cuda::lattice<double>(const Tensor&, const Batch&, const Durations&, const double*,
                                    const LatticeOutput<double>&);

}  // namespace tdt
