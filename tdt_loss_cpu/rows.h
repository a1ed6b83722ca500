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

#if defined(_MSC_VER) && !defined(__clang__)
#define TDT_ALWAYS_INLINE __forceinline
#else
#define TDT_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace tdt::cpu {

constexpr int64_t kGrain = 16;       // rows per task at least: a row costs about a microsecond at V = 1024
constexpr int kLanes = 16;           // independent partial sums: one AVX-512 register of float32
constexpr int kPiece = 64 * kLanes;  // summed by itself, so that a long row's sum is not rounded element by element

// exp(x) for x up to about 0, within 2 ulp; 0 below the normal float32 range, NaN for NaN.
TDT_ALWAYS_INLINE float exp_of(float x) {
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

// The sum of exp(x - reference) over all entries that are not `reference` itself, and how many are. Of a row that one
// entry dominates, the others matter only in their own precision, so its 1 is added last, if at all.
template <typename Acc>
struct SumExp {
  Acc peak, rest;
};

TDT_SIMD inline SumExp<float> row_sum_exp(const float* x, int n, float reference) {
  float peak = 0.0f, rest = 0.0f;
  for (int begin = 0; begin < n; begin += kPiece) {
    const int end = n - begin < kPiece ? n : begin + kPiece;
    float rest_lane[kLanes] = {}, peak_lane[kLanes] = {};
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int k = 0; k < kLanes; ++k) {
        const float here = exp_of(x[i + k] - reference);
        const bool is_peak = x[i + k] == reference;
        rest_lane[k] += is_peak ? 0.0f : here;
        peak_lane[k] += is_peak ? 1.0f : 0.0f;
      }
    }
    for (int k = 0; i < end; ++i, ++k) (x[i] == reference ? peak_lane : rest_lane)[k] += exp_of(x[i] - reference);
    float rest_here = 0.0f;
    for (float s : rest_lane) rest_here += s;
    for (float s : peak_lane) peak += s;
    rest += rest_here;
  }
  return {peak, rest};
}

// out_v = exp(x_v - max) * share. In place (out == x) is allowed, for which the loop must not be tested for overlap.
TDT_SIMD inline void row_softmax(const float* x, float* out, int n, float max, float share) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) out[i] = exp_of(x[i] - max) * share;
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

inline SumExp<double> row_sum_exp(const double* x, int n, double reference) {
  SumExp<double> sum{0.0, 0.0};
  for (int begin = 0; begin < n; begin += kPiece) {
    const int end = n - begin < kPiece ? n : begin + kPiece;
    double rest = 0.0;
    for (int i = begin; i < end; ++i) (x[i] == reference ? sum.peak : rest) += std::exp(x[i] - reference);
    sum.rest += rest;
  }
  return sum;
}

inline void row_softmax(const double* x, double* out, int n, double max, double share) {
  for (int i = 0; i < n; ++i) out[i] = std::exp(x[i] - max) * share;
}

// A row's max, its sum of exp(x - max), and the logarithm of that. NaN if an entry is NaN or +inf; a logarithm of -inf
// if all are -inf.
template <typename Acc>
struct Row {
  Acc max, sum, log_sum;

  Row(const Acc* x, int n) : max(row_max(x, n)) {
    SumExp<Acc> parts = row_sum_exp(x, n, max == -INFINITY ? Acc(0) : max);
    if (max == INFINITY) parts.rest = NAN;
    sum = parts.peak + parts.rest;
    log_sum = std::log1p((parts.peak - Acc(1)) + parts.rest);
  }
};

// eq. 1 and 2 of a valid node from its token logits, into its record and row_max.
template <typename Acc>
void write_token_fields(const Batch& batch, int64_t node, const Node& at, const Extent& extent, const Acc* x,
                        const NodeRecords<Acc>& out, const Emission& emission) {
  const Row<Acc> tokens(x, batch.V);
  const int y = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  const Acc sigma = static_cast<Acc>(emission.sigma);
  const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - at.t));  // eq. 10
  Acc* record = out.node_lp + node * record_size(batch.D);
  out.row_max[node] = tokens.max;
  record[kRowSum] = tokens.sum;
  record[kBlankLp] = x[emission.blank] - tokens.max - tokens.log_sum - sigma;                 // eq. 1
  record[kLabelLp] = y < 0 ? -INFINITY : x[y] - tokens.max - tokens.log_sum - sigma + delay;  // eq. 2
}

// eq. 3 from the logits of D durations.
template <typename Acc>
void write_duration_fields(Acc* record, const Acc* z, int D) {
  if (D == 0) return;
  const Row<Acc> durations(z, D);
  for (int i = 0; i < D; ++i) record[kDurLp + i] = z[i] - durations.max - durations.log_sum;
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
