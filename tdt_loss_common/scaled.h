// A non-negative number m * 2^e with its own exponent: what the recursions of eq. 4 and 5 carry instead of a logarithm.
//
// A product of thousands of probabilities underflows a double, so transducer lattices are usually kept as logarithms,
// and each step then pays an exp per arc and a log per node and rounds the running sum to its own magnitude. With the
// exponent kept apart, an arc is one multiplication and one addition, both exact to 2^-53, whatever the length of the
// path.
//
// Ranges: a weight is at least exp(kMinLogWeight), a node has e >= kMinNodeExp; anything smaller counts as zero. Zero
// is m = 0 with e = kZeroExp, below every exponent that a non-zero product of a node and two weights can have, so that
// max() over exponents never picks a zero. NaN lives in m and survives every operation, multiplication by zero
// included. No sum overflows an int.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TDT_HD __host__ __device__ __forceinline__
#else
#define TDT_HD inline
#endif

namespace tdt {

constexpr int kZeroExp = -(1 << 29);
constexpr int kMinNodeExp = -(1 << 28);  // 1.9e8 nats
constexpr double kMinLogWeight =
    -2.9e6;  // nats: the exponent fits 2^22, what the rounding trick of scaled_exp can hold
// nats: what two factors of a weight may have each, so that the weight is a plain double within 2^kWeightRange.
constexpr double kPlainLogWeight = 100.0;
constexpr int kWeightRange = 300;
constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

struct Scaled {
  double m;
  int e;
};

TDT_HD Scaled scaled_zero() { return {0.0, kZeroExp}; }
TDT_HD Scaled scaled_one() { return {1.0, 0}; }

TDT_HD int high_word(double x) {
#ifdef __CUDA_ARCH__
  return __double2hiint(x);
#else
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<int>(bits >> 32);
#endif
}

TDT_HD double with_high_word(double x, int high) {
#ifdef __CUDA_ARCH__
  return __hiloint2double(high, __double2loint(x));
#else
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits & 0xffffffffu) | (static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32);
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// 2^x for x <= 0; below the normal range it is exactly 0, by an exponent field of 0.
TDT_HD double pow2_or_zero(int x) { return with_high_word(0.0, (x > -1023 ? x : -1023) * (1 << 20) + (1023 << 20)); }

TDT_HD Scaled operator*(Scaled a, Scaled b) { return {a.m * b.m, a.e + b.e}; }

TDT_HD Scaled operator+(Scaled a, Scaled b) {
  const int e = a.e > b.e ? a.e : b.e;
  return {a.m * pow2_or_zero(a.e - e) + b.m * pow2_or_zero(b.e - e), e};
}

// The sum of n terms, each aligned to the largest exponent at once instead of pair by pair.
template <int n>
TDT_HD Scaled sum_of(const Scaled (&term)[n]) {
  int e = term[0].e;
  for (int i = 1; i < n; ++i) e = term[i].e > e ? term[i].e : e;
  double part[2] = {0.0, 0.0};
  for (int i = 0; i < n; ++i) part[i % 2] += term[i].m * pow2_or_zero(term[i].e - e);
  return {part[0] + part[1], e};
}

// m * 2^e of a number that a double holds with room to spare; a zero stays one.
TDT_HD double times_pow2(double m, int e) {
  return with_high_word(m, static_cast<int>(static_cast<uint32_t>(high_word(m)) + (static_cast<uint32_t>(e) << 20)));
}

// m into [1, 2), so that mantissas never drift out of a double's range; zeros get their canonical exponent.
TDT_HD Scaled normalized(Scaled a) {
  constexpr int kFraction = (1 << 20) - 1, kNanField = 0x7ff;
  const int high = high_word(a.m), field = high >> 20 & kNanField;
  const int e = a.e + field - 1023;
  // Selections, not branches: this stands on the one chain of dependent operations that the lattice waits for.
  const bool nan = field == kNanField, zero = !nan && (field == 0 || e < kMinNodeExp);
  const double m = with_high_word(a.m, nan ? high : (high & kFraction) | 1023 << 20);
  return {zero ? 0.0 : m, zero ? kZeroExp : nan ? 0 : e};
}

// 2^f - 1 for |f| <= 1/2, to 2 ulp of itself: the Taylor series, whose next term is below 1e-8. Instructions that
// approximate 2^f err by 2e-7 near 1, which is more than all that a probability close to 1 leaves to the others.
TDT_HD float exp2_minus_one(float f) {
  float p = 1.5252734e-5f;
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  return p * f;
}

// x in powers of two: the nearest integer, which the low bits of `rounded` hold too, and the rest.
struct Log2 {
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low mantissa bits
  float rounded, fraction;

  TDT_HD explicit Log2(float x) {
    constexpr float kLog2eF = static_cast<float>(kLog2e), kLog2eRest = static_cast<float>(kLog2e - kLog2eF);
    rounded = fmaf(x, kLog2eF, kRounder);
    fraction = fmaf(x, kLog2eRest, fmaf(x, kLog2eF, kRounder - rounded));
  }
  TDT_HD int integer() const { return static_cast<int>(rounded - kRounder); }
  // Equal to it modulo 2^12, which is all that an exponent field takes, and without a conversion.
  TDT_HD int low_bits() const {
#ifdef __CUDA_ARCH__
    return __float_as_int(rounded);
#else
    int bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
#endif
  }
};

// exp(x) of a log-probability x (natural logarithm). Below kMinLogWeight it counts as zero.
TDT_HD Scaled scaled_exp(float x) {
  if (!(x >= static_cast<float>(kMinLogWeight))) return {x != x ? x : 0.0f, kZeroExp};
  const Log2 log2(x);
  return {1.0 + exp2_minus_one(log2.fraction), log2.integer()};
}

TDT_HD Scaled scaled_exp(double x) {
  if (!(x >= kMinLogWeight)) return {x != x ? x : 0.0, kZeroExp};
  const double whole = rint(x * kLog2e);
  return {exp2(fma(x, kLog2e, -whole)), static_cast<int>(whole)};
}

// The same number as a double, of an x that has_plain_exp. Without a branch, so that several are worked out abreast.
template <typename Acc>
TDT_HD bool has_plain_exp(Acc x) {
  return (fabs(x) <= static_cast<Acc>(kPlainLogWeight)) | (x == -static_cast<Acc>(INFINITY));
}
TDT_HD double plain_exp(float x) {
  const bool zero = x == -INFINITY;
  const Log2 log2(zero ? 0.0f : x);
  const double exp = times_pow2(1.0 + exp2_minus_one(log2.fraction), log2.low_bits());
  return zero ? 0.0 : exp;
}
TDT_HD double plain_exp(double x) {
  const Scaled exp = scaled_exp(x);
  return exp.m * pow2_or_zero(exp.e);
}

// Natural logarithm at full double precision: for the few values per sample that leave the lattice.
TDT_HD double log_of(Scaled a) { return a.m == 0.0 ? -INFINITY : log(a.m) + a.e * kLn2; }

}  // namespace tdt
