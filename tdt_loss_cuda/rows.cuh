// Rows on the device: 16-byte vectors over a row that starts anywhere, and the threads that share one.
//
// A row of V + D logits is rarely a multiple of 16 bytes, so rows start at any element offset. A row is walked as a
// head of single elements up to a 16-byte boundary, a body of vectors, and a tail of single elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"

namespace tdt::cuda {

constexpr int kUnroll = 4;  // vectors a thread has in flight

// Threads of a row kernel per multiprocessor to compile for: of 65536 registers, 1024 threads leave 64 each. float64
// needs twice as many.
template <typename S>
constexpr int kRowThreads = sizeof(S) == 8 ? 512 : 1024;

// p, or the first element behind it where a cache line begins.
template <typename S>
__device__ S* next_line(S* p) {
  return p + (kCacheLine - reinterpret_cast<uintptr_t>(p) % kCacheLine) % kCacheLine / sizeof(S);
}

// Rows shorter than this are shared by fewer threads: with a stride of kWarp * kUnroll vectors of 16 bytes, 2 KiB, a
// warp goes through its loop at least four times for a longer one.
constexpr int64_t kShortRowBytes = 4 * kWarp * kUnroll * 16;

template <typename S>
bool is_short_row(int V) {
  return V * static_cast<int64_t>(sizeof(S)) < kShortRowBytes;
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(Half x) { return __half2float(__ushort_as_half(x.x)); }
__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.x) << 16); }

template <typename S>
__device__ __forceinline__ S narrow(accumulate_t<S> x) {
  if constexpr (std::is_same_v<S, Half>) return Half(__half_as_ushort(__float2half_rn(x)), Half::from_bits());
  if constexpr (std::is_same_v<S, BFloat16>)
    return BFloat16(__bfloat16_as_ushort(__float2bfloat16_rn(x)), BFloat16::from_bits());
  if constexpr (std::is_same_v<S, accumulate_t<S>>) return x;
}

enum class Caching { kBypassed, kKept };

// 16 bytes of a row. Loads are marked as read once. Stores are not unless the caller says so: where two rows share a
// sector of memory, the cache combines them; written in two parts the sector would cost as much as many.
template <typename S>
struct Vector {
  static constexpr int kSize = 16 / sizeof(S);
  uint4 bits;

  __device__ __forceinline__ static Vector load(const S* p) { return {load_once(p)}; }
  // `fill` in every place
  __device__ __forceinline__ static Vector of(accumulate_t<S> fill) {
    accumulate_t<S> x[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = fill;
    return pack(x);
  }
  template <Caching caching = Caching::kKept>
  __device__ __forceinline__ void store(S* p) const {
    if constexpr (caching == Caching::kKept) {
      *reinterpret_cast<uint4*>(p) = bits;
    } else {
      store_once(p, bits);
    }
  }

  __device__ __forceinline__ accumulate_t<S> at(int j) const {
    if constexpr (std::is_same_v<S, BFloat16>) {  // half of a word is the upper half of a float
      const unsigned word = reinterpret_cast<const unsigned*>(&bits)[j / 2];
      return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return widen(reinterpret_cast<const S*>(&bits)[j]);
    }
  }
  __device__ __forceinline__ static Vector pack(const accumulate_t<S> (&x)[kSize]) {
    Vector v;
    S* s = reinterpret_cast<S*>(&v.bits);
#pragma unroll
    for (int j = 0; j < kSize; ++j) s[j] = narrow<S>(x[j]);
    return v;
  }
};

// At which addresses the elements of a vector in memory begin: kWhole: at a multiple of 16 bytes; kWords: 16-bit
// elements at a multiple of 4 bytes, wider ones anywhere; kOdd: 16-bit elements between two multiples of 4 bytes.
enum class Alignment { kWhole, kWords, kOdd };

// Sixteen bytes of a row whatever their alignment, and nothing beside them. Loads of parts are cached, since those of
// neighbouring threads share cache lines.
template <Alignment alignment, typename S>
__device__ __forceinline__ Vector<S> load_vector(const S* p) {
  if constexpr (alignment == Alignment::kWhole) {
    return Vector<S>::load(p);
  } else if constexpr (alignment == Alignment::kOdd) {
    const auto* const pairs = reinterpret_cast<const unsigned*>(p + 1);
    const unsigned first = p[0].x, a = pairs[0], b = pairs[1], c = pairs[2], last = p[7].x;
    return {{lower_halves(first, a), middle_halves(a, b), middle_halves(b, c), middle_halves(c, last)}};
  } else {
    using Part = std::conditional_t<sizeof(S) == 2, unsigned, S>;
    Vector<S> v;
#pragma unroll
    for (int j = 0; j < 16 / static_cast<int>(sizeof(Part)); ++j) {
      reinterpret_cast<Part*>(&v.bits)[j] = reinterpret_cast<const Part*>(p)[j];
    }
    return v;
  }
}

// Where the vectors of a row lie: elements [head, head + vectors * kSize). Threads may take them in turn from the
// multiple of kBoundary bytes before them, `skipped` vectors before the first, so that a warp touches whole cache
// lines.
template <typename S, int kBoundary = 16>
struct RowSplit {
  int head, vectors, tail;  // tail: first element after the body
  int skipped;

  __device__ RowSplit(const S* row, int n) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(S));
    head = misaligned == 0 ? 0 : min(n, Vector<S>::kSize - misaligned);
    vectors = (n - head) / Vector<S>::kSize;
    tail = head + vectors * Vector<S>::kSize;
    skipped = static_cast<int>(reinterpret_cast<uintptr_t>(row + head) % kBoundary / 16);
  }

  // Whether i, which may be negative, is one of the vectors.
  __device__ bool has(int i) const { return static_cast<unsigned>(i) < static_cast<unsigned>(vectors); }
  __device__ bool in_body(int v) const { return v >= head && v < tail; }
  // The thread that handles element v of the body.
  __device__ int owner(int v, int threads) const { return ((v - head) / Vector<S>::kSize + skipped) % threads; }
};

template <typename Acc>
__device__ __forceinline__ Acc negative_infinity() {
  return -static_cast<Acc>(INFINITY);
}

__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * static_cast<float>(kLog2e)); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// The kThreads threads that share a row: part of a warp, a warp, or several warps of a block.
template <int kThreads>
struct RowGroup {
  static constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;  // those that can shuffle
  int thread, lane;
  LaneMask mask;

  __device__ __forceinline__ RowGroup() : thread(threadIdx.x % kThreads), lane(threadIdx.x % kLanes) {
    const int first = lane_of_thread() / kLanes * kLanes;
    mask = (kFullMask >> (kWarp - kLanes)) << first;
  }

  // Sum and maximum over the lanes, of one number or of several side by side; every lane gets the same bits: both
  // commute, so the butterfly is symmetric.
  template <typename Acc, int kCount>
  __device__ __forceinline__ void sum(Acc (&x)[kCount]) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] += shuffle_xor(mask, x[k], offset);
    }
  }
  template <typename Acc, int kCount>
  __device__ __forceinline__ void max(Acc (&x)[kCount]) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] = fmax(x[k], shuffle_xor(mask, x[k], offset));
    }
  }
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc x) const {
    Acc one[1] = {x};
    sum(one);
    return one[0];
  }
  __device__ __forceinline__ int count(bool holds) const { return count_of(ballot(mask, holds)); }
};

}  // namespace tdt::cuda
