"""torchaudio: ``functional.rnnt_loss`` and ``transforms.RNNTLoss`` on the kernels of this package.

Names, order, defaults and gradient scale are torchaudio's (read and run in 2.11): ``reduction="mean"`` is the mean over the
batch, a negative ``blank`` counts from the end, ``clamp`` bounds each sample's gradient before the reduction. Nothing is
patched; import one name instead of the other, and the other again to undo it.
"""

from __future__ import annotations

from torch import Tensor, nn

from .. import rnnt

__all__ = ["RNNTLoss", "rnnt_loss"]

_REDUCTIONS = {"none": "none", "mean": "mean_batch", "sum": "sum"}


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
) -> Tensor:
    r"""The RNN-T loss with the arguments of ``torchaudio.functional.rnnt_loss``.

    More is taken than by torchaudio: bfloat16 and float64, any strides, integers of any type on any device, and lengths that
    are all shorter than the tensor.

    Args:
        logits: (B, T, U+1, V); log-probabilities where ``fused_log_softmax`` is False.
        targets: (B, U).
        logit_lengths, target_lengths: (B,).
        blank: the blank's column; negative counts from the end.
        clamp: positive: bounds each entry of a sample's gradient, before the reduction.
        reduction: ``"mean"``, over the batch, ``"sum"`` or ``"none"``.
        fused_log_softmax: False for logits that went through ``log_softmax``. The loss is the same either way, and so is the
            gradient on the far side of the ``log_softmax``; that of the log-probabilities themselves differs from torchaudio's
            by a multiple of the probabilities, which ``log_softmax`` takes out. With a ``clamp`` it would not, so the two
            together are refused.

    Returns:
        A scalar, or (B,) for ``"none"``, in float32 (float64 for float64 logits).

    Raises:
        ValueError: the reduction is none of the three; a clamp with ``fused_log_softmax=False``; as :func:`rnnt_loss`.
        TypeError: as :func:`rnnt_loss`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.integrations.torchaudio.rnnt_loss(
        ...     torch.zeros(1, 2, 2, 4), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]))
        >>> round(loss.item(), 4)
        3.4657
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction should be one of "none", "mean", or "sum", got {reduction!r}')
    if clamp > 0 and not fused_log_softmax:
        raise ValueError(f"clamp={clamp} needs fused_log_softmax=True: pass the logits themselves")
    labelling = (targets, logit_lengths, target_lengths, blank)
    return rnnt.rnnt_loss(logits, *labelling, _REDUCTIONS[reduction], clamp=clamp)


class RNNTLoss(nn.Module):
    """:func:`rnnt_loss` as a module, with the constructor and forward of ``torchaudio.transforms.RNNTLoss``.

    Args:
        blank, clamp, reduction, fused_log_softmax: as in :func:`rnnt_loss`.

    Example:
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> transform = kernel.integrations.torchaudio.RNNTLoss(blank=0)
    """

    def __init__(
        self, blank: int = -1, clamp: float = -1.0, reduction: str = "mean", fused_log_softmax: bool = True
    ) -> None:
        super().__init__()
        self.blank, self.clamp = blank, clamp
        self.reduction, self.fused_log_softmax = reduction, fused_log_softmax

    def forward(self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """Shapes as in :func:`rnnt_loss`."""
        options = (self.blank, self.clamp, self.reduction, self.fused_log_softmax)
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, *options)
