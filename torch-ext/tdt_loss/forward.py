"""From checked arguments to the op and back: what all public losses share."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import autograd
from ._ops import ops
from .checks import Labels, Options, check_logits, check_vocab, check_writable, with_dense_rows

__all__ = ["Occupancy", "compute_joint_loss", "compute_loss"]


class Occupancy(NamedTuple):
    """The posterior probability of every arc of the lattice, given the labels: how likely it is part of the alignment.

    For TDT (B, T, U+1, D), one column for each duration; for RNN-T (B, T, U+1). float32, float64 for float64 logits;
    detached. The label arcs that leave a label position sum to 1. 0 in the padding and for samples without an
    alignment, NaN for samples with a NaN loss because of their logits.
    """

    blank: Tensor
    label: Tensor


def compute_loss(
    logits: Tensor,
    duration_logits: Optional[Tensor],
    labels: Labels,
    vocab: int,
    blank: int,
    durations: Sequence[int],
    options: Options,
    *,
    inplace_grad: bool = False,
    return_occupancy: bool = False,
    reduction: int,
) -> Union[Tensor, tuple[Tensor, Occupancy]]:
    """The loss of checked arguments; no durations: RNN-T."""
    need_grad = torch.is_grad_enabled() and (
        logits.requires_grad or (duration_logits is not None and duration_logits.requires_grad)
    )
    loss, (*saved, _) = autograd.loss(
        with_dense_rows(logits),
        None if duration_logits is None else with_dense_rows(duration_logits),
        labels.targets,
        labels.logit_lengths,
        labels.target_lengths,
        blank,
        durations,
        *options,
        need_grad or return_occupancy,
        inplace_grad and not torch.compiler.is_compiling(),
        reduction,
    )
    if not return_occupancy:
        return loss
    occupancy = autograd.call(ops.occupancy, autograd.fake_occupancy, *saved, *labels.tensors, durations, vocab)
    return loss, Occupancy(*occupancy)


def compute_joint_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Sequence[int],
    options: Options,
    *,
    inplace_grad: bool,
    return_occupancy: bool,
    reduction: int,
) -> Union[Tensor, tuple[Tensor, Occupancy]]:
    """The loss of one tensor of logits, tokens and then the durations, whose other arguments are checked."""
    check_logits("logits", logits)
    vocab = logits.shape[3] - len(durations)
    blank = check_vocab("logits", logits.shape[3], vocab, blank_token_id)
    labels = Labels(logits, vocab, targets, logit_lengths, target_lengths)
    if inplace_grad and not torch.compiler.is_compiling():
        check_writable(logits)
    return compute_loss(
        logits,
        None,
        labels,
        vocab,
        blank,
        durations,
        options,
        inplace_grad=inplace_grad,
        return_occupancy=return_occupancy,
        reduction=reduction,
    )
