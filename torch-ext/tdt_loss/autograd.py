"""What torch must know about the ops beside their kernels: output shapes for tracing, and derivatives."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

# Shapes of the ops' outputs, for torch.compile and torch.export.


def _accumulate_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _record_size(num_durations: int) -> int:
    return (3 + num_durations + 3) // 4 * 4


@torch.library.register_fake(add_op_namespace_prefix("log_probs"))
def _(logits, duration_logits, targets, logit_lengths, target_lengths, blank, num_durations, sigma):
    return logits.new_empty((*logits.shape[:3], _record_size(num_durations)), dtype=_accumulate_dtype(logits))


@torch.library.register_fake(add_op_namespace_prefix("lattice"))
def _(node_lp, targets, logit_lengths, target_lengths, durations, vocab, zero_infinity, need_grad):
    batch, max_t, max_u1 = node_lp.shape[:3]
    losses = node_lp.new_empty((batch,))
    ll = node_lp.new_empty((batch,), dtype=torch.float64)
    alpha_beta = node_lp.new_empty((2, batch, max_t, max_u1) if need_grad else (0,), dtype=torch.float64)
    return losses, ll, alpha_beta


@torch.library.register_fake(add_op_namespace_prefix("loss"))
def _(
    logits,
    duration_logits,
    targets,
    logit_lengths,
    target_lengths,
    blank,
    durations,
    sigma,
    zero_infinity,
    need_grad,
    inplace_grad,
    reduction=0,
):
    node_lp = logits.new_empty((*logits.shape[:3], _record_size(len(durations))), dtype=_accumulate_dtype(logits))
    batch = logits.shape[0]
    loss = node_lp.new_empty(() if reduction else (batch,))
    ll = node_lp.new_empty((batch,), dtype=torch.float64)
    alpha_beta = node_lp.new_empty((2, *logits.shape[:3]) if need_grad else (0,), dtype=torch.float64)
    return loss, node_lp, ll, alpha_beta, node_lp.new_empty((batch if reduction else 0,))


@torch.library.register_fake(add_op_namespace_prefix("gradient"))
def _(
    grad_losses,
    logits,
    duration_logits,
    targets,
    logit_lengths,
    target_lengths,
    node_lp,
    ll,
    alpha_beta,
    blank,
    durations,
):
    grad_durations = logits.new_empty((0,)) if duration_logits is None else torch.empty_like(duration_logits)
    return torch.empty_like(logits), grad_durations


@torch.library.register_fake(add_op_namespace_prefix("gradient_"))
def _(grad_losses, logits, targets, logit_lengths, target_lengths, node_lp, ll, alpha_beta, blank, durations):
    return None


_NEED_GRAD, _INPLACE_GRAD, _REDUCTION = 9, 10, 11  # places among the arguments of `loss`

# Autograd: the derivative of `loss` is `gradient`, and `gradient` has none.


def _setup_loss(ctx, inputs, output) -> None:
    logits, duration_logits, targets, logit_lengths, target_lengths = inputs[:5]
    ctx.blank, ctx.durations, ctx.inplace_grad = inputs[5], inputs[6], inputs[_INPLACE_GRAD]
    ctx.reduction = inputs[_REDUCTION]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    if inputs[_NEED_GRAD]:
        ctx.save_for_backward(logits, duration_logits, targets, logit_lengths, target_lengths, *output[1:])


def _backward_loss(ctx, grad_loss, *_):
    grads = [None] * 12
    if grad_loss is None:
        return tuple(grads)
    logits, duration_logits, *saved, weights = ctx.saved_tensors
    grad_losses = grad_loss * weights if ctx.reduction else grad_loss.contiguous()
    if ctx.inplace_grad:
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_DOUBLE_BACKWARD)
        grads[0] = logits.detach()
        ops.gradient_(grad_losses, grads[0], *saved, ctx.blank, ctx.durations)
        torch.autograd.graph.increment_version(logits)
    else:
        arguments = (grad_losses, logits, duration_logits, *saved, ctx.blank, ctx.durations)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            grad_logits, grad_durations = ops.gradient(*arguments)  # refuses to be differentiated
        else:
            with torch._C._AutoDispatchBelowAutograd():
                grad_logits, grad_durations = ops.gradient(*arguments)
        grads[0] = grad_logits if ctx.needs_input_grad[0] else None
        grads[1] = grad_durations if ctx.needs_input_grad[1] else None
    return tuple(grads)


_NO_DOUBLE_BACKWARD = "double backward through the TDT loss is not supported: its gradient has no derivative of its own"


def _setup_gradient(ctx, inputs, output) -> None:
    pass


def _backward_gradient(ctx, *grads):
    raise RuntimeError(_NO_DOUBLE_BACKWARD)


class LossFunction(torch.autograd.Function):
    """``ops.loss`` with the derivative that is registered for it, for eager mode: the wrapper that torch.library generates
    does the same and takes longer than the kernels do on a small batch."""

    @staticmethod
    def forward(ctx, *args):
        with torch._C._AutoDispatchBelowAutograd():  # straight to the kernel
            output = ops.loss(*args)
        _setup_loss(ctx, args, output)
        return output

    backward = staticmethod(_backward_loss)


def loss(*args):
    """``ops.loss`` by the quickest way that differentiates it."""
    need_grad = args[_NEED_GRAD]
    if not need_grad or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return ops.loss(*args)
    return LossFunction.apply(*args)


torch.library.register_autograd(add_op_namespace_prefix("loss"), _backward_loss, setup_context=_setup_loss)
torch.library.register_autograd(add_op_namespace_prefix("gradient"), _backward_gradient, setup_context=_setup_gradient)
