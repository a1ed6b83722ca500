// What every CUDA launch of the package needs: the device of the tensors, the caller's current stream, a check
// afterwards.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../tdt_loss_common/backend.h"
#include "device.cuh"

namespace tdt::cuda {

// Makes the tensor's device current while it lives, and knows the stream to launch on.
class LaunchScope {
 public:
  explicit LaunchScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                    "no current stream on CUDA device ", tensor.get_device_index());
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline unsigned blocks_for(int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace tdt::cuda
