// The lattice on the GPU: alpha, beta and the log-likelihood of every sample, eq. 4 and 5, in one launch (equations.h).
//
// Work: a block owns a strip of 32 columns u of one sample in one direction (strip.cuh), so there is no limit on U.
// beta is the same march in mirrored coordinates (T-1-t, U-u); both directions of all samples and lattices are one
// launch.
//
// Numbers are plain doubles in units that follow them, where that loses nothing, and Scaled (scaled.h) elsewhere: exact
// to double precision however long the path (march.cuh). alpha and beta are stored as float64 logarithms.
#include "strip.cuh"

namespace tdt {
namespace cuda {
namespace {

template <class Ring, typename Acc>
__device__ void run_strip(const LatticeParams<Acc>& p, const Extent& extent, int lattice, int direction, int b,
                          int strip, void* shared) {
  auto& of_block = *static_cast<Shared<Ring>*>(shared);
  if (direction == kForward) {
    Strip<Acc, Ring, kForward>(p, extent, lattice, b, strip, of_block).run();
  } else {
    Strip<Acc, Ring, kBackward>(p, extent, lattice, b, strip, of_block).run();
  }
}

// What a block is about, read by one of its threads.
struct Drawn {
  unsigned ticket;
  Extent extent;
};

// Of a strip that hands nothing on: the next one, which may think otherwise of lengths and labels that are being
// rewritten, must not wait for ever. A ticket is also the strip's place in `ended`.
template <typename Acc>
__device__ void end_strip(const LatticeParams<Acc>& p, unsigned ticket) {
  if (p.ended && threadIdx.x == 0) publish(p.ended + ticket, 1);
}

template <typename Acc, class Ring>
__global__ void __launch_bounds__(kThreadsOf<Ring>, Ring::kFar ? 1 : 2)
    lattice_kernel(const __grid_constant__ LatticeParams<Acc> p) {
  extern __shared__ __align__(16) char shared[];
  // Tickets, not block indices: a strip waits for the one before it, which has then certainly started. The lengths are
  // read once for the block: if somebody rewrites them meanwhile, its threads still take the same way.
  auto* const drawn = reinterpret_cast<Drawn*>(shared);
  if (threadIdx.x == 0) {
    const unsigned ticket = p.ticket ? atomicAdd(reinterpret_cast<unsigned*>(p.ticket), 1u) : blockIdx.x;
    *drawn = {ticket, p.batch.extent(ticket % p.batch.B)};
  }
  __syncthreads();
  const auto [ticket, extent] = *drawn;
  const unsigned chains = static_cast<unsigned>(p.batch.B) * p.directions * p.lattices;
  const int strip = ticket / chains, chain = ticket % chains / p.batch.B, b = ticket % p.batch.B;
  const int direction = chain % p.directions, lattice = chain / p.directions;
  if (strip * kWarp > extent.U) return end_strip(p, ticket);

  bool bad_label = false;
  for (int u = threadIdx.x; u < extent.U; u += blockDim.x) bad_label = bad_label || p.batch.label(b, u) < 0;
  const bool malformed = __syncthreads_or(bad_label || !extent.ok);
  if (malformed || extent.T == 0) {
    if (strip == 0 && direction == kBackward && threadIdx.x == 0) {
      p.ll[static_cast<int64_t>(lattice) * p.batch.B + b] = malformed ? kMalformed : -static_cast<double>(INFINITY);
    }
    return end_strip(p, ticket);
  }
  if (Ring::kRnnt || lattice == 0) {
    run_strip<Ring>(p, extent, lattice, direction, b, strip, shared);
  } else {
    run_strip<RnntRing<Ring::kChunk>>(p, extent, lattice, direction, b, strip, shared);
  }
}

// Sorts the durations into those of the ring, by value, and the far ones. Returns whether none is far.
template <typename Acc>
bool assign_arcs(LatticeParams<Acc>& p, int ring) {
  for (int d = 0; d <= ring; ++d) p.column[d] = -1;
  p.n_far = 0;
  for (int i = 0; i < p.arcs.n; ++i) {
    const int d = p.arcs.d[i];
    if (d <= ring && p.column[d] < 0) {
      p.column[d] = i;
    } else {
      p.far[p.n_far++] = i;
    }
  }
  return p.n_far == 0;
}

template <class Ring, typename Acc>
void launch_lattice(const LatticeParams<Acc>& p, cudaStream_t stream) {
  constexpr int kShared = sizeof(Shared<Ring>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(lattice_kernel<Acc, Ring>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const int64_t blocks = static_cast<int64_t>(p.batch.B) * p.directions * p.lattices * p.strips;
  STD_TORCH_CHECK(blocks <= std::numeric_limits<int>::max(), "more than 2^31 - 1 blocks of 32 labels, ", p.lattices,
                  " lattice(s) and ", p.directions, " direction(s) counted: the batch of ", p.batch.B, " is too large");
  lattice_kernel<Acc, Ring><<<static_cast<unsigned>(blocks), kThreadsOf<Ring>, kShared, stream>>>(p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace cuda

template <>
template <typename Acc>
void Cuda::lattice(const Tensor& like, const Batch& batch, const Arcs& arcs, int lattices, const Acc* node_lp,
                   const LatticeOutput& out) {
  const cuda::LaunchScope scope(like);
  cuda::LatticeParams<Acc> p{};
  p.batch = batch;
  p.arcs = arcs;
  p.node_lp = node_lp;
  p.ll = out.ll;
  p.alpha_beta = out.alpha_beta;
  p.lattices = lattices;
  p.directions = out.alpha_beta ? 2 : 1;
  p.strips = (batch.max_U1 + cuda::kWarp - 1) / cuda::kWarp;

  OptionalTensor cleared, scratch;
  const bool far = !arcs.rnnt && !cuda::assign_arcs(p, cuda::ShortRing::kBlanks);
  if (far && !p.alpha_beta) {  // far arcs read beta back even when no gradient is wanted
    scratch = empty_on(like, {2 * lattices * batch.nodes()}, ScalarType::Double);
    p.alpha_beta = static_cast<double*>(scratch->mutable_data_ptr());
  }
  if (p.strips > 1) {
    const int64_t chains = static_cast<int64_t>(p.strips) * p.lattices * p.directions * batch.B;
    const int64_t entries = chains * batch.max_T;  // of 16 bytes, 0 until they are written
    cleared = zeros_on(like, {4 * entries + chains + 1}, ScalarType::Int);
    p.handover = static_cast<cuda::Handover*>(cleared->mutable_data_ptr());
    p.ticket = reinterpret_cast<int*>(p.handover + entries);
    p.ended = p.ticket + 1;
  }
  p.whole_records = reinterpret_cast<uintptr_t>(node_lp) % 16 == 0;
  if (!arcs.rnnt) {
    p.whole_records = p.whole_records && record_size(arcs.n) == 8;
    for (int i = 0; i < arcs.n; ++i) p.whole_records = p.whole_records && arcs.d[i] == i;
  }
  if (arcs.rnnt) {
    cuda::launch_lattice<cuda::RnntRing<8>>(p, scope.stream());
  } else if (far) {
    cuda::assign_arcs(p, cuda::LongRing::kBlanks);
    cuda::launch_lattice<cuda::LongRing>(p, scope.stream());
  } else {
    cuda::launch_lattice<cuda::ShortRing>(p, scope.stream());
  }
}

template void Cuda::lattice<float>(const Tensor&, const Batch&, const Arcs&, int, const float*, const LatticeOutput&);
template void Cuda::lattice<double>(const Tensor&, const Batch&, const Arcs&, int, const double*, const LatticeOutput&);

}  // namespace tdt
