"""The loss as a layer, for the ``kernels`` layer mapping."""

from collections.abc import Sequence
from typing import Union

from torch import Tensor, nn

from .loss import tdt_loss

__all__ = ["TDTLoss"]


class TDTLoss(nn.Module):
    """:func:`tdt_loss` as a stateless layer with the forward signature of transformers' ``tdt_loss``."""

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
        durations: Union[Sequence[int], Tensor],
        sigma: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        return tdt_loss(
            token_logits,
            duration_logits,
            targets,
            logit_lengths,
            target_lengths,
            blank_token_id,
            durations,
            sigma,
            reduction,
        )
