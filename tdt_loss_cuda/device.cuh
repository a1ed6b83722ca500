// What the kernels of rows assume of the GPU behind names: how wide a warp and a cache line are, what its lanes tell
// each other, which loads and stores the caches keep, and the instructions that C++ has no word for. A port to another
// kind of GPU begins here; the lattice's own such helpers stand in strip.cuh.
#pragma once

#include <cuda_runtime.h>

namespace tdt::cuda {

constexpr int kWarp = 32;
constexpr int kCacheLine = 128;  // bytes

// A bit for each lane of a warp.
using LaneMask = unsigned;
constexpr LaneMask kFullMask = 0xffffffffu;

__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / kWarp; }

// x of another lane: of one that all name, of the one `offset` lanes below, of the one whose index differs by a bit.
template <typename T>
__device__ __forceinline__ T shuffle(LaneMask lanes, T x, int lane) {
  return __shfl_sync(lanes, x, lane);
}
template <typename T>
__device__ __forceinline__ T shuffle_up(LaneMask lanes, T x, int offset) {
  return __shfl_up_sync(lanes, x, offset);
}
template <typename T>
__device__ __forceinline__ T shuffle_xor(LaneMask lanes, T x, int bit) {
  return __shfl_xor_sync(lanes, x, bit);
}
// The lanes for which it holds.
__device__ __forceinline__ LaneMask ballot(LaneMask lanes, bool holds) { return __ballot_sync(lanes, holds); }
__device__ __forceinline__ int count_of(LaneMask lanes) { return __popc(lanes); }
__device__ __forceinline__ int first_of(LaneMask lanes) { return __ffs(lanes) - 1; }
// What the lanes have written to memory is seen by each of them.
__device__ __forceinline__ void sync_lanes(LaneMask lanes) { __syncwarp(lanes); }

// 16 bytes that are used once: the caches need not keep them.
__device__ __forceinline__ uint4 load_once(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store_once(void* p, uint4 bits) { __stcs(static_cast<uint4*>(p), bits); }
// 16 bytes that many threads read and none writes.
__device__ __forceinline__ uint4 load_constant(const void* p) { return __ldg(static_cast<const uint4*>(p)); }

// Of words of two 16-bit elements each: the lower halves of both; the upper half of the first and the lower of the
// second.
__device__ __forceinline__ unsigned lower_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ unsigned middle_halves(unsigned a, unsigned b) { return __funnelshift_r(a, b, 16); }

// 2^x, of which a float32 below the normal range is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tdt::cuda
