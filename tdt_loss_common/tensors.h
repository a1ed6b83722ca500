// Torch's tensors on its stable ABI, as host code of ops and backends uses them: short names, data pointers,
// allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "dtypes.h"

namespace tdt {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
const T* const_data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Tensor empty_on(const Tensor& like, std::vector<int64_t> size, ScalarType type) {
  return torch::stable::new_empty(like, size, type);
}
inline Tensor zeros_on(const Tensor& like, std::vector<int64_t> size, ScalarType type) {
  return torch::stable::new_zeros(like, size, type);
}

}  // namespace tdt
