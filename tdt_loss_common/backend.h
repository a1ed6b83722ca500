// What a backend provides: the three stages of the loss on plain structs. The ops of torch-ext/torch_binding.h check
// their arguments, allocate, and call these; tdt_loss_cpu and tdt_loss_cuda implement them under the same names.
#pragma once

#include "checks.h"
#include "reduction.h"

namespace tdt {

// What the forward keeps for the gradient, and the gradient that comes in.
template <typename Acc>
struct Saved {
  const Acc* node_lp;      // (B, T, U1, record_size(D))
  const double* ll;        // (B,)
  const double* alpha;     // (B, T, U1)
  const double* beta;      // (B, T, U1)
  const Acc* grad_losses;  // (B,)
};

// Where the lattice stage writes. Without a gradient, alpha and beta are null and only the losses are wanted.
template <typename Acc>
struct LatticeOutput {
  Acc* losses;    // (B,)
  double* ll;     // (B,)
  double* alpha;  // (B, T, U1), zeros
  double* beta;   // (B, T, U1), zeros
  bool zero_infinity;
};

enum class Device { kCpu, kCuda };

// `like` names the device, and allocates what a stage needs for itself.
template <Device device>
struct Backend {
  // eq. 1-3
  template <typename S>
  static void log_probs(const Tensor& like, const Batch& batch, const LogitRows<S>& logits, accumulate_t<S>* node_lp,
                        int blank, double sigma);
  // eq. 4-6
  template <typename Acc>
  static void lattice(const Tensor& like, const Batch& batch, const Durations& durations, const Acc* node_lp,
                      const LatticeOutput<Acc>& out);
  // loss () and the weight (B,) of each sample in it
  template <typename Acc>
  static void reduce(const Tensor& like, const Batch& batch, Reduction reduction, const Acc* losses, Acc* loss,
                     Acc* weights);
  // eq. 7-9; grad may be the logits themselves
  template <typename S>
  static void gradient(const Tensor& like, const Batch& batch, const Durations& durations, const LogitRows<S>& logits,
                       const LogitRows<S>& grad, const Saved<accumulate_t<S>>& saved, int blank);
};

using Cpu = Backend<Device::kCpu>;
using Cuda = Backend<Device::kCuda>;

}  // namespace tdt
