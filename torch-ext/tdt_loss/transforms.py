"""The loss under torch.func (grad, vjp, jvp, vmap, jacrev, jacfwd) and under forward-mode AD."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import ops
from .arguments import LossArguments
from .autograd import NO_DOUBLE_BACKWARD
from .fakes import allocate_loss, call, fake_gradient


def active() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse(function: str, instead: str) -> None:
    """Raises where a function is called that knows no transform."""
    if not torch.compiler.is_compiling() and active():
        raise NotImplementedError(
            f"{function} works with neither torch.func nor forward-mode AD; compute the logits and use {instead}"
        )


class _Constants(tuple):
    """What is no tensor, as one argument: a list among the arguments would be taken apart by vmap."""


# A subclass of tuple is a leaf for torch's pytrees, which look a class up by its exact type.
_TENSORS = LossArguments._fields.index("blank")


def loss(arguments: LossArguments) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``ops.loss``: the loss, and what else the op returns."""
    arguments = arguments._replace(need_grad=True, inplace_grad=False)
    value, *saved = _Loss.apply(*arguments[:_TENSORS], _Constants(arguments[_TENSORS:]))
    return value, saved


class _Loss(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        *tensors, constants = arguments
        return call(ops.loss, allocate_loss, *tensors, *constants)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, constants = inputs
        arguments = LossArguments(*tensors, *constants)
        ctx.options, ctx.reduced = arguments.gradient_options, arguments.reduction != 0
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        return *_gradient(ctx, grad_loss), *(None,) * (_TENSORS - 1)  # the labels, and the constants

    @staticmethod
    def jvp(ctx, *tangents):
        """The gradient times the tangents: fastemit_lambda and clamp, which bend the gradient, bend this alike."""
        logits, _, *_, weights = ctx.saved_tensors
        one = weights.new_ones(() if ctx.reduced else (len(logits),))
        of_samples = sum(
            (grad.to(one.dtype) * tangent).sum((1, 2, 3))
            for grad, tangent in zip(_gradient(ctx, one), tangents)
            if tangent is not None
        )
        return of_samples.sum() if ctx.reduced else of_samples, *(None,) * 5


def _gradient(ctx, grad_loss):
    logits, duration_logits, *saved, weights = ctx.saved_tensors
    grad, grad_durations = _Gradient.apply(grad_loss, weights, logits, duration_logits, *saved, _Constants(ctx.options))
    return grad, None if duration_logits is None else grad_durations


class _Gradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        *tensors, options = arguments
        return call(ops.gradient, fake_gradient, *tensors, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(NO_DOUBLE_BACKWARD)
