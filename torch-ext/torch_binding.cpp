// Registers the ops with the stable ABI. The namespace is the extension's own name, so two builds never collide.
#include "torch_binding.h"

#include "registration.h"

// One more level of macro expansion: TORCH_EXTENSION_NAME must become its value before it is pasted into names.
#define TDT_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define TDT_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

TDT_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "loss(Tensor logits, Tensor? duration_logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, int "
      "blank, "
      "int[] durations, float sigma, bool zero_infinity, bool need_grad, bool inplace_grad, "
      "int reduction=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "log_probs(Tensor logits, Tensor? duration_logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, "
      "int blank, "
      "int num_durations, float sigma) -> Tensor");
  m.def(
      "lattice(Tensor node_lp, Tensor targets, Tensor logit_lengths, Tensor target_lengths, int[] durations, int "
      "vocab, "
      "bool zero_infinity, bool need_grad) -> (Tensor, Tensor, Tensor)");
  m.def(
      "gradient(Tensor grad_losses, Tensor logits, Tensor? duration_logits, Tensor targets, Tensor logit_lengths, "
      "Tensor target_lengths, Tensor node_lp, Tensor ll, Tensor alpha_beta, int blank, int[] durations) -> (Tensor, "
      "Tensor)");
  m.def(
      "gradient_(Tensor grad_losses, Tensor(a!) logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, "
      "Tensor node_lp, Tensor ll, Tensor alpha_beta, int blank, int[] durations) -> ()");
}

template <class Backend>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("loss", TORCH_BOX(&tdt::loss<Backend>));
  m.impl("log_probs", TORCH_BOX(&tdt::log_probs<Backend>));
  m.impl("lattice", TORCH_BOX(&tdt::lattice<Backend>));
  m.impl("gradient", TORCH_BOX(&tdt::gradient<Backend>));
  m.impl("gradient_", TORCH_BOX(&tdt::gradient_<Backend>));
}

TDT_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { implement<tdt::Cpu>(m); }

#ifdef CUDA_KERNEL
TDT_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) { implement<tdt::Cuda>(m); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
