"""From checked arguments to the op and back: what all public losses share."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import autograd, transforms
from ._ops import ops
from .arguments import LossArguments
from .checks import (
    Labels,
    Options,
    check_bool,
    check_logits,
    check_penalties,
    check_vocab,
    check_writable,
    with_dense_rows,
)
from .fakes import call, fake_occupancy

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
    check_bool("return_occupancy", return_occupancy)
    check_penalties(options, logits.shape[:3])
    need_grad = torch.is_grad_enabled() and (
        logits.requires_grad or (duration_logits is not None and duration_logits.requires_grad)
    )
    arguments = LossArguments(
        with_dense_rows(logits),
        None if duration_logits is None else with_dense_rows(duration_logits),
        *labels.tensors,
        blank,
        durations,
        *options,
        need_grad or return_occupancy,
        inplace_grad and can_write_in_place(),
        reduction,
    )
    transformed = not torch.compiler.is_compiling() and transforms.active()
    loss, saved = (transforms if transformed else autograd).loss(arguments)
    if not return_occupancy:
        return loss
    node_lp, _, ll, alpha_beta, _ = saved
    occupancy = call(ops.occupancy, fake_occupancy, node_lp, ll, alpha_beta, *labels.tensors, durations, vocab)
    return loss, Occupancy(*occupancy)


def can_write_in_place() -> bool:
    """Whether a gradient may be written over the logits. torch.compile plans memory itself. Under saved-tensor hooks torch does
    not see that saved logits have changed, so neither a second backward nor another op that saved them would hear of it."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


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
    labels = Labels(logits.shape[:3], logits.device, vocab, targets, logit_lengths, target_lengths)
    check_bool("inplace_grad", inplace_grad)
    if inplace_grad and can_write_in_place():
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
