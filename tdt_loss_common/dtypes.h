// The dtypes of logits, and what is computed in for each: the one list that all code for each of them is made from.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

namespace tdt {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

// F(C++ type, name in ScalarType) for each dtype of logits. FLOATS in torch-ext/tdt_loss/checks.py holds the same.
#define TDT_FOR_EACH_LOGIT_TYPE(F) F(float, Float) F(double, Double) F(Half, Half) F(BFloat16, BFloat16)
// The same for each dtype of log-probabilities, sums and losses.
#define TDT_FOR_EACH_ACCUMULATE_TYPE(F) F(float, Float) F(double, Double)

// Log-probabilities are float32, and float64 for float64 logits.
template <typename S>
using accumulate_t = std::conditional_t<std::is_same_v<S, double>, double, float>;

inline ScalarType accumulate_type(ScalarType logits) {
  return logits == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

#define TDT_CASE(type, name) \
  case ScalarType::name:     \
    return f(type{});

// Calls f with a zero of the C++ type of the logits.
template <typename F>
void dispatch_logits(ScalarType type, F&& f) {
  switch (type) {
    TDT_FOR_EACH_LOGIT_TYPE(TDT_CASE)
    default:
      STD_TORCH_CHECK(false, "logits must be float32, float64, float16 or bfloat16");
  }
}

// Calls f with a zero of the C++ type of log-probabilities and losses.
template <typename F>
void dispatch_accumulate(ScalarType type, F&& f) {
  switch (type) {
    TDT_FOR_EACH_ACCUMULATE_TYPE(TDT_CASE)
    default:
      STD_TORCH_CHECK(false, "log-probabilities and losses must be float32 or float64");
  }
}

#undef TDT_CASE

}  // namespace tdt
