"""Derivatives: of ``loss``, which is ``gradient``, and of ``gradient``, which has none. torch.func: transforms.py."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .arguments import LossArguments
from .fakes import allocate_loss, call, fake_gradient
from .slices import ANCHOR, Watched, adjoin, joint_of, meet_again, parts_of

NO_DOUBLE_BACKWARD = (
    "double backward through a transducer loss is not supported: its gradient has no derivative of its own"
)


_OTHERS = len(LossArguments._fields) - 2  # beside the two tensors of logits


def loss(arguments: LossArguments) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``ops.loss`` by the quickest way that differentiates it: the loss, and what else the op returns."""
    if not arguments.need_grad or torch.compiler.is_compiling():
        value, *saved = call(ops.loss, allocate_loss, *arguments)
        return value, saved
    # What `apply` does beside is for functorch, which is not active: forward.py asks.
    logits, duration_logits, *others = arguments
    slices = duration_logits is not None and adjoin(logits, duration_logits)
    return super(torch.autograd.Function, LossFunction).apply(
        logits, duration_logits, ANCHOR if slices else None, others
    )


class LossFunction(torch.autograd.Function):
    """``ops.loss`` with the derivative that is registered for it, for eager mode: the wrapper that torch.library generates
    does the same and takes longer than the kernels do on a small batch. What is no tensor passes through: autograd looks at
    every tensor that goes in or comes out, and at nothing within a tuple."""

    @staticmethod
    def forward(ctx, logits, duration_logits, anchor, others):
        arguments = LossArguments(logits, duration_logits, *others)
        with torch._C._AutoDispatchBelowAutograd():  # straight to the kernel
            output = call(ops.loss, allocate_loss, *arguments)
        _save(ctx, arguments, output)
        ctx.watched = None if anchor is None else Watched(logits, duration_logits)
        return output[0], output[1:]

    @staticmethod
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return None, None, None, None
        tensors = ctx.saved_tensors  # once, and as it is: torch.utils.checkpoint runs the forward again for them
        if torch.is_grad_enabled():
            return *_gradients(ctx, grad_loss, tensors), None, None  # refuses to be differentiated
        with torch._C._AutoDispatchBelowAutograd():
            slices = ctx.watched is not None and not ctx.watched
            grads = _gradients_of_slices(ctx, grad_loss, tensors) if slices else None
            return *(grads or _gradients(ctx, grad_loss, tensors)), None, None


def _save(ctx, arguments: LossArguments, output) -> None:
    ctx.options = arguments.gradient_options
    ctx.inplace_grad = arguments.inplace_grad
    ctx.set_materialize_grads(False)
    if arguments.need_grad:
        ctx.save_for_backward(*arguments[:5], *output[1:])


def _gradients(ctx, grad_loss, tensors) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Of logits and duration logits."""
    logits, duration_logits, *saved, weights = tensors
    if ctx.inplace_grad:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        grad_logits = logits.detach()
        ops.gradient_(grad_loss, weights, grad_logits, *saved, *ctx.options)
        torch.autograd.graph.increment_version(logits)
        return grad_logits, None
    grads = call(ops.gradient, fake_gradient, grad_loss, weights, logits, duration_logits, *saved, *ctx.options)
    wanted = ctx.needs_input_grad
    return grads[0] if wanted[0] else None, grads[1] if wanted[1] else None


def _gradients_of_slices(ctx, grad_loss, tensors) -> Optional[tuple[Tensor, Tensor]]:
    """The same in one piece, of two slices of a joint tensor whose gradient is what is wanted; else None."""
    logits, duration_logits, *saved, weights = tensors
    if not adjoin(logits, duration_logits):  # saved-tensor hooks have moved them
        return None
    joint, V = joint_of(logits, duration_logits), logits.shape[3]
    if not meet_again(ctx.next_functions[:3], V, joint.shape[3]):
        return None
    grad, _ = call(ops.gradient, fake_gradient, grad_loss, weights, joint, None, *saved, *ctx.options)
    return parts_of(grad, V)


# The same for the ops as torch.compile and torch.export see them.


def _setup_loss(ctx, inputs, output) -> None:
    _save(ctx, LossArguments(*inputs), output)
    ctx.mark_non_differentiable(*output[1:])


def _backward_loss(ctx, grad_loss, *_):
    grads = (None, None) if grad_loss is None else _gradients(ctx, grad_loss, ctx.saved_tensors)
    return *grads, *(None,) * _OTHERS


def _setup_gradient(ctx, inputs, output) -> None:
    pass


def _backward_gradient(ctx, *grads):
    raise RuntimeError(NO_DOUBLE_BACKWARD)


torch.library.register_autograd(add_op_namespace_prefix("loss"), _backward_loss, setup_context=_setup_loss)
torch.library.register_autograd(add_op_namespace_prefix("gradient"), _backward_gradient, setup_context=_setup_gradient)
