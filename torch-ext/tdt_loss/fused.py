"""The loss without the logits: joint network and transducer loss in one function, as users call it (how: fused_passes.py)."""

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from . import transforms
from .checks import (
    Labels,
    Options,
    check_bool,
    check_durations,
    check_float,
    check_number,
    check_penalties,
    check_reduction,
    check_tiling,
    check_vocab,
)
from .fused_autograd import FusedStats, compute_loss
from .host_ops import draw_seed
from .report import report
from .tiles import ACTIVATIONS, Inputs, Problem

__all__ = ["FusedStats", "rnnt_loss_fused_joint", "tdt_loss_fused_joint"]


def tdt_loss_fused_joint(
    encoder: Tensor,
    decoder: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Union[Sequence[int], Tensor],
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    delay_penalty: float = 0.0,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    max_tile_bytes: int = 384 << 20,
    occupancy_threshold: float = 0.0,
    tolerance: float = 1e-6,
    return_stats: bool = False,
) -> Union[Tensor, tuple[Tensor, FusedStats]]:
    r"""TDT loss of a joint network's inputs, without its logits: the same number as ::

        hidden = torch.relu(encoder[:, :, None] + decoder[:, None])  # (B, T, U+1, H); or torch.tanh
        logits = torch.nn.functional.linear(torch.nn.functional.dropout(hidden, dropout), weight, bias)
        loss = tdt_loss_joint(logits, targets, logit_lengths, target_lengths, blank_token_id, durations, sigma, reduction)

    with gradients for ``encoder``, ``decoder``, ``weight`` and ``bias``, in the memory of one tile. Logits are computed
    forward and again in backward, for the nodes that need them: none in the padding, and no more than ``tolerance`` asks
    for. Upper bounds of all nodes, at a few per cent of the price, say where the alignments can be; the logits of those nodes
    are computed in full, one in ten or fewer of a trained model's, all of them where the bounds leave no choice. What
    the others could add is known and at most the tolerance, so the loss is that of all rows (docs/GUARANTEE.md).

    Operands are multiplied in the dtype of ``encoder`` and ``decoder``, or in that of an enclosing autocast; float32
    parameters of 16-bit activations are cast once. Logits of 16-bit operands are float32, not rounded to 16 bits as in the
    lines above: the loss is that of the same operands in float64 to within 1e-5 of itself. The gradient of the logits
    is 16-bit again, as a factor of the next products. Every sum over rows or tiles (of ``weight``, ``bias``, ``encoder``,
    ``decoder``) is float32. The same call gives the same bits; another ``max_tile_bytes``, or other samples beside a sample,
    may move the last ones.

    The lengths are read on the host, to know how many rows there are: pass them on the CPU and this waits for nothing.
    Forward waits once or twice for the number of rows of the band, backward once for that of its own: a CUDA graph cannot
    hold them (with ``tolerance=0`` it can hold the forward).

    Args:
        encoder: (B, T, H) output of the encoder, projected to the joint network's width; float32, bfloat16, float16 or
            float64, any strides.
        decoder: (B, U+1, H) output of the prediction network, likewise; dtype and device of ``encoder``.
        weight: (V + D, H) of the joint network's last layer: V tokens, blank included, then the D durations.
        bias: (V + D,), or None.
        targets, logit_lengths, target_lengths, blank_token_id, durations, sigma, reduction, delay_penalty, omega,
            fastemit_lambda, clamp, zero_infinity: as in :func:`tdt_loss`; the blank counts among the V tokens. ``clamp`` holds the
            gradient of the logits.
        activation: ``"relu"`` or ``"tanh"``.
        dropout: probability in [0, 1) with which a hidden unit is zeroed, the others scaled by 1 / (1 - dropout). Masks are
            drawn independently for every node and unit, from a seed that comes from torch's CPU generator
            (``torch.manual_seed``), and drawn again in backward. Pass 0 for evaluation.
        max_tile_bytes: bound on the memory of a tile, logits and hidden units; a row at least.
        occupancy_threshold: nodes whose occupancy (the posterior probability that the alignment passes through, times
            1 + fastemit_lambda for label arcs) is at most this have no gradient. 0 leaves out those whose occupancy is
            exactly 0 in float32, whose gradient is 0 anyway.
        tolerance: nats, in [0, 1]. The loss of each sample is at least that of all rows, rounding aside, and at most this
            above it, and the occupancy that its gradient leaves out adds up to no more than this in forward, and than this
            in backward; both times the loss of the sample where that is below 1, so that small gradients keep their relative
            precision. The default is below what float32 rounds. 0: every valid row is computed.
        return_stats: return :class:`FusedStats` as well; under ``torch.compile`` it stays empty.

    Returns:
        As :func:`tdt_loss`; with ``return_stats`` the pair (loss, stats).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`tdt_loss`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> encoder, decoder = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 4, 16, requires_grad=True)
        >>> head = torch.nn.Linear(16, 32 + 5)
        >>> loss = kernel.tdt_loss_fused_joint(encoder, decoder, head.weight, head.bias, torch.randint(0, 31, (2, 3)),
        ...                                    torch.tensor([8, 6]), torch.tensor([3, 2]), blank_token_id=31,
        ...                                    durations=[0, 1, 2, 3, 4])
        >>> loss.backward()
    """
    report("tdt_loss_fused_joint", encoder, fused=True)
    return _fused(
        (encoder, decoder, weight, bias),
        (targets, logit_lengths, target_lengths),
        blank_token_id,
        check_durations(durations),
        reduction,
        Options.checked(
            sigma=sigma,
            delay_penalty=delay_penalty,
            omega=omega,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        activation,
        dropout,
        max_tile_bytes,
        occupancy_threshold,
        tolerance,
        return_stats,
    )


def rnnt_loss_fused_joint(
    encoder: Tensor,
    decoder: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean_volume",
    *,
    sigma: float = 0.0,
    activation: str = "relu",
    dropout: float = 0.0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    max_tile_bytes: int = 384 << 20,
    occupancy_threshold: float = 0.0,
    tolerance: float = 1e-6,
    return_stats: bool = False,
) -> Union[Tensor, tuple[Tensor, FusedStats]]:
    r"""RNN-T loss of a joint network's inputs, without its logits.

    :func:`rnnt_loss` as :func:`tdt_loss_fused_joint` is :func:`tdt_loss_joint`; everything said there holds.

    Args:
        encoder, decoder, bias, activation, dropout, max_tile_bytes, occupancy_threshold, tolerance, return_stats: as in
            :func:`tdt_loss_fused_joint`.
        weight: (V, H) of the joint network's last layer.
        targets, logit_lengths, target_lengths, blank_token_id, reduction, sigma, delay_penalty, fastemit_lambda, clamp,
            zero_infinity: as in :func:`rnnt_loss`.

    Returns:
        As :func:`rnnt_loss`; with ``return_stats`` the pair (loss, stats).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`rnnt_loss`.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> encoder, decoder = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 4, 16, requires_grad=True)
        >>> head = torch.nn.Linear(16, 32)
        >>> loss = kernel.rnnt_loss_fused_joint(encoder, decoder, head.weight, head.bias, torch.randint(0, 31, (2, 3)),
        ...                                     torch.tensor([8, 6]), torch.tensor([3, 2]), blank_token_id=31)
        >>> loss.backward()
    """
    report("rnnt_loss_fused_joint", encoder, fused=True)
    return _fused(
        (encoder, decoder, weight, bias),
        (targets, logit_lengths, target_lengths),
        blank_token_id,
        [],
        reduction,
        Options.checked(
            sigma=sigma,
            delay_penalty=delay_penalty,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        activation,
        dropout,
        max_tile_bytes,
        occupancy_threshold,
        tolerance,
        return_stats,
    )


def _fused(
    operands: tuple[Tensor, Tensor, Tensor, Optional[Tensor]],
    labels: tuple[Tensor, Tensor, Tensor],
    blank_token_id: int,
    durations: list[int],
    reduction: str,
    options: Options,
    activation: str,
    dropout: float,
    max_tile_bytes: int,
    occupancy_threshold: float,
    tolerance: float,
    return_stats: bool,
) -> Union[Tensor, tuple[Tensor, FusedStats]]:
    name, dense = ("tdt_loss_fused_joint", "tdt_loss_joint") if durations else ("rnnt_loss_fused_joint", "rnnt_loss")
    transforms.refuse(name, dense)
    reduction_code = check_reduction(reduction)
    check_bool("return_stats", return_stats)
    _check_operands(*operands)
    encoder, decoder, weight, _ = operands
    vocab = weight.shape[0] - len(durations)
    blank = check_vocab("weight", weight.shape[0], vocab, blank_token_id)
    nodes = (*encoder.shape[:2], decoder.shape[1])
    checked = Labels(nodes, encoder.device, vocab, *labels)
    check_penalties(options, nodes)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    problem = Problem(
        blank,
        vocab,
        durations,
        *options,
        reduction_code,
        ACTIVATIONS.index(activation),
        _dropout(dropout),
        *check_tiling(max_tile_bytes, occupancy_threshold, tolerance),
        _product_dtype(*operands),
    )
    seed = draw_seed() if dropout > 0 else None
    loss, stats = compute_loss(Inputs(*operands, *checked.tensors, *labels[1:], seed), problem)
    return (loss, stats) if return_stats else loss


def _dropout(value: float) -> float:
    value = check_number("dropout", value)
    if not 0 <= value < 1:
        raise ValueError(f"dropout must be in [0, 1), got {value}")
    return value


def _check_operands(encoder: Tensor, decoder: Tensor, weight: Tensor, bias: Optional[Tensor]) -> None:
    tensors = {"encoder": encoder, "decoder": decoder, "weight": weight}
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        check_float(name, tensor)
        if tensor.device != encoder.device:
            raise ValueError(f"{name} must be on the device of encoder, {encoder.device}, got {tensor.device}")
    if encoder.dim() != 3 or encoder.shape[2] < 1:
        raise ValueError(f"encoder must have shape (B, T, H), got {tuple(encoder.shape)}")
    B, _, H = encoder.shape
    if decoder.dim() != 3 or decoder.shape[0] != B or decoder.shape[2] != H or decoder.shape[1] < 1:
        raise ValueError(f"decoder must have shape ({B}, U+1, {H}), B and H as in encoder, got {tuple(decoder.shape)}")
    if weight.dim() != 2 or weight.shape[1] != H:
        raise ValueError(f"weight must have shape (V + D, {H}), H as in encoder, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), as weight has rows, got {tuple(bias.shape)}")


def _product_dtype(encoder: Tensor, decoder: Tensor, weight: Tensor, bias: Optional[Tensor]) -> torch.dtype:
    """The dtype that hidden units and logits are computed in."""
    kind = encoder.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and encoder.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if decoder.dtype != encoder.dtype:
        raise TypeError(f"decoder must have the dtype of encoder, {encoder.dtype}, got {decoder.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype not in (encoder.dtype, torch.float32):
            raise TypeError(
                f"{name} must have the dtype of encoder, {encoder.dtype}, or float32, got {parameter.dtype}"
            )
    return encoder.dtype
