// Row access and row arithmetic on the device: 16-byte vectors over a row that starts anywhere, and a log-sum-exp that
// threads of a row build together.
//
// A row of V + D logits is rarely a multiple of 16 bytes, so rows start at any element offset. A row is walked as a
// head of single elements up to a 16-byte boundary, a body of vectors, and a tail of single elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"

namespace tdt::cuda {

constexpr int kUnroll = 4;       // vectors a thread has in flight
constexpr int kCacheLine = 128;  // bytes

// Threads of a row kernel per multiprocessor to compile for: 1024 leave 64 registers each. float64 needs more.
template <typename S>
constexpr int kRowThreads = sizeof(S) == 8 ? 512 : 1024;

// p, or the first element behind it where a cache line begins.
template <typename S>
__device__ S* next_line(S* p) {
  return p + (kCacheLine - reinterpret_cast<uintptr_t>(p) % kCacheLine) % kCacheLine / sizeof(S);
}

template <typename S>
bool is_short_row(int V) {
  return V * static_cast<int64_t>(sizeof(S)) < 8192;
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

// 16 bytes of a row. Loads bypass what caching they can: a row is read once. Stores do not unless told: where two rows
// meet in a sector of memory, the cache puts it together; written in two parts it would cost as much as many.
template <typename S>
struct Vector {
  static constexpr int kSize = 16 / sizeof(S);
  uint4 bits;

  __device__ __forceinline__ static Vector load(const S* p) { return {__ldcs(reinterpret_cast<const uint4*>(p))}; }
  // 16 bytes of the row [begin, end) that start at any element: element by element, or for 16-bit ones the words that
  // hold them, shifted. Where one of these would reach beyond the row, elements again.
  __device__ __forceinline__ static Vector load_shifted(const S* p, const S* begin, const S* end) {
    const unsigned odd = reinterpret_cast<uintptr_t>(p) / sizeof(S) % 2;
    if (sizeof(S) > 2 || (odd && (p == begin || p + kSize == end))) return gather(p);
    const auto* const from = reinterpret_cast<const unsigned*>(p - odd);
    unsigned words[5];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = __ldcs(from + j);
    words[4] = odd ? __ldcs(from + 4) : 0;
    return {{__funnelshift_r(words[0], words[1], 16 * odd), __funnelshift_r(words[1], words[2], 16 * odd),
             __funnelshift_r(words[2], words[3], 16 * odd), __funnelshift_r(words[3], words[4], 16 * odd)}};
  }
  // `fill` in every place
  __device__ __forceinline__ static Vector of(accumulate_t<S> fill) {
    accumulate_t<S> x[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = fill;
    return pack(x);
  }
  // The elements from p on, one by one.
  __device__ __forceinline__ static Vector gather(const S* p) {
    Vector v;
#pragma unroll
    for (int j = 0; j < kSize; ++j) reinterpret_cast<S*>(&v.bits)[j] = p[j];
    return v;
  }
  template <Caching caching = Caching::kKept>
  __device__ __forceinline__ void store(S* p) const {
    auto* const to = reinterpret_cast<uint4*>(p);
    caching == Caching::kKept ? static_cast<void>(*to = bits) : __stcs(to, bits);
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

__device__ __forceinline__ float exp_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * static_cast<float>(kLog2e)));
  return y;
}
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// The kThreads threads that share a row: part of a warp, a warp, or several warps of a block.
template <int kThreads>
struct RowGroup {
  static constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;  // those that can shuffle
  int thread, lane;
  unsigned mask;

  __device__ __forceinline__ RowGroup() : thread(threadIdx.x % kThreads), lane(threadIdx.x % kLanes) {
    const int first = threadIdx.x % kWarp / kLanes * kLanes;
    mask = (kFullMask >> (kWarp - kLanes)) << first;
  }

  // Sum and maximum over the lanes; every lane gets the same bits: both commute, so the butterfly is symmetric.
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc x) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(mask, x, offset);
    return x;
  }
  __device__ __forceinline__ int count(bool holds) const { return __popc(__ballot_sync(mask, holds)); }
  template <typename Acc>
  __device__ __forceinline__ Acc max(Acc x) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) x = fmax(x, __shfl_xor_sync(mask, x, offset));
    return x;
  }
};

// The sum of exp(x - max) over what it has seen. Of a row that one entry dominates, the others matter only in their own
// precision: `peak` is the sum of the piece that raised the maximum last, a little more than 1, and `rest` that of all
// others. NaN and +inf make the sum NaN.
template <typename Acc>
struct SumExp {
  Acc max = negative_infinity<Acc>(), peak = 0, rest = 0;

  // A piece is summed pair by pair before it is added, so that small entries are not lost one by one.
  template <int kSize>
  __device__ __forceinline__ void add(const Acc (&x)[kSize]) {
    Acc new_max = max;
#pragma unroll
    for (int j = 0; j < kSize; ++j) new_max = fmax(new_max, x[j]);
    const Acc own = sum_of<0, kSize>(x, reference(new_max));
    const bool rises = new_max > max;
    rest = (rest + (rises ? peak : own)) * exp_of(max - reference(new_max));
    peak = rises ? own : peak;
    max = new_max;
  }

  // Over the lanes of a group; afterwards max, count and rest are those of all. The 1 of each lane's maximum is counted
  // apart, so that what is added up is as small as the other entries are.
  template <int kThreads>
  __device__ __forceinline__ void merge(const RowGroup<kThreads>& group) {
    const Acc new_max = group.max(max);
    const bool has_max = max == new_max && peak != 0;
    rest = has_max ? peak - Acc(1) + rest : (peak + rest) * exp_of(max - reference(new_max));
    rest = group.sum(rest);
    peak = static_cast<Acc>(group.count(has_max));
    max = new_max;
  }

  __device__ __forceinline__ Acc sum() const { return peak + rest; }
  __device__ __forceinline__ Acc log_sum() const { return log1p((peak - Acc(1)) + rest); }

 private:
  // 0 for nothing seen or all of it masked, so that exp(-inf - reference) is 0 and not NaN
  __device__ __forceinline__ static Acc reference(Acc max) { return max == negative_infinity<Acc>() ? Acc(0) : max; }

  template <int kFirst, int kCount, int kSize>
  __device__ __forceinline__ static Acc sum_of(const Acc (&x)[kSize], Acc ref) {
    if constexpr (kCount == 1) {
      return exp_of(x[kFirst] - ref);
    } else {
      return sum_of<kFirst, kCount / 2>(x, ref) + sum_of<kFirst + kCount / 2, kCount - kCount / 2>(x, ref);
    }
  }
};

}  // namespace tdt::cuda
