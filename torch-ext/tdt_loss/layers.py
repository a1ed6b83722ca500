"""The losses as layers, for the ``kernels`` layer mapping."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .loss import tdt_loss
from .rnnt import rnnt_loss

__all__ = ["RNNTLoss", "TDTLoss"]


class TDTLoss(nn.Module):
    """:func:`tdt_loss` as a stateless layer with the forward signature of transformers' ``tdt_loss``.

    Like the function, it computes one gradient for the two adjoining slices of a joint tensor, as ``ParakeetForTDT`` cuts
    them, and autograd takes it through the model's own graph, hooks and all.
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
        return tdt_loss(token_logits, duration_logits, *labelling, sigma, reduction)


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
