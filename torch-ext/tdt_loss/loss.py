"""The TDT loss as functions."""

from collections.abc import Sequence
from typing import Union

from torch import Tensor

from ._ops import ops  # noqa: F401  the ops themselves, for tests and benchmarks
from .checks import (
    Labels,
    Options,
    check_duration_logits,
    check_durations,
    check_logits,
    check_reduction,
    check_vocab,
)
from .forward import Occupancy, compute_joint_loss, compute_loss
from .report import report

__all__ = ["tdt_loss", "tdt_loss_joint"]


def tdt_loss(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Union[Sequence[int], Tensor],
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    delay_penalty: float = 0.0,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    return_occupancy: bool = False,
) -> Union[Tensor, tuple[Tensor, Occupancy]]:
    r"""Token-and-Duration Transducer loss, https://arxiv.org/abs/2304.06795.

    The negative logarithm of the summed probability of every alignment of the labels to the frames. At frame t, after u
    labels, the model emits a token v and a duration d with probability
    ``softmax(token_logits[b, t, u])[v] * exp(-sigma) * softmax(duration_logits[b, t, u])[d]``; a label moves to
    (t + d, u + 1), a blank (d > 0 only) to (t + d, u), and the last blank leaves the lattice at t + d = T exactly.

    Any strides over B, T and U are read as they are; only logits whose last dimension is not contiguous are copied. Two
    adjoining slices of one tensor get one gradient, as with :func:`tdt_loss_joint`, which autograd takes through the
    caller's own graph.
    Padding (frames from ``logit_lengths`` on, positions beyond ``target_lengths``) is never read and its gradient is 0.

    Args:
        token_logits: (B, T, U+1, V) unnormalised scores of the tokens, blank included; float32, float16, bfloat16 or float64.
        duration_logits: (B, T, U+1, D) unnormalised scores of the durations; dtype and device of ``token_logits``.
        targets: (B, U) labels in [0, V), of any integer dtype, on any device; columns beyond U and labels beyond
            ``target_lengths`` are ignored.
        logit_lengths: (B,) frames of each sample, in [0, T]; any integer dtype, any device.
        target_lengths: (B,) labels of each sample, in [0, U]; any integer dtype, any device.
        blank_token_id: the blank's column, in [-V, V); negative counts from the end.
        durations: the D durations in frames, in the order of the columns: non-negative, at least one positive, at most 64.
        sigma: logit under-normalisation in nats, subtracted from every token log-probability; at most 1e4 in size, and with
            ``delay_penalty`` at most 1.8e8 nats over a path of T + U arcs.
        reduction: ``"mean"``: each loss over its target length, then the batch mean; ``"mean_batch"``: the batch mean;
            ``"mean_volume"``: the sum over the sum of target lengths; ``"sum"``; ``"none"``. In the divisions a target length
            counts as at least 1, where transformers' ``tdt_loss`` divides an empty transcript by 0, and that of a malformed
            sample not at all.
        delay_penalty: ``delay_penalty * ((T - 1) / 2 - t)`` nats are added to the label log-probabilities at frame t of a
            sample with T frames: positive favours early labels (https://arxiv.org/abs/2211.00490). At most 1e4 either way.
        omega: in [0, 1], the weight of the RNN-T loss of the same token logits: ``(1 - omega) * TDT + omega * RNN-T``, with
            ``sigma`` in both. NeMo draws one of the two for each batch, RNN-T with probability omega; this is the
            expectation of that draw, with less variance.
        fastemit_lambda: in [0, 1e4]; scales the gradient through every label arc by ``1 + fastemit_lambda``, in token and
            duration logits, so that labels come early (FastEmit, https://arxiv.org/abs/2010.11148). The returned loss
            does not change. NeMo also scales the cost that it reports, and leaves the gradient of the durations as it is.
        clamp: positive: each entry of a sample's gradient is held within [-clamp, clamp], before the upstream gradient and
            the reduction multiply, so that loss scaling does not change what it means. 0 or negative: off.
        zero_infinity: a sample without any alignment (too few frames) has loss +inf and gradient 0; this makes its loss 0.
            With 0 < omega, a sample needs an alignment in both lattices.
        return_occupancy: return the posterior probabilities of the TDT arcs as well.

    Returns:
        The loss in float32 (float64 for float64 logits): a scalar, or (B,) for ``"none"``; with ``return_occupancy`` the
        pair (loss, :class:`Occupancy`). A log-probability below -2.9e6 nats
        and a path below -1.9e8 count as impossible. NaN for a sample with NaN or +inf
        logits at a valid node (its gradient is NaN there too), and for one with malformed lengths or labels on a GPU (its
        gradient is 0).

    Raises:
        TypeError: a dtype or type is not one of those above.
        ValueError: a shape, device, blank, duration or reduction is wrong; a length or a valid label that lies on the CPU is
            out of range (on a GPU only with ``TDT_LOSS_CHECK=1`` in the environment).
        RuntimeError: in backward, when a second derivative is asked for.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> tokens = torch.zeros(1, 3, 2, 4, requires_grad=True)  # B, T, U+1, V
        >>> durations = torch.zeros(1, 3, 2, 3, requires_grad=True)
        >>> loss = kernel.tdt_loss(tokens, durations, torch.tensor([[0]]), torch.tensor([3]), torch.tensor([1]),
        ...                        blank_token_id=3, durations=[0, 1, 2], sigma=0.05)
        >>> round(loss.item(), 4)
        4.1557
        >>> loss.backward()
    """
    reduction_code = check_reduction(reduction)
    durations = check_durations(durations)
    check_logits("token_logits", token_logits)
    vocab = token_logits.shape[3]
    blank = check_vocab("token_logits", vocab, vocab, blank_token_id)
    check_duration_logits(token_logits, duration_logits, len(durations))
    options = Options.checked(
        sigma=sigma,
        delay_penalty=delay_penalty,
        omega=omega,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        zero_infinity=zero_infinity,
    )
    labels = Labels(token_logits.shape[:3], token_logits.device, vocab, targets, logit_lengths, target_lengths)
    report("tdt_loss", token_logits)
    return compute_loss(
        token_logits,
        duration_logits,
        labels,
        vocab,
        blank,
        durations,
        options,
        return_occupancy=return_occupancy,
        reduction=reduction_code,
    )


def tdt_loss_joint(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Union[Sequence[int], Tensor],
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    delay_penalty: float = 0.0,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    return_occupancy: bool = False,
    inplace_grad: bool = False,
) -> Union[Tensor, tuple[Tensor, Occupancy]]:
    r"""TDT loss of joint logits: the same as ``tdt_loss(logits[..., :V], logits[..., V:], ...)``.

    Everything that :func:`tdt_loss` says holds.

    Args:
        logits: (B, T, U+1, V + D), tokens first, then one column for each of the D durations.
        targets, logit_lengths, target_lengths, blank_token_id, durations, sigma, reduction, delay_penalty, omega,
            fastemit_lambda, clamp, zero_infinity, return_occupancy: as in :func:`tdt_loss`; the blank counts among the V tokens.
        inplace_grad: write the gradient over the logits' storage in backward. The extra memory is then a few numbers per node
            instead of a second logits tensor; the logits are lost, and whoever else saved them for backward gets torch's
            error about in-place modification. Has no effect under ``torch.compile``, which plans memory itself, and under
            saved-tensor hooks (checkpoints among them), where torch would not see the modification.

    Returns:
        As :func:`tdt_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tdt_loss`; ValueError for ``inplace_grad`` on logits whose elements
            share memory (an expanded tensor) or are not contiguous in the last dimension.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> logits = torch.randn(2, 8, 4, 32 + 5, requires_grad=True)
        >>> loss = kernel.tdt_loss_joint(logits, torch.randint(0, 31, (2, 3)), torch.tensor([8, 6]), torch.tensor([3, 2]),
        ...                              blank_token_id=31, durations=[0, 1, 2, 3, 4])
        >>> loss.backward()
    """
    report("tdt_loss_joint", logits)
    return compute_joint_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank_token_id,
        check_durations(durations),
        Options.checked(
            sigma=sigma,
            delay_penalty=delay_penalty,
            omega=omega,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        inplace_grad=inplace_grad,
        return_occupancy=return_occupancy,
        reduction=check_reduction(reduction),
    )
