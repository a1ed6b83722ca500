"""SpeechBrain: ``nnet.losses.transducer_loss`` on the kernels of this package.

Lengths are fractions of the padded size, as everywhere in SpeechBrain. Its loss (read in 1.1.2) has a value that is not the
one it differentiates: the value divides each sample's loss by its frames, the gradient is that of the undivided losses, and
``"mean"`` divides only the value. Training continues as it was tuned only with the same gradient, so both are kept. Nothing is
patched; a recipe names this function instead of SpeechBrain's, and SpeechBrain's again to undo it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rnnt import rnnt_loss

__all__ = ["transducer_loss"]


def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    input_lens: Tensor,
    target_lens: Tensor,
    blank_index: int,
    reduction: str = "mean",
) -> Tensor:
    r"""The RNN-T loss with the arguments, the value and the gradient of ``speechbrain.nnet.losses.transducer_loss``.

    With n_b the negative log-likelihood of a sample and T_b its frames, the value is the mean or the sum of n_b / T_b, or all of
    them; the gradient is that of the sum of n_b, for ``"mean"`` too. It runs on the CPU as well, and without numba.

    Args:
        logits: (B, T, U+1, V).
        targets: (B, U).
        input_lens: (B,) fractions of T in [0, 1].
        target_lens: (B,) fractions of U in [0, 1].
        blank_index: the blank's column.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or (B,) for ``"none"``, in float32 (float64 for float64 logits).

    Raises:
        ValueError: the reduction is none of the three; as :func:`rnnt_loss`.
        TypeError: as :func:`rnnt_loss`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.integrations.speechbrain.transducer_loss(
        ...     torch.zeros(1, 2, 2, 4), torch.tensor([[1]]), torch.tensor([1.0]), torch.tensor([1.0]), blank_index=0)
        >>> round(loss.item(), 4)  # 3.4657 over two frames
        1.7329
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    frames = (input_lens * logits.shape[1]).round().int()
    labels = (target_lens * targets.shape[1]).round().int()
    losses = rnnt_loss(logits, targets, frames, labels, blank_index, "none")
    values = losses.detach() / frames.to(losses.device).clamp(min=1)
    if reduction == "none":
        return _Value.apply(losses, values)
    return _Value.apply(losses.sum(), values.mean() if reduction == "mean" else values.sum())


class _Value(torch.autograd.Function):
    """Another value with the gradient of a loss."""

    @staticmethod
    def forward(ctx, loss, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None
