"""The losses as layers, for the ``kernels`` layer mapping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .loss import tdt_loss, tdt_loss_joint
from .rnnt import rnnt_loss

__all__ = ["RNNTLoss", "TDTLoss"]


class TDTLoss(nn.Module):
    """:func:`tdt_loss` as a stateless layer with the forward signature of transformers' ``tdt_loss``.

    Where ``token_logits`` and ``duration_logits`` are the two adjoining slices of one joint tensor, as in
    ``ParakeetForTDT``, the gradient goes to the joint tensor in one piece: the backward of two slices would zero-fill,
    copy and add tensors of its size. The slices themselves then have no gradient, so this is done only where neither
    has a hook or ``retain_grad``; call :func:`tdt_loss` to differentiate with respect to a slice.
    """

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self,
        token_logits: Tensor,
        duration_logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        blank_token_id: int,
        durations: Sequence[int] | Tensor,
        sigma: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        rest = (targets, logit_lengths, target_lengths, blank_token_id, durations, sigma, reduction)
        joint = None if torch.compiler.is_compiling() else _joint_of(token_logits, duration_logits)
        if joint is not None and len(durations) == duration_logits.shape[3]:
            return tdt_loss_joint(joint, *rest)
        return tdt_loss(token_logits, duration_logits, *rest)


class RNNTLoss(nn.Module):
    """:func:`rnnt_loss` as a stateless layer with the forward signature of transformers' ``rnnt_loss``."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        blank_token_id: int,
        reduction: str = "mean_volume",
    ) -> Tensor:
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, blank_token_id, reduction)


def _joint_of(token_logits: Tensor, duration_logits: Tensor) -> Tensor | None:
    """The joint tensor whose two column ranges these are, if its gradient can stand for theirs."""
    joint = getattr(token_logits, "_base", None)
    if joint is None or getattr(duration_logits, "_base", None) is not joint:
        return None
    if joint.dim() != 4 or token_logits.dim() != 4 or duration_logits.dim() != 4:
        return None
    V = token_logits.shape[3]
    adjoin = (
        joint.shape == (*token_logits.shape[:3], V + duration_logits.shape[3])
        and duration_logits.shape[:3] == token_logits.shape[:3]
        and joint.stride() == token_logits.stride() == duration_logits.stride()
        and token_logits.storage_offset() == joint.storage_offset()
        and duration_logits.storage_offset() == joint.storage_offset() + V * joint.stride(3)
    )
    return joint if adjoin and all(_is_plain_slice(x, joint) for x in (token_logits, duration_logits)) else None


def _is_plain_slice(view: Tensor, joint: Tensor) -> bool:
    """Whether `view` was cut from `joint` as it is now, and nobody watches its gradient."""
    node = view.grad_fn
    if node is None or view.retains_grad or view._backward_hooks:
        return False
    if node.name() != "SliceBackward0":
        return False
    source = node.next_functions[0][0]
    return source is joint.grad_fn if joint.grad_fn is not None else getattr(source, "variable", None) is joint
