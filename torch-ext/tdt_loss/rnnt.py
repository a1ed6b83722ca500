"""The RNN-T loss, on the same kernels: one blank arc of one frame, one label arc of none, no durations."""

from typing import Union

from torch import Tensor

from .checks import Options, check_reduction
from .forward import Occupancy, compute_joint_loss
from .report import report

__all__ = ["rnnt_loss"]


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean_volume",
    *,
    sigma: float = 0.0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    return_occupancy: bool = False,
    inplace_grad: bool = False,
) -> Union[Tensor, tuple[Tensor, Occupancy]]:
    r"""RNN-T (recurrent neural network transducer) loss, https://arxiv.org/abs/1211.3711.

    The negative logarithm of the summed probability of every alignment of the labels to the frames. At frame t, after u
    labels, the model emits a token v with probability ``softmax(logits[b, t, u])[v]``; a label moves to (t, u + 1), a
    blank to (t + 1, u), and the blank at (T - 1, U) ends.

    Logits of any dtype and strides are read as they are, without a copy in float32; padding is never read and its
    gradient is 0.

    Args:
        logits: (B, T, U+1, V) unnormalised scores of the tokens, blank included; float32, float16, bfloat16 or float64.
        targets: (B, U) labels in [0, V), of any integer dtype, on any device; columns beyond U and labels beyond
            ``target_lengths`` are ignored.
        logit_lengths: (B,) frames of each sample, in [0, T]; any integer dtype, any device.
        target_lengths: (B,) labels of each sample, in [0, U]; any integer dtype, any device.
        blank_token_id: the blank's column, in [-V, V); negative counts from the end.
        reduction: ``"mean_volume"``: the sum over the sum of target lengths; ``"mean"``: each loss over its target length,
            then the batch mean; ``"mean_batch"``: the batch mean; ``"sum"``; ``"none"``. In the divisions a target length
            counts as at least 1.
        sigma: logit under-normalisation in nats, subtracted from every token log-probability; at most 1e4 in size.
        delay_penalty: ``delay_penalty * ((T - 1) / 2 - t)`` nats are added to the label log-probabilities at frame t of a
            sample with T frames: positive favours early labels (https://arxiv.org/abs/2211.00490). At most 1e4 either way.
        fastemit_lambda: in [0, 1e4]; scales the gradient through every label arc by ``1 + fastemit_lambda``, so that labels
            come early (FastEmit, https://arxiv.org/abs/2010.11148). The returned loss does not change.
        clamp: positive: each entry of a sample's gradient is held within [-clamp, clamp], before the upstream gradient and
            the reduction multiply. 0 or negative: off.
        zero_infinity: a sample without any alignment (no frames) has loss +inf and gradient 0; this makes its loss 0.
        return_occupancy: return the posterior probability of every arc as well.
        inplace_grad: write the gradient over the logits' storage in backward, see :func:`tdt_loss_joint`.

    Returns:
        The loss in float32 (float64 for float64 logits): a scalar, or (B,) for ``"none"``; with ``return_occupancy`` the
        pair (loss, :class:`Occupancy`). NaN as for :func:`tdt_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tdt_loss` and :func:`tdt_loss_joint`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> logits = torch.zeros(1, 2, 2, 4, requires_grad=True)  # B, T, U+1, V
        >>> loss = kernel.rnnt_loss(logits, torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]), blank_token_id=3)
        >>> round(loss.item(), 4)  # two alignments of three arcs of probability 1/4
        3.4657
        >>> loss.backward()
    """
    report("rnnt_loss", logits)
    return compute_joint_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank_token_id,
        [],
        Options.checked(
            sigma=sigma,
            delay_penalty=delay_penalty,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        inplace_grad=inplace_grad,
        return_occupancy=return_occupancy,
        reduction=check_reduction(reduction),
    )
