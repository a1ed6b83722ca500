"""The fused loss as torch sees it: one function with a derivative, in eager mode and, as ops of its own, under torch.compile."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .autograd import NO_DOUBLE_BACKWARD
from .checks import holds_values
from .fakes import accumulate_dtype, fake_lattice, fake_reduce, record_size
from .fused_passes import Forward, fused_backward, fused_forward
from .tiles import Inputs, Problem


@dataclass
class FusedStats:
    """What a fused loss has done, filled in as it happens.

    Attributes:
        valid_rows: the nodes of the batch, padding not counted.
        forward_rows: those of them whose logits forward has computed in full; fewer than all with a ``tolerance``.
        live_rows: those whose logits backward has computed; None before backward.
        gap: (B,) nats, float64, on the device of the loss: the loss of each sample without reduction is at least that of all
            rows, rounding aside, and at most this above it. It is guaranteed, not estimated, and at most the ``tolerance``.
        dropped_mass: what the gradient lacks at most, a tensor () on the device of the loss; None before backward. The
            absolute gradients of the losses with respect to the token logits of all left-out nodes add up to no more than
            this, and so do those with respect to their duration logits (before clamp, reduction and upstream gradient).
            Left out are the nodes that forward has not computed and, in backward, those of least occupancy.
    """

    valid_rows: Optional[int] = None
    forward_rows: Optional[int] = None
    live_rows: Optional[int] = None
    gap: Optional[Tensor] = None
    dropped_mass: Optional[Tensor] = None

    def of_forward(self, forward: Forward) -> None:
        self.valid_rows, self.forward_rows, self.gap = forward.valid_rows, forward.forward_rows, forward.gap


def compute_loss(inputs: Inputs, problem: Problem) -> tuple[Tensor, FusedStats]:
    """The loss of checked arguments."""
    need_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.operands)
    if torch.compiler.is_compiling() or not all(map(holds_values, inputs.labels)) or not holds_values(inputs.encoder):
        return ops.fused_loss(*inputs, *problem, need_grad)[0], FusedStats()  # knows the shapes of what holds no values
    stats = FusedStats()
    if need_grad:
        return _FusedLoss.apply(problem, stats, *inputs), stats
    forward = fused_forward(inputs, problem, need_grad=False)
    stats.of_forward(forward)
    return forward.outputs[0], stats


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem, stats, *inputs):
        forward = fused_forward(Inputs(*inputs), problem, need_grad=True)
        stats.of_forward(forward)
        ctx.problem, ctx.stats = problem, stats
        loss, *saved = forward.outputs
        ctx.save_for_backward(*_kept(inputs), *saved, forward.dropped)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        tensors = ctx.saved_tensors  # once: torch.utils.checkpoint computes them for that
        inputs, (*saved, weights, dropped) = Inputs(*tensors[:_INPUTS]), tensors[_INPUTS:]
        wanted = ctx.needs_input_grad[2:6]
        grads, ctx.stats.live_rows, ctx.stats.dropped_mass = fused_backward(
            grad_loss, inputs, ctx.problem, saved, weights, dropped, wanted
        )
        if torch.is_grad_enabled():
            grads = _NoSecondDerivative.apply(len(grads), *grads, grad_loss, *inputs.operands)
        return (None, None, *grads, *[None] * (_INPUTS - 4))


def _kept(inputs) -> Inputs:
    """What backward needs: not the caller's own lengths, which may be other numbers by then."""
    inputs = Inputs(*inputs)
    return inputs._replace(given_logit_lengths=inputs.logit_lengths, given_target_lengths=inputs.target_lengths)


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are, with a clear error for who asks for theirs."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tensors[:count]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_DOUBLE_BACKWARD)


_INPUTS = len(Inputs._fields)
_PROBLEM = len(Problem._fields)

# The same as ops, which torch.compile and torch.export take as they are. They are slower to call than the functions.

_TENSORS = (
    "Tensor encoder, Tensor decoder, Tensor weight, Tensor? bias, Tensor targets, Tensor logit_lengths, "
    "Tensor target_lengths, Tensor given_logit_lengths, Tensor given_target_lengths, Tensor? seed"
)
_SCALARS = (
    "int blank, int vocab, int[] durations, float sigma, float delay_penalty, float omega, float fastemit_lambda, "
    "float clamp, bool zero_infinity, int reduction, int activation, float dropout, int max_tile_bytes, "
    "float occupancy_threshold, float tolerance, ScalarType dtype"
)
_SAVED = "Tensor node_lp, Tensor row_max, Tensor ll, Tensor alpha_beta, Tensor weights, Tensor dropped"
# Both wait for numbers of rows, so the CUDA graphs of torch.compile must leave them out. Older versions of torch lack the tag.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []


@torch.library.custom_op(
    add_op_namespace_prefix("fused_loss"),
    mutates_args=(),
    tags=_TAGS,
    schema=f"({_TENSORS}, {_SCALARS}, bool need_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _fused_loss(*args):
    forward = fused_forward(Inputs(*args[:_INPUTS]), Problem(*args[_INPUTS:-1]), args[-1])
    return *forward.outputs, forward.dropped


@_fused_loss.register_fake
def _(*args):
    inputs, p, need_grad = Inputs(*args[:_INPUTS]), Problem(*args[_INPUTS:-1]), args[-1]
    shape = (*inputs.encoder.shape[:2], inputs.decoder.shape[1])
    like = inputs.encoder.new_empty((), dtype=p.dtype)
    node_lp = like.new_empty((*shape, record_size(len(p.durations))), dtype=accumulate_dtype(p.dtype))
    row_max = node_lp.new_empty(shape)
    ll, alpha_beta = fake_lattice(node_lp, *inputs.labels, p.durations, p.vocab, p.omega, need_grad)
    loss, weights = fake_reduce(ll, inputs.target_lengths, like, p.omega, p.zero_infinity, p.reduction)
    return loss, node_lp, row_max, ll, alpha_beta, weights, ll.new_empty((ll.shape[1],))


def _setup(ctx, inputs, output) -> None:
    ctx.problem = inputs[_INPUTS:-1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*_kept(inputs[:_INPUTS]), *output[1:])


def _backward(ctx, grad_loss, *_):
    nothing = [None] * (_INPUTS - 4 + _PROBLEM + 1)
    if grad_loss is None:
        return (None, None, None, None, *nothing)
    wanted = list(ctx.needs_input_grad[:4])
    grads = ops.fused_gradient(grad_loss, *ctx.saved_tensors, *ctx.problem, wanted)
    return (*(grad if want else None for grad, want in zip(grads, wanted)), *nothing)


_fused_loss.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(
    add_op_namespace_prefix("fused_gradient"),
    mutates_args=(),
    tags=_TAGS,
    schema=f"(Tensor grad_loss, {_TENSORS}, {_SAVED}, {_SCALARS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fused_gradient(grad_loss, *args):
    """The gradients of the operands; those that are not wanted are (0,)."""
    inputs, problem, wanted = Inputs(*args[:_INPUTS]), Problem(*args[-_PROBLEM - 1 : -1]), args[-1]
    *saved, weights, dropped = args[_INPUTS : -_PROBLEM - 1]
    grads = fused_backward(grad_loss, inputs, problem, saved, weights, dropped, wanted).grads
    return tuple(inputs.encoder.new_empty((0,)) if grad is None else grad for grad in grads)


@_fused_gradient.register_fake
def _(grad_loss, *args):
    operands = Inputs(*args[:_INPUTS]).operands
    return tuple(x.new_empty(x.shape) if want else operands[0].new_empty((0,)) for x, want in zip(operands, args[-1]))


def _refuse(ctx, *grads):
    raise RuntimeError(NO_DOUBLE_BACKWARD)


_fused_gradient.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
