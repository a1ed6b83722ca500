// Row arithmetic of the CPU backend: log-sum-exp and softmax of one row, written so that the compiler vectorises it.
//
// float32 rows use exp_of below, a range reduction and a polynomial, because calls of std::exp are not vectorised
// without value-changing compiler flags. 16-bit rows are converted to float32 first. float64 rows use std::exp:
// correct, not fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../tdt_loss_common/backend.h"

// GCC compiles these functions once per instruction set and picks one at load time; the sanitizers do not support that.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#include <immintrin.h>
#define TDT_HAS_SIMD
#define TDT_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TDT_SIMD
#endif

namespace tdt::cpu {

constexpr int kLanes = 16;  // independent partial sums: one AVX-512 register of float32

// exp(x) for x up to about 0, within 2 ulp; 0 below the normal float32 range, NaN for NaN.
inline __attribute__((always_inline)) float exp_of(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  const float n = (x * 1.44269504f + kRounder) - kRounder;
  const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in few bits
  float p = 1.98412698e-4f;                                     // Taylor of exp on [-ln2/2, ln2/2]: next term 5e-9
  p = p * f + 1.38888889e-3f;
  p = p * f + 8.33333333e-3f;
  p = p * f + 4.16666667e-2f;
  p = p * f + 1.66666667e-1f;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  // The clamp keeps the conversion to int defined; the select below has the last word there.
  const float bounded = n > -126.0f ? (n < 126.0f ? n : 126.0f) : -126.0f;
  const int32_t bits = (static_cast<int32_t>(bounded) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : p * scale;
}

TDT_SIMD inline float row_max(const float* x, int n) {
  float lane[kLanes];
  std::fill(lane, lane + kLanes, -INFINITY);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] = x[i + k] > lane[k] ? x[i + k] : lane[k];
  }
  for (; i < n; ++i) lane[0] = std::max(lane[0], x[i]);
  return *std::max_element(lane, lane + kLanes);
}

TDT_SIMD inline float row_sum_exp(const float* x, int n, float reference) {
  float lane[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] += exp_of(x[i + k] - reference);
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] += exp_of(x[i] - reference);
  float sum = 0.0f;
  for (float s : lane) sum += s;
  return sum;
}

// out_v = exp(x_v - lse) * scale. In place (out == x) is allowed, for which the loop must not be tested for overlap.
TDT_SIMD inline void row_softmax(const float* x, float* out, int n, float lse, float scale) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) out[i] = exp_of(x[i] - lse) * scale;
}

template <typename Acc>
void row_clamp(Acc* x, int n, Acc limit) {
  for (int i = 0; i < n; ++i) x[i] = clamped(x[i], limit);
}

inline double row_max(const double* x, int n) {
  double m = -INFINITY;
  for (int i = 0; i < n; ++i) m = std::max(m, x[i]);
  return m;
}

inline double row_sum_exp(const double* x, int n, double reference) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += std::exp(x[i] - reference);
  return sum;
}

inline void row_softmax(const double* x, double* out, int n, double lse, double scale) {
  for (int i = 0; i < n; ++i) out[i] = std::exp(x[i] - lse) * scale;
}

// NaN if an entry is NaN or +inf (inf - inf in the sum); -inf if all are -inf.
template <typename Acc>
Acc row_logsumexp(const Acc* x, int n) {
  const Acc max = row_max(x, n);
  const Acc reference = max == -INFINITY ? Acc(0) : max;
  return reference + std::log(row_sum_exp(x, n, reference));
}

// 16-bit rows to float32 and back: to nearest, ties to even.
template <typename S>
TDT_SIMD void widen_row(const S* x, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>(x[i]);
}

template <typename S>
TDT_SIMD void narrow_row(const float* x, S* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<S>(x[i]);
}

// float16 by the processor's own conversions, 4 to 7 times as fast as the arithmetic of Half, which GCC does not
// recognise as such. Multiversioned as above: without F16C, Half's.
#ifdef TDT_HAS_SIMD
__attribute__((target("default"))) inline void widen_row(const Half* x, float* out, int n) {
  widen_row<Half>(x, out, n);
}
__attribute__((target("default"))) inline void narrow_row(const float* x, Half* out, int n) {
  narrow_row<Half>(x, out, n);
}

__attribute__((target("arch=x86-64-v3"))) inline void widen_row(const Half* x, float* out, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  }
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i].x);
}

__attribute__((target("arch=x86-64-v3"))) inline void narrow_row(const float* x, Half* out, int n) {
  constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT;
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), kNearestEven));
  }
  for (; i < n; ++i) out[i].x = _cvtss_sh(x[i], kNearestEven);
}
#endif

// The row itself where it has the accumulation type already, else its conversion in `buffer`.
inline const float* widened(const float* x, int, std::vector<float>&) { return x; }
inline const double* widened(const double* x, int, std::vector<double>&) { return x; }
template <typename S>
const float* widened(const S* x, int n, std::vector<float>& buffer) {
  buffer.resize(n);
  widen_row(x, buffer.data(), n);
  return buffer.data();
}

// Where to compute a row of the accumulation type that goes to `out`: there, or in `buffer`; store_row then moves it.
inline float* row_for(float* out, int, std::vector<float>&) { return out; }
inline double* row_for(double* out, int, std::vector<double>&) { return out; }
template <typename S>
float* row_for(S*, int n, std::vector<float>& buffer) {
  buffer.resize(n);
  return buffer.data();
}

inline void store_row(const float*, float*, int) {}
inline void store_row(const double*, double*, int) {}
template <typename S>
void store_row(const float* values, S* out, int n) {
  narrow_row(values, out, n);
}

}  // namespace tdt::cpu
