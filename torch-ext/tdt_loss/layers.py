"""The losses as layers, for the ``kernels`` layer mapping."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .rnnt import rnnt_loss
from .slices import tdt_loss_of_slices

__all__ = ["RNNTLoss", "TDTLoss"]


class TDTLoss(nn.Module):
    """:func:`tdt_loss` as a stateless layer with the forward signature of transformers' ``tdt_loss``.

    Where ``token_logits`` and ``duration_logits`` are the two adjoining slices of one joint tensor, as in
    ``ParakeetForTDT``, the gradient goes to the joint tensor in one piece: the backward of two slices would zero-fill,
    copy and add tensors of its size. The slices themselves, and any view of the joint network's output that they were cut
    from, then have no gradient, so this is done only where neither slice has a hook or ``retain_grad``; call
    :func:`tdt_loss` to differentiate with respect to one.
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
        labelling = (targets, logit_lengths, target_lengths, blank_token_id, durations)
        return tdt_loss_of_slices(token_logits, duration_logits, *labelling, sigma, reduction)


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
