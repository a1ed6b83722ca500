"""The TDT loss of two slices of one joint tensor, with one gradient for both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .loss import tdt_loss, tdt_loss_joint

# Between the output of a linear layer and a slice of it, as ParakeetForTDT cuts it: the product's rows, seen as (B, T, U+1, V + D),
# `squeeze(2)` that squeezes nothing, the slice. Another view only means that the two gradients stay apart.
_VIEWS = ("SliceBackward0", "SqueezeBackward1", "ViewBackward0")


def tdt_loss_of_slices(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Sequence[int] | Tensor,
    *args,
    **options,
) -> Tensor:
    """:func:`tdt_loss`; where the logits are the two adjoining slices of one tensor, :func:`tdt_loss_joint` of that."""
    labelling = (targets, logit_lengths, target_lengths, blank_token_id, durations)
    joint = None if torch.compiler.is_compiling() else _joint_of(token_logits, duration_logits)
    if joint is not None and len(durations) == duration_logits.shape[3]:
        return tdt_loss_joint(joint, *labelling, *args, **options)
    return tdt_loss(token_logits, duration_logits, *labelling, *args, **options)


def _joint_of(token_logits: Tensor, duration_logits: Tensor) -> Tensor | None:
    """The joint tensor whose two column ranges these are, if its gradient can stand for theirs."""
    base = getattr(token_logits, "_base", None)
    if base is None or getattr(duration_logits, "_base", None) is not base:
        return None
    if token_logits.dim() != 4 or duration_logits.dim() != 4:
        return None
    if not all(_is_plain_slice(x, base) for x in (token_logits, duration_logits)):
        return None
    V = token_logits.shape[3]
    shape = (*token_logits.shape[:3], V + duration_logits.shape[3])
    if base.shape == shape:
        joint = base
    elif base.is_contiguous() and base.numel() == math.prod(shape):
        joint = base.view(shape)
    else:
        return None
    adjoin = (
        duration_logits.shape[:3] == shape[:3]
        and joint.stride() == token_logits.stride() == duration_logits.stride()
        and token_logits.storage_offset() == joint.storage_offset()
        and duration_logits.storage_offset() == joint.storage_offset() + V * joint.stride(3)
    )
    return joint if adjoin else None


def _is_plain_slice(view: Tensor, base: Tensor) -> bool:
    """Whether `view` was cut from `base` as it is now, by views alone, and nobody watches its gradient."""
    node = view.grad_fn
    if node is None or view.retains_grad or view._backward_hooks:
        return False
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
        if node is base.grad_fn if base.grad_fn is not None else getattr(node, "variable", None) is base:
            return True
    return False
