// The ops of the package as functions, once for both backends: each checks its arguments, allocates its outputs, and
// lets the backend compute. Schemas: torch_binding.cpp. Layouts of node_lp and ll: tdt_loss_common/problem.h.
#pragma once

#include <tuple>

#include "../tdt_loss_common/backend.h"

namespace tdt {

template <typename Acc>
const Acc* const_data(const Tensor& t) {
  return static_cast<const Acc*>(t.const_data_ptr());
}

// eq. 1-3 of every node: node_lp (B, T, U1, record_size(D)).
template <class Backend>
Tensor log_probs(const Tensor& logits, const OptionalTensor& duration_logits, const Tensor& targets,
                 const Tensor& logit_lengths, const Tensor& target_lengths, int64_t blank, int64_t num_durations,
                 double sigma) {
  const int64_t V = vocab_of(logits, duration_logits, num_durations);
  const Batch batch = batch_of(logits, targets, logit_lengths, target_lengths, V, num_durations);
  check_logits(logits, duration_logits, num_durations, V, blank);
  Tensor node_lp = empty_on(logits, {batch.B, batch.max_T, batch.max_U1, record_size(batch.D)},
                            accumulate_type(logits.scalar_type()));
  if (batch.nodes() == 0) return node_lp;
  dispatch_logits(logits.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    Backend::log_probs(logits, batch, logit_rows<S>(logits, duration_logits, V),
                       static_cast<accumulate_t<S>*>(node_lp.mutable_data_ptr()), static_cast<int>(blank), sigma);
  });
  return node_lp;
}

// eq. 4-6: losses (B,), ll (B,), and where a gradient is wanted alpha_beta (2, B, T, U1), else (0,).
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> lattice(const Tensor& node_lp, const Tensor& targets, const Tensor& logit_lengths,
                                           const Tensor& target_lengths, const DurationList& durations, int64_t vocab,
                                           bool zero_infinity, bool need_grad) {
  const Durations ds = durations_of(durations);
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, ds.n);
  STD_TORCH_CHECK(node_lp.is_contiguous() && node_lp.size(3) == record_size(ds.n), "node_lp must be contiguous with ",
                  record_size(ds.n), " columns for ", ds.n, " durations, got ", node_lp.size(3));
  Tensor losses = empty_on(node_lp, {batch.B}, node_lp.scalar_type());
  Tensor ll = empty_on(node_lp, {batch.B}, ScalarType::Double);
  Tensor alpha_beta = need_grad ? zeros_on(node_lp, {2, batch.B, batch.max_T, batch.max_U1}, ScalarType::Double)
                                : empty_on(node_lp, {0}, ScalarType::Double);
  if (batch.B == 0) return {losses, ll, alpha_beta};
  const auto compute = [&](auto zero) {
    using Acc = decltype(zero);
    double* alpha = need_grad ? static_cast<double*>(alpha_beta.mutable_data_ptr()) : nullptr;
    const LatticeOutput<Acc> out{static_cast<Acc*>(losses.mutable_data_ptr()),
                                 static_cast<double*>(ll.mutable_data_ptr()), alpha,
                                 need_grad ? alpha + batch.nodes() : nullptr, zero_infinity};
    Backend::lattice(node_lp, batch, ds, const_data<Acc>(node_lp), out);
  };
  STD_TORCH_CHECK(node_lp.scalar_type() == ScalarType::Float || node_lp.scalar_type() == ScalarType::Double,
                  "node_lp must be float32 or float64");
  node_lp.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
  return {losses, ll, alpha_beta};
}

// The losses (B,) as one number, and the weights (B,) of the samples in it.
template <class Backend>
std::tuple<Tensor, Tensor> reduce(const Tensor& losses, const Batch& batch, Reduction reduction) {
  Tensor loss = empty_on(losses, {}, losses.scalar_type());
  Tensor weights = empty_on(losses, {batch.B}, losses.scalar_type());
  const auto compute = [&](auto zero) {
    using Acc = decltype(zero);
    Backend::reduce(losses, batch, reduction, const_data<Acc>(losses), static_cast<Acc*>(loss.mutable_data_ptr()),
                    static_cast<Acc*>(weights.mutable_data_ptr()));
  };
  losses.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
  return {loss, weights};
}

// Forward in one call: one dispatch instead of three. The loss is (B,) without a reduction, else (). All but the loss
// is what the gradient needs; without a reduction the weights are (0,).
template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> loss(const Tensor& logits, const OptionalTensor& duration_logits,
                                                        const Tensor& targets, const Tensor& logit_lengths,
                                                        const Tensor& target_lengths, int64_t blank,
                                                        const DurationList& durations, double sigma, bool zero_infinity,
                                                        bool need_grad, bool /*inplace_grad: for autograd*/,
                                                        int64_t reduction) {
  const auto D = static_cast<int64_t>(durations.size());
  STD_TORCH_CHECK(reduction >= 0 && reduction <= static_cast<int64_t>(Reduction::kMeanVolume), "unknown reduction ",
                  reduction);
  const int64_t V = vocab_of(logits, duration_logits, D);
  Tensor node_lp = log_probs<Backend>(logits, duration_logits, targets, logit_lengths, target_lengths, blank, D, sigma);
  auto [losses, ll, alpha_beta] =
      lattice<Backend>(node_lp, targets, logit_lengths, target_lengths, durations, V, zero_infinity, need_grad);
  if (reduction == 0) return {losses, node_lp, ll, alpha_beta, empty_on(losses, {0}, losses.scalar_type())};
  const Batch batch = batch_of(logits, targets, logit_lengths, target_lengths, V, D);
  auto [value, weights] = reduce<Backend>(losses, batch, static_cast<Reduction>(reduction));
  return {value, node_lp, ll, alpha_beta, weights};
}

// eq. 7-9 into `grad_logits` and `grad_durations`, laid out like the logits.
template <class Backend>
void gradient_into(const Tensor& grad_logits, const OptionalTensor& grad_durations, const Tensor& grad_losses,
                   const Tensor& logits, const OptionalTensor& duration_logits, const Tensor& targets,
                   const Tensor& logit_lengths, const Tensor& target_lengths, const Tensor& node_lp, const Tensor& ll,
                   const Tensor& alpha_beta, int64_t blank, const DurationList& durations) {
  const Durations ds = durations_of(durations);
  const int64_t V = vocab_of(logits, duration_logits, ds.n);
  const Batch batch = batch_of(logits, targets, logit_lengths, target_lengths, V, ds.n);
  check_logits(logits, duration_logits, ds.n, V, blank);
  check_saved(batch, logits, grad_losses, node_lp, ll, alpha_beta);
  if (batch.nodes() == 0) return;
  dispatch_logits(logits.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    const double* alpha = const_data<double>(alpha_beta);
    const Saved<Acc> saved{const_data<Acc>(node_lp), const_data<double>(ll), alpha, alpha + batch.nodes(),
                           const_data<Acc>(grad_losses)};
    Backend::gradient(logits, batch, ds, logit_rows<S>(logits, duration_logits, V),
                      logit_rows<S>(grad_logits, grad_durations, V), saved, static_cast<int>(blank));
  });
}

// The gradients as new tensors; for joint logits the second is (0,).
template <class Backend>
std::tuple<Tensor, Tensor> gradient(const Tensor& grad_losses, const Tensor& logits,
                                    const OptionalTensor& duration_logits, const Tensor& targets,
                                    const Tensor& logit_lengths, const Tensor& target_lengths, const Tensor& node_lp,
                                    const Tensor& ll, const Tensor& alpha_beta, int64_t blank,
                                    const DurationList& durations) {
  Tensor grad_logits = torch::stable::empty_like(logits);
  OptionalTensor grad_durations;
  if (duration_logits) grad_durations = torch::stable::empty_like(*duration_logits);
  gradient_into<Backend>(grad_logits, grad_durations, grad_losses, logits, duration_logits, targets, logit_lengths,
                         target_lengths, node_lp, ll, alpha_beta, blank, durations);
  return {grad_logits, grad_durations ? *grad_durations : empty_on(logits, {0}, logits.scalar_type())};
}

// The gradient of joint logits, written over them.
template <class Backend>
void gradient_(const Tensor& grad_losses, const Tensor& logits, const Tensor& targets, const Tensor& logit_lengths,
               const Tensor& target_lengths, const Tensor& node_lp, const Tensor& ll, const Tensor& alpha_beta,
               int64_t blank, const DurationList& durations) {
  gradient_into<Backend>(logits, std::nullopt, grad_losses, logits, std::nullopt, targets, logit_lengths,
                         target_lengths, node_lp, ll, alpha_beta, blank, durations);
}

}  // namespace tdt
