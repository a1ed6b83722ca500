// The ops of the losses and their gradients as functions, once for both backends: each checks its arguments, allocates
// its outputs, and lets the backend compute. Schemas: torch_binding.cpp. Layouts of node_lp, ll and alpha_beta:
// tdt_loss_common.
#pragma once

#include <tuple>

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/checks.h"

namespace tdt {

template <typename S>
Rows<S> rows_of(const Tensor& t, int64_t column = 0) {
  S* data = static_cast<S*>(t.data_ptr()) + column;
  if (t.dim() == 2) return {data, t.stride(0), 0, 0, 0};  // a tile
  return {data, 0, t.stride(0), t.stride(1), t.stride(2)};
}

template <typename S>
LogitRows<S> logit_rows(const Tensor& logits, const OptionalTensor& duration_logits, int64_t V) {
  if (duration_logits) return {rows_of<S>(logits), rows_of<S>(*duration_logits), Layout::kApart};
  return {rows_of<S>(logits), rows_of<S>(logits, V), Layout::kJoint};
}

template <typename Acc>
NodeRecords<Acc> node_records(const Tensor& node_lp, const Tensor& row_max) {
  return {mutable_data<Acc>(node_lp), mutable_data<Acc>(row_max)};
}

// eq. 1-3 of every node: node_lp (B, T, U1, record_size(D)) and row_max (B, T, U1).
template <class Backend>
std::tuple<Tensor, Tensor> log_probs(const Tensor& logits, const OptionalTensor& duration_logits, const Tensor& targets,
                                     const Tensor& logit_lengths, const Tensor& target_lengths, int64_t blank,
                                     int64_t num_durations, double sigma, double delay_penalty) {
  const int64_t V = vocab_of(logits, duration_logits, num_durations);
  const Batch batch = batch_of(logits, targets, logit_lengths, target_lengths, V, num_durations);
  check_logits(logits, duration_logits, num_durations, V, blank);
  check_penalties(batch, sigma, delay_penalty);
  const ScalarType type = accumulate_type(logits.scalar_type());
  Tensor node_lp = empty_on(logits, {batch.B, batch.max_T, batch.max_U1, record_size(batch.D)}, type);
  Tensor row_max = empty_on(logits, {batch.B, batch.max_T, batch.max_U1}, type);
  if (batch.nodes() == 0) return {node_lp, row_max};
  dispatch_logits(logits.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    Backend::log_probs(
        logits, LogProbsTask<S>{batch, NodeList{batch.nodes(), nullptr}, logit_rows<S>(logits, duration_logits, V),
                                node_records<accumulate_t<S>>(node_lp, row_max),
                                Emission{static_cast<int>(blank), sigma, delay_penalty}});
  });
  return {node_lp, row_max};
}

// eq. 4 and 5: ll (lattices, B), and where a gradient is wanted alpha_beta (lattices, 2, B, T, U1), else (0,).
template <class Backend>
std::tuple<Tensor, Tensor> lattice(const Tensor& node_lp, const Tensor& targets, const Tensor& logit_lengths,
                                   const Tensor& target_lengths, const DurationList& durations, int64_t vocab,
                                   double omega, bool need_grad) {
  const Arcs arcs = arcs_of(durations);
  const auto D = static_cast<int64_t>(durations.size());
  const int lattices = lattices_of(arcs, omega);
  const Batch batch = batch_of(node_lp, targets, logit_lengths, target_lengths, vocab, D);
  check_node_lp(node_lp, D);
  Tensor ll = empty_on(node_lp, {lattices, batch.B}, ScalarType::Double);
  Tensor alpha_beta = need_grad
                          ? empty_on(node_lp, {lattices, 2, batch.B, batch.max_T, batch.max_U1}, ScalarType::Double)
                          : empty_on(node_lp, {0}, ScalarType::Double);
  if (batch.B == 0) return {ll, alpha_beta};
  dispatch_accumulate(node_lp.scalar_type(), [&](auto zero) {
    Backend::lattice(node_lp, batch, arcs, lattices, const_data<decltype(zero)>(node_lp),
                     {mutable_data<double>(ll), need_grad ? mutable_data<double>(alpha_beta) : nullptr});
  });
  return {ll, alpha_beta};
}

// eq. 6, 11 and the reduction: the losses (B,) and weights (0,); or their sum () and the weight (B,) of each. `like`
// has the dtype that these get.
template <class Backend>
std::tuple<Tensor, Tensor> reduce(const Tensor& ll, const Tensor& target_lengths, const Tensor& like, double omega,
                                  bool zero_infinity, int64_t reduction) {
  STD_TORCH_CHECK(reduction >= 0 && reduction <= static_cast<int64_t>(Reduction::kMeanVolume), "unknown reduction ",
                  reduction);
  STD_TORCH_CHECK(ll.dim() == 2 && ll.size(0) >= 1 && ll.size(0) <= kMaxLattices && ll.is_contiguous() &&
                      ll.scalar_type() == ScalarType::Double,
                  "ll must be a contiguous float64 tensor of shape (lattices, B)");
  const int64_t B = ll.size(1);
  STD_TORCH_CHECK(target_lengths.dim() == 1 && target_lengths.size(0) == B && target_lengths.device() == ll.device(),
                  "target_lengths must have shape (", B, ",) and be on the device of ll");
  const bool each = reduction == static_cast<int64_t>(Reduction::kNone);
  const Reducing problem{static_cast<int>(B),    index_view(target_lengths, 1, "target_lengths"),
                         const_data<double>(ll), Mixture::of(static_cast<int>(ll.size(0)), omega),
                         zero_infinity,          static_cast<Reduction>(reduction)};
  const ScalarType type = accumulate_type(like.scalar_type());
  Tensor loss = each ? empty_on(ll, {B}, type) : empty_on(ll, {}, type);
  Tensor weights = empty_on(ll, {each ? 0 : B}, type);
  if (each && B == 0) return {loss, weights};
  dispatch_accumulate(type, [&](auto zero) {
    using Acc = decltype(zero);
    Acc* values = mutable_data<Acc>(loss);
    Backend::reduce(ll, problem,
                    Reduced<Acc>{each ? values : nullptr, each ? nullptr : values, mutable_data<Acc>(weights)});
  });
  return {loss, weights};
}

// Forward in one call: one dispatch instead of three. All but the loss is what the gradient needs.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> loss(
    const Tensor& logits, const OptionalTensor& duration_logits, const Tensor& targets, const Tensor& logit_lengths,
    const Tensor& target_lengths, int64_t blank, const DurationList& durations, double sigma, double delay_penalty,
    double omega, double /*fastemit_lambda: of the gradient*/, double /*clamp: of the gradient*/, bool zero_infinity,
    bool need_grad, bool /*inplace_grad: for autograd*/, int64_t reduction) {
  const auto D = static_cast<int64_t>(durations.size());
  const int64_t V = vocab_of(logits, duration_logits, D);
  auto [node_lp, row_max] = log_probs<Backend>(logits, duration_logits, targets, logit_lengths, target_lengths, blank,
                                               D, sigma, delay_penalty);
  auto [ll, alpha_beta] =
      lattice<Backend>(node_lp, targets, logit_lengths, target_lengths, durations, V, omega, need_grad);
  auto [value, weights] = reduce<Backend>(ll, target_lengths, logits, omega, zero_infinity, reduction);
  return {value, node_lp, row_max, ll, alpha_beta, weights};
}

// What the gradient needs beside the logits: the upstream gradient, what the forward saved, the options.
struct GradientArguments {
  const Tensor &grad_loss, &weights, &targets, &logit_lengths, &target_lengths, &node_lp, &row_max, &ll, &alpha_beta;
  int64_t blank;
  const DurationList& durations;
  double omega, fastemit_lambda, clamp;
};

// eq. 7-9 and 11-13 of the listed nodes into `grad_logits` and `grad_durations`, laid out like the logits.
template <class Backend>
void gradient_into(const Tensor& grad_logits, const OptionalTensor& grad_durations, const Tensor& logits,
                   const OptionalTensor& duration_logits, const Batch& batch, const NodeList& list,
                   const GradientArguments& a) {
  const Arcs arcs = arcs_of(a.durations);
  const int lattices = lattices_of(arcs, a.omega);
  check_saved(batch, lattices, accumulate_type(logits.scalar_type()), a.node_lp, a.ll, a.alpha_beta);
  check_row_max(a.row_max, a.node_lp);
  check_upstream(a.grad_loss, a.weights, a.node_lp, batch.B);
  if (list.n == 0) return;
  dispatch_logits(logits.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    const Saved<Acc> saved{const_data<Acc>(a.node_lp), const_data<Acc>(a.row_max), const_data<double>(a.ll),
                           const_data<double>(a.alpha_beta)};
    const Upstream<Acc> upstream{const_data<Acc>(a.grad_loss), a.grad_loss.dim() == 0 ? 0 : a.grad_loss.stride(0),
                                 a.weights.size(0) == 0 ? nullptr : const_data<Acc>(a.weights)};
    const auto shaping =
        Shaping<Acc>::of(static_cast<int>(a.blank), arcs, Mixture::of(lattices, a.omega), a.fastemit_lambda, a.clamp);
    Backend::gradient(logits,
                      GradientTask<S>{batch, list, logit_rows<S>(logits, duration_logits, batch.V),
                                      logit_rows<S>(grad_logits, grad_durations, batch.V), saved, upstream, shaping});
  });
}

template <class Backend>
void dense_gradient_into(const Tensor& grad_logits, const OptionalTensor& grad_durations, const Tensor& logits,
                         const OptionalTensor& duration_logits, const GradientArguments& a) {
  const auto D = static_cast<int64_t>(a.durations.size());
  const int64_t V = vocab_of(logits, duration_logits, D);
  const Batch batch = batch_of(logits, a.targets, a.logit_lengths, a.target_lengths, V, D);
  check_logits(logits, duration_logits, D, V, a.blank);
  STD_TORCH_CHECK(a.node_lp.device() == logits.device(), "node_lp must be on the device of the logits");
  gradient_into<Backend>(grad_logits, grad_durations, logits, duration_logits, batch, {batch.nodes(), nullptr}, a);
}

// An uninitialized gradient with the strides of the logits. Where the elements of these overlap, torch may order the
// dimensions in another way; rows must stay dense.
inline Tensor gradient_like(const Tensor& logits) {
  Tensor grad = torch::stable::empty_like(logits);
  if (grad.stride(3) == 1 || grad.size(3) == 1) return grad;
  return empty_on(logits, {logits.size(0), logits.size(1), logits.size(2), logits.size(3)}, logits.scalar_type());
}

// The gradients as new tensors; for joint logits the second is (0,).
template <class Backend>
std::tuple<Tensor, Tensor> gradient(const Tensor& grad_loss, const Tensor& weights, const Tensor& logits,
                                    const OptionalTensor& duration_logits, const Tensor& targets,
                                    const Tensor& logit_lengths, const Tensor& target_lengths, const Tensor& node_lp,
                                    const Tensor& row_max, const Tensor& ll, const Tensor& alpha_beta, int64_t blank,
                                    const DurationList& durations, double omega, double fastemit_lambda, double clamp) {
  const auto D = static_cast<int64_t>(durations.size());
  check_logits(logits, duration_logits, D, vocab_of(logits, duration_logits, D), blank);
  Tensor grad_logits = gradient_like(logits);
  OptionalTensor grad_durations;
  if (duration_logits) grad_durations = gradient_like(*duration_logits);
  dense_gradient_into<Backend>(grad_logits, grad_durations, logits, duration_logits,
                               {grad_loss, weights, targets, logit_lengths, target_lengths, node_lp, row_max, ll,
                                alpha_beta, blank, durations, omega, fastemit_lambda, clamp});
  return {grad_logits, grad_durations ? *grad_durations : empty_on(logits, {0}, logits.scalar_type())};
}

// The gradient of joint logits, written over them.
template <class Backend>
void gradient_(const Tensor& grad_loss, const Tensor& weights, const Tensor& logits, const Tensor& targets,
               const Tensor& logit_lengths, const Tensor& target_lengths, const Tensor& node_lp, const Tensor& row_max,
               const Tensor& ll, const Tensor& alpha_beta, int64_t blank, const DurationList& durations, double omega,
               double fastemit_lambda, double clamp) {
  dense_gradient_into<Backend>(logits, std::nullopt, logits, std::nullopt,
                               {grad_loss, weights, targets, logit_lengths, target_lengths, node_lp, row_max, ll,
                                alpha_beta, blank, durations, omega, fastemit_lambda, clamp});
}

}  // namespace tdt
