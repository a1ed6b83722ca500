"""Calls of the dense losses, forward and backward, as a user or an op's caller makes them."""

from dataclasses import dataclass

import pytest
import torch


@dataclass
class Outcome:
    losses: torch.Tensor  # (B,), or () when reduced
    grad_tokens: torch.Tensor  # (B, max_T, max_U1, V)
    grad_durations: torch.Tensor  # (B, max_T, max_U1, D)
    occupancy: tuple | None = None  # (blank, label), where it was asked for


def call(kernel, batch, logits, reduction="none", **options):
    """One call on one tensor (RNN-T or joint, as the batch has it) or on two, with the batch's own options beside the given ones."""
    options = {**batch.options, **options}
    if len(logits) == 2:
        return kernel.tdt_loss(*logits, *batch.rest, reduction, **options)
    if batch.durations:
        return kernel.tdt_loss_joint(*logits, *batch.rest, reduction, **options)
    return kernel.rnnt_loss(*logits, *batch.rnnt_args[1:], reduction, sigma=batch.sigma, **options)


def loss_and_grads(kernel, batch, api="separate", *, upstream=None, reduction="none", **options):
    """Runs forward and backward as a user would, on leaf tensors with the strides of the batch's own. `api` does not matter to RNN-T."""
    V = batch.token_logits.shape[-1]
    one = batch.joint if batch.durations else batch.token_logits
    two = (batch.token_logits, batch.duration_logits)
    logits = [x.detach().requires_grad_() for x in (two if batch.durations and api == "separate" else (one,))]
    losses, occupancy = call(kernel, batch, logits, reduction, **options), None
    if options.get("return_occupancy"):
        losses, occupancy = losses
    losses.backward(torch.ones_like(losses) if upstream is None else upstream)
    grads = [x.grad for x in logits]
    return Outcome(losses.detach(), *(grads if len(grads) == 2 else (grads[0][..., :V], grads[0][..., V:])), occupancy)


def through_the_ops(kernel, batch, api="separate", zero_infinity=False):
    """Forward and backward without the host checks, so that malformed values reach the kernels on every device."""
    ops, V = kernel.loss.ops, batch.token_logits.shape[-1]
    losses, *saved, weights = ops.loss(*batch.loss_op_args(api, zero_infinity=zero_infinity))
    grad, grad_durations = ops.gradient(*batch.gradient_op_args(api, torch.ones_like(losses), weights, *saved))
    if grad.shape[-1] > V or not batch.durations:
        grad, grad_durations = grad[..., :V], grad[..., V:]
    return Outcome(losses, grad, grad_durations)


def reduced(reduction, losses, target_lengths):
    """The reductions as they are documented."""
    return {
        "none": losses,
        "sum": losses.sum(),
        "mean": (losses / target_lengths.clamp(min=1)).mean(),
        "mean_batch": losses.mean(),
        "mean_volume": losses.sum() / target_lengths.sum().clamp(min=1),
    }[reduction]


def transformers_rnnt_loss():
    """rnnt_loss of the installed transformers; skips where it or torchaudio, which it calls, cannot be loaded."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"needs torchaudio: {error}")
    return pytest.importorskip("transformers.loss.loss_rnnt").rnnt_loss
