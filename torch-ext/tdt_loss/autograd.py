"""What torch must know about the ops beside their kernels: output shapes for tracing, and derivatives."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

# Shapes of the ops' outputs, for torch.compile and torch.export.


def _accumulate_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def record_size(num_durations: int) -> int:
    return (3 + num_durations + 3) // 4 * 4


def fake_log_probs(
    logits, duration_logits, targets, logit_lengths, target_lengths, blank, num_durations, sigma, delay_penalty
):
    return logits.new_empty((*logits.shape[:3], record_size(num_durations)), dtype=_accumulate_dtype(logits))


def fake_lattice(node_lp, targets, logit_lengths, target_lengths, durations, vocab, omega, need_grad):
    batch, max_t, max_u1 = node_lp.shape[:3]
    lattices = 2 if omega > 0 and durations else 1
    ll = node_lp.new_empty((lattices, batch), dtype=torch.float64)
    alpha_beta = node_lp.new_empty((lattices, 2, batch, max_t, max_u1) if need_grad else (0,), dtype=torch.float64)
    return ll, alpha_beta


def fake_reduce(ll, target_lengths, like, omega, zero_infinity, reduction):
    batch, dtype = ll.shape[1], _accumulate_dtype(like)
    return ll.new_empty(() if reduction else (batch,), dtype=dtype), ll.new_empty(
        (batch if reduction else 0,), dtype=dtype
    )


def _fake_loss(
    logits,
    duration_logits,
    targets,
    logit_lengths,
    target_lengths,
    blank,
    durations,
    sigma,
    delay_penalty,
    omega,
    fastemit_lambda,
    clamp,
    zero_infinity,
    need_grad,
    inplace_grad,
    reduction,
):
    labels = (targets, logit_lengths, target_lengths)
    node_lp = fake_log_probs(logits, duration_logits, *labels, blank, len(durations), sigma, delay_penalty)
    ll, alpha_beta = fake_lattice(node_lp, *labels, durations, None, omega, need_grad)
    loss, weights = fake_reduce(ll, target_lengths, logits, omega, zero_infinity, reduction)
    return loss, node_lp, ll, alpha_beta, weights


def _gradient_like(logits):
    grad = torch.empty_like(logits)
    return grad if grad.stride(3) == 1 or grad.shape[3] == 1 else logits.new_empty(logits.shape)


def _fake_gradient(grad_loss, weights, logits, duration_logits, *rest):
    grad_durations = logits.new_empty((0,)) if duration_logits is None else _gradient_like(duration_logits)
    return _gradient_like(logits), grad_durations


def fake_occupancy(node_lp, ll, alpha_beta, targets, logit_lengths, target_lengths, durations, vocab):
    shape = (*node_lp.shape[:3], len(durations)) if durations else node_lp.shape[:3]
    return node_lp.new_empty(shape), node_lp.new_empty(shape)


def fake_node_occupancy(node_lp, *rest):
    return node_lp.new_empty(node_lp.shape[:3])


def _fake_in_place(*args):
    return None


for _name, _fake in {
    "loss": _fake_loss,
    "log_probs": fake_log_probs,
    "log_probs_tile_": _fake_in_place,
    "lattice": fake_lattice,
    "reduce": fake_reduce,
    "gradient": _fake_gradient,
    "gradient_": _fake_in_place,
    "gradient_tile_": _fake_in_place,
    "occupancy": fake_occupancy,
    "node_occupancy": fake_node_occupancy,
    "joint_hidden_": _fake_in_place,
    "joint_hidden_backward_": _fake_in_place,
}.items():
    torch.library.register_fake(add_op_namespace_prefix(_name))(_fake)

# Memory. An exception inside an op reaches Python through the stable ABI as a RuntimeError without its type and its words,
# and an allocation is the only call of torch there that can fail.


def call(op, room, *args):
    """``op(*args)``; where it gets no memory, with torch's own error: on a GPU torch.OutOfMemoryError. ``room`` of the same
    arguments allocates as much as the op does: the op's fake, called with real tensors."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        if "API call failed" in str(error):
            try:
                room(*args)  # from here, where an error keeps its type
            except RuntimeError as own:
                raise own from None
        raise


def _lattice_work(*args):
    """What a lattice works in: no more than another alpha and beta."""
    return fake_lattice(*args, True)[1]


def room_of_lattice(*args):
    return fake_lattice(*args), _lattice_work(*args[:-1])


def _room_of_loss(*args):
    outputs = _fake_loss(*args)
    return outputs, _lattice_work(outputs[1], *args[2:5], args[_DURATIONS], None, args[_OMEGA])


# Autograd: the derivative of `loss` is `gradient`, and `gradient` has none.

# Places among the arguments of `loss`, and how many there are beside the two tensors of logits.
_BLANK, _DURATIONS, _OMEGA, _FASTEMIT, _CLAMP, _NEED_GRAD, _INPLACE_GRAD = 5, 6, 9, 10, 11, 13, 14
_OTHERS = 14


def _setup_loss(ctx, inputs, output) -> None:
    ctx.options = (inputs[_BLANK], inputs[_DURATIONS], inputs[_OMEGA], inputs[_FASTEMIT], inputs[_CLAMP])
    ctx.inplace_grad = inputs[_INPLACE_GRAD]
    ctx.set_materialize_grads(False)
    if inputs[_NEED_GRAD]:
        ctx.save_for_backward(*inputs[:5], *output[1:])


def _gradients(ctx, grad_loss) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Of logits and duration logits."""
    if grad_loss is None:
        return None, None
    logits, duration_logits, *saved, weights = ctx.saved_tensors
    if ctx.inplace_grad:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        grad_logits = logits.detach()
        ops.gradient_(grad_loss, weights, grad_logits, *saved, *ctx.options)
        torch.autograd.graph.increment_version(logits)
        return grad_logits, None
    arguments = (grad_loss, weights, logits, duration_logits, *saved, *ctx.options)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        grads = call(ops.gradient, _fake_gradient, *arguments)  # refuses to be differentiated
    else:
        with torch._C._AutoDispatchBelowAutograd():
            grads = call(ops.gradient, _fake_gradient, *arguments)
    wanted = ctx.needs_input_grad
    return grads[0] if wanted[0] else None, grads[1] if wanted[1] else None


NO_DOUBLE_BACKWARD = (
    "double backward through a transducer loss is not supported: its gradient has no derivative of its own"
)


def _setup_gradient(ctx, inputs, output) -> None:
    pass


def _backward_gradient(ctx, *grads):
    raise RuntimeError(NO_DOUBLE_BACKWARD)


class LossFunction(torch.autograd.Function):
    """``ops.loss`` with the derivative that is registered for it, for eager mode: the wrapper that torch.library generates
    does the same and takes longer than the kernels do on a small batch. What is no tensor passes through: autograd looks at
    every tensor that goes in or comes out, and at nothing within a tuple."""

    @staticmethod
    def forward(ctx, logits, duration_logits, others):
        arguments = (logits, duration_logits, *others)
        with torch._C._AutoDispatchBelowAutograd():  # straight to the kernel
            output = call(ops.loss, _room_of_loss, *arguments)
        _setup_loss(ctx, arguments, output)
        return output[0], output[1:]

    @staticmethod
    def backward(ctx, grad_loss, _):
        return *_gradients(ctx, grad_loss), None


def loss(*args):
    """``ops.loss`` by the quickest way that differentiates it: the loss, and the tuple of what the gradient needs."""
    if not args[_NEED_GRAD] or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        value, *saved = call(ops.loss, _room_of_loss, *args)
        return value, saved
    # What `apply` does beside is for functorch, which is not active.
    return super(torch.autograd.Function, LossFunction).apply(*args[:-_OTHERS], args[-_OTHERS:])


def _setup_registered_loss(ctx, inputs, output) -> None:
    _setup_loss(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _backward_registered_loss(ctx, grad_loss, *_):
    return *_gradients(ctx, grad_loss), *(None,) * _OTHERS


torch.library.register_autograd(
    add_op_namespace_prefix("loss"), _backward_registered_loss, setup_context=_setup_registered_loss
)
torch.library.register_autograd(add_op_namespace_prefix("gradient"), _backward_gradient, setup_context=_setup_gradient)
