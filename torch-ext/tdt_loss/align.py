"""Forced alignment as functions: the most probable alignment of the labels to the frames."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

from torch import Tensor

from ._ops import ops
from .checks import (
    Labels,
    Options,
    check_duration_logits,
    check_durations,
    check_logits,
    check_penalties,
    check_vocab,
    with_dense_rows,
)
from .fakes import allocate_align, call, fake_log_probs

__all__ = ["RNNTAlignment", "TDTAlignment", "rnnt_align", "tdt_align", "tdt_align_joint"]


class TDTAlignment(NamedTuple):
    """The most probable alignment of each sample, as :func:`tdt_align` returns it."""

    frames: Tensor  #: (B, U) int64, the frame at which each label is emitted, -1 where there is no label
    durations: Tensor  #: (B, U) int64, the frames by which each label advances, -1 where there is no label
    score: Tensor  #: (B,) log-probability of the alignment, in nats


class RNNTAlignment(NamedTuple):
    """The most probable alignment of each sample, as :func:`rnnt_align` returns it."""

    frames: Tensor  #: (B, U) int64, the frame at which each label is emitted, -1 where there is no label
    score: Tensor  #: (B,) log-probability of the alignment, in nats


def tdt_align(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Union[Sequence[int], Tensor],
    sigma: float = 0.0,
    *,
    delay_penalty: float = 0.0,
) -> TDTAlignment:
    r"""Most probable alignment of a Token-and-Duration Transducer, https://arxiv.org/abs/2304.06795 (Viterbi).

    Where :func:`tdt_loss` sums over all alignments of the labels to the frames, this finds the best single one:
    ``best(t, u) = max over the arcs out of (t, u) of weight + best(target)``, with ``best(exit) = 0``, followed from (0, 0).
    The arcs are those of the loss: at frame t, after u labels, token v and duration d have the weight
    ``log_softmax(token_logits[b, t, u])[v] - sigma + log_softmax(duration_logits[b, t, u])[d]``; a label moves to
    (t + d, u + 1), a blank (d > 0 only) to (t + d, u), and the last blank leaves the lattice at t + d = T exactly.

    Of alignments that are equally good the first is taken, where at every node, from the start of the lattice on, a label comes
    before a blank, then the shorter duration, then the earlier column. Scores are summed in float64, so the result is the
    same on every device for the same log-probabilities. Nothing here is differentiable: the results are detached, and the
    logits may require grad. Padding is never read. On a GPU the call does not synchronize and can be captured in a CUDA graph.

    Args:
        token_logits: (B, T, U+1, V) unnormalised scores of the tokens, blank included; float32, float16, bfloat16 or float64.
        duration_logits: (B, T, U+1, D) unnormalised scores of the durations; dtype and device of ``token_logits``.
        targets: (B, U) labels in [0, V), of any integer dtype, on any device; columns beyond U and labels beyond
            ``target_lengths`` are ignored.
        logit_lengths: (B,) frames of each sample, in [0, T]; any integer dtype, any device.
        target_lengths: (B,) labels of each sample, in [0, U]; any integer dtype, any device.
        blank_token_id: the blank's column, in [-V, V); negative counts from the end.
        durations: the D durations in frames, in the order of the columns: non-negative, at least one positive, at most 64.
        sigma: logit under-normalisation in nats, subtracted from every token log-probability, at most 1e4 in size. It weighs against alignments of
            many arcs.
        delay_penalty: in nats per frame, at most 1e4 in size: ``delay_penalty * ((T_b - 1) / 2 - t)`` is added to the
            log-probability of a label at frame t, so that a positive value favours early labels
            (https://arxiv.org/abs/2211.00490). The score contains it.

    Returns:
        A :class:`TDTAlignment` on the device of the logits: ``frames`` and ``durations``, (B, targets.shape[1]) int64 in frames,
        -1 beyond the target lengths; ``score``, (B,) float32 (float64 for float64 logits) in nats, the sum of the
        weights of the alignment, at most ``-tdt_loss(..., reduction="none")`` (but for log-probabilities below -2.9e6, which the
        loss counts as impossible). A sample without any alignment has score -inf; one with NaN or +inf logits at a valid
        node, or with malformed lengths or labels on a GPU, has score NaN; both have -1 everywhere.

    Raises:
        TypeError: a dtype or type is not one of those above.
        ValueError: a shape, device, blank, duration or ``delay_penalty`` is wrong; a length or a valid label that lies on the CPU
            is out of range (on a GPU only with ``TDT_LOSS_CHECK=1`` in the environment).

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> tokens = torch.zeros(1, 4, 3, 5)  # B, T, U+1, V
        >>> tokens[0, 1, 0, 2] = tokens[0, 3, 1, 0] = 9.0  # label 2 at frame 1, label 0 at frame 3
        >>> alignment = kernel.tdt_align(tokens, torch.zeros(1, 4, 3, 3), torch.tensor([[2, 0]]), torch.tensor([4]),
        ...                              torch.tensor([2]), blank_token_id=4, durations=[0, 1, 2])
        >>> alignment.frames.tolist(), alignment.durations.tolist()
        ([[1, 3]], [[2, 0]])
    """
    durations = check_durations(durations)
    check_logits("token_logits", token_logits)
    vocab = token_logits.shape[3]
    blank = check_vocab("token_logits", vocab, vocab, blank_token_id)
    check_duration_logits(token_logits, duration_logits, len(durations))
    labels = Labels(token_logits.shape[:3], token_logits.device, vocab, targets, logit_lengths, target_lengths)
    return TDTAlignment(*_align(token_logits, duration_logits, labels, blank, vocab, durations, sigma, delay_penalty))


def tdt_align_joint(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Union[Sequence[int], Tensor],
    sigma: float = 0.0,
    *,
    delay_penalty: float = 0.0,
) -> TDTAlignment:
    r"""Most probable alignment from joint logits: ``tdt_align(logits[..., :V], logits[..., V:], ...)``.

    Everything that :func:`tdt_align` says holds; the paper is https://arxiv.org/abs/2304.06795.

    Args:
        logits: (B, T, U+1, V + D), tokens first, then one column for each of the D durations.
        targets, logit_lengths, target_lengths, blank_token_id, durations, sigma, delay_penalty:
            as in :func:`tdt_align`; the blank counts among the V tokens.

    Returns:
        As :func:`tdt_align`.

    Raises:
        TypeError, ValueError: as :func:`tdt_align`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> alignment = kernel.tdt_align_joint(torch.zeros(1, 8, 3, 32 + 5), torch.tensor([[7, 3]]), torch.tensor([8]),
        ...                                    torch.tensor([2]), blank_token_id=31, durations=[0, 1, 2, 3, 4])
        >>> alignment.frames.tolist(), alignment.durations.tolist()
        ([[0, 0]], [[0, 4]])
    """
    durations = check_durations(durations)
    check_logits("logits", logits)
    vocab = logits.shape[3] - len(durations)
    blank = check_vocab("logits", logits.shape[3], vocab, blank_token_id)
    labels = Labels(logits.shape[:3], logits.device, vocab, targets, logit_lengths, target_lengths)
    return TDTAlignment(*_align(logits, None, labels, blank, vocab, durations, sigma, delay_penalty))


def rnnt_align(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    *,
    sigma: float = 0.0,
    delay_penalty: float = 0.0,
) -> RNNTAlignment:
    r"""Most probable alignment of an RNN Transducer, https://arxiv.org/abs/1211.3711 (Viterbi).

    ``best(t, u) = max(label_lp + best(t, u + 1), blank_lp + best(t + 1, u))``, with ``best(T, U) = 0``, followed from (0, 0);
    ``label_lp`` and ``blank_lp`` are ``log_softmax(logits[b, t, u]) - sigma`` at the label u + 1 and at the blank. A
    label stays at its frame and a blank moves to the next one; a sample needs at least one frame, whatever its labels. Where
    both are equally good the label comes first. Everything else is as in :func:`tdt_align`.

    Args:
        logits: (B, T, U+1, V) unnormalised scores of the tokens, blank included; float32, float16, bfloat16 or float64.
        targets: (B, U) labels in [0, V), of any integer dtype, on any device; columns beyond U and labels beyond
            ``target_lengths`` are ignored.
        logit_lengths: (B,) frames of each sample, in [0, T]; any integer dtype, any device.
        target_lengths: (B,) labels of each sample, in [0, U]; any integer dtype, any device.
        blank_token_id: the blank's column, in [-V, V); negative counts from the end.
        sigma: in nats, at most 1e4 in size, subtracted from every log-probability. Every alignment has T + U arcs, so it changes the
            score alone.
        delay_penalty: in nats per frame, at most 1e4 in size: ``delay_penalty * ((T_b - 1) / 2 - t)`` is added to the
            log-probability of a label at frame t, so that a positive value favours early labels
            (https://arxiv.org/abs/2211.00490). The score contains it.

    Returns:
        An :class:`RNNTAlignment` on the device of the logits: ``frames``, (B, targets.shape[1]) int64, -1 beyond the target
        lengths; ``score``, (B,) float32 (float64 for float64 logits) in nats, at most ``-rnnt_loss(..., reduction="none")``.
        A sample without any alignment has score -inf; one with NaN or +inf logits at a valid node, or with malformed lengths or
        labels on a GPU, has score NaN; both have -1 everywhere.

    Raises:
        TypeError: a dtype or type is not one of those above.
        ValueError: a shape, device, blank or ``delay_penalty`` is wrong; a length or a valid label that lies on the CPU is out of
            range (on a GPU only with ``TDT_LOSS_CHECK=1`` in the environment).

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> logits = torch.zeros(1, 4, 3, 5)  # B, T, U+1, V
        >>> logits[0, 1, 0, 2] = logits[0, 3, 1, 0] = 9.0  # label 2 at frame 1, label 0 at frame 3
        >>> kernel.rnnt_align(logits, torch.tensor([[2, 0]]), torch.tensor([4]), torch.tensor([2]), blank_token_id=4).frames.tolist()
        [[1, 3]]
    """
    check_logits("logits", logits)
    vocab = logits.shape[3]
    blank = check_vocab("logits", vocab, vocab, blank_token_id)
    labels = Labels(logits.shape[:3], logits.device, vocab, targets, logit_lengths, target_lengths)
    frames, _, score = _align(logits, None, labels, blank, vocab, [], sigma, delay_penalty)
    return RNNTAlignment(frames, score)


def _align(
    logits: Tensor,
    duration_logits: Optional[Tensor],
    labels: Labels,
    blank: int,
    vocab: int,
    durations: list[int],
    sigma: float,
    delay_penalty: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(frames, durations, score); no durations: RNN-T."""
    options = Options.checked(sigma=sigma, delay_penalty=delay_penalty)
    check_penalties(options, logits.shape[:3])
    node_lp, _ = call(
        ops.log_probs,
        fake_log_probs,
        with_dense_rows(logits.detach()),
        None if duration_logits is None else with_dense_rows(duration_logits.detach()),
        *labels.tensors,
        blank,
        len(durations),
        options.sigma,
        options.delay_penalty,
    )
    return call(ops.align, allocate_align, node_lp, *labels.tensors, durations, vocab)
