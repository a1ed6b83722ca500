"""Joint network and transducer loss over tiles of the lattice, without the logits of all nodes at once.

The logits of a joint network, ``weight @ act(encoder[b, t] + decoder[b, u]) + bias`` at every node (b, t, u), are the
largest tensor of a training step, and the loss needs a few numbers of each row. So a tile of rows at a time is computed,
reduced to those numbers and overwritten; backward computes it again, turns it into its gradient, and multiplies that on.
Rows are packed: padding has none, and in backward neither has a node that no alignment visits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._ops import ops
from .autograd import NO_DOUBLE_BACKWARD
from .checks import Labels

ACTIVATIONS = ("relu", "tanh")  # in the order of tdt_loss_common/joint.h

_COLUMNS = 8  # rows of logits come in multiples of it: others are read at a third of the speed (cuBLAS, bfloat16, H200)
_ROWS = 128  # a tile's rows come in multiples of it, where it has that many


@dataclass
class FusedStats:
    """What a fused loss has done, filled in as it happens.

    Attributes:
        valid_rows: the nodes of the batch, padding not counted, whose logits forward computes.
        live_rows: those of them whose logits backward computes again; None before backward.
        dropped_mass: what ``occupancy_threshold`` has left out at most, a tensor () on the device of the loss; None before
            backward. The absolute gradients of the losses with respect to the token logits of all left-out nodes add up to
            no more than this, and so do those with respect to their duration logits (before clamp, reduction and
            upstream gradient).
    """

    valid_rows: int
    live_rows: Optional[int] = None
    dropped_mass: Optional[Tensor] = None


class Problem(NamedTuple):
    """Everything but the tensors, checked."""

    blank: int
    vocab: int
    durations: list[int]
    sigma: float
    delay_penalty: float
    omega: float
    fastemit_lambda: float
    clamp: float
    zero_infinity: bool
    reduction: int
    activation: int
    dropout: float
    max_tile_bytes: int
    occupancy_threshold: float
    dtype: torch.dtype  # of hidden units and logits


def compute_loss(
    operands: Sequence[Optional[Tensor]], labels: Labels, lengths: Sequence[Tensor], problem: Problem
) -> tuple[Tensor, FusedStats]:
    """The loss of checked arguments. operands: encoder, decoder, weight, bias; lengths: as the caller gave them."""
    rows = _valid_rows(labels, lengths, operands)
    stats = FusedStats(rows.total)
    seed = int(torch.randint(2**63 - 1, (), device="cpu")) if problem.dropout > 0 else 0
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return _FusedLoss.apply(problem, seed, stats, rows, *operands, *labels.tensors), stats
    return _forward(problem, seed, rows, operands, labels.tensors, need_grad=False)[0], stats


class _ValidRows:
    """The nodes of the batch, padding left out, in the order of their index (b * T + t) * U1 + u."""

    def __init__(self, T: Sequence[int], U: Sequence[int], max_T: int, max_U1: int, device: torch.device):
        # A malformed sample has no rows: its loss is NaN whatever its logits.
        rows = [t * (u + 1) if 0 <= t <= max_T and 0 <= u < max_U1 else 0 for t, u in zip(T, U)]
        ends = torch.tensor(rows, dtype=torch.int64).cumsum(0)
        widths = torch.tensor(U, dtype=torch.int64) + 1
        self.max_T, self.max_U1, self.total = max_T, max_U1, sum(rows)
        self.table = torch.stack([ends, ends - torch.tensor(rows, dtype=torch.int64), widths])
        self.table = self.table.to(device, non_blocking=True)

    def nodes(self, first: int, last: int) -> Tensor:
        """The node indices, int32, of rows first to last."""
        ends, begins, widths = self.table
        row = torch.arange(first, last, device=ends.device)
        b = torch.searchsorted(ends, row, right=True)
        row -= begins[b]
        width = widths[b]
        t = torch.div(row, width, rounding_mode="floor")
        return ((b * self.max_T + t) * self.max_U1 + (row - t * width)).to(torch.int32)


def _valid_rows(labels: Labels, lengths: Sequence[Tensor], operands: Sequence[Optional[Tensor]]) -> _ValidRows:
    encoder, decoder = operands[:2]
    if all(x.device.type == "cpu" for x in lengths):
        T, U = (x.tolist() for x in lengths)
    else:  # one transfer for both
        T, U = torch.stack([labels.logit_lengths.to(torch.int64), labels.target_lengths.to(torch.int64)]).tolist()
    return _ValidRows(T, U, encoder.shape[1], decoder.shape[1], encoder.device)


class _Joint:
    """The joint network in the dtype of its products, with room for one tile."""

    def __init__(self, problem: Problem, seed: int, operands: Sequence[Optional[Tensor]], rows: int):
        encoder, decoder, weight, bias = operands
        self.columns, H = weight.shape
        padded = -(-self.columns // _COLUMNS) * _COLUMNS
        self.encoder, self.decoder = (x.to(problem.dtype).contiguous() for x in (encoder, decoder))
        self.weight, self.bias = _padded(weight, padded, problem.dtype), _padded(bias, padded, problem.dtype)
        self.options = (problem.activation, problem.dropout, seed)

        bytes_of_row = (padded + H) * problem.dtype.itemsize
        if _widens(self.weight):
            bytes_of_row += (padded + H) * 4
        self.rows = max(1, problem.max_tile_bytes // bytes_of_row)
        if self.rows > _ROWS:
            self.rows -= self.rows % _ROWS
        self.rows = min(self.rows, rows)
        self.hidden = self.encoder.new_empty((self.rows, H))
        self.logits = self.encoder.new_empty((self.rows, padded))

    def tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        """First and last row of each tile."""
        for first in range(0, rows, max(1, self.rows)):
            yield first, min(first + self.rows, rows)

    def tile(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden units and logits of the nodes, in place of those of the last tile."""
        hidden, logits = self.hidden[: len(nodes)], self.logits[: len(nodes)]
        ops.joint_hidden_(hidden, self.encoder, self.decoder, nodes, *self.options)
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        return hidden, logits


def _padded(parameter: Optional[Tensor], rows: int, dtype: torch.dtype) -> Optional[Tensor]:
    """The parameter cast, with rows of zeros after its own: the logits there are 0, and nobody reads them."""
    if parameter is None:
        return None
    out = parameter.new_zeros((rows, *parameter.shape[1:]), dtype=dtype)
    out[: len(parameter)] = parameter
    return out


def _forward(
    problem: Problem,
    seed: int,
    rows: _ValidRows,
    operands: Sequence[Optional[Tensor]],
    labels: Sequence[Tensor],
    need_grad: bool,
) -> tuple[Tensor, ...]:
    """loss, node_lp, ll, alpha_beta, weights: as the op `loss` returns them."""
    p = problem
    joint = _Joint(p, seed, operands, rows.total)
    shape = (len(joint.encoder), rows.max_T, rows.max_U1, (3 + len(p.durations) + 3) // 4 * 4)
    node_lp = joint.encoder.new_empty(shape, dtype=_sum_dtype(p.dtype))
    for first, last in joint.tiles(rows.total):
        nodes = rows.nodes(first, last)
        _, logits = joint.tile(nodes)
        ops.log_probs_tile_(
            logits, nodes, node_lp, *labels, p.blank, p.vocab, len(p.durations), p.sigma, p.delay_penalty
        )
    ll, alpha_beta = ops.lattice(node_lp, *labels, p.durations, p.vocab, p.omega, need_grad)
    loss, weights = ops.reduce(ll, labels[2], node_lp, p.omega, p.zero_infinity, p.reduction)
    return loss, node_lp, ll, alpha_beta, weights


def _backward(
    problem: Problem,
    seed: int,
    stats: FusedStats,
    grad_loss: Tensor,
    operands: Sequence[Optional[Tensor]],
    labels: Sequence[Tensor],
    saved: Sequence[Tensor],
    weights: Tensor,
    wanted: Sequence[bool],
) -> list[Optional[Tensor]]:
    """The gradients of the operands that are wanted."""
    p = problem
    lattice = (p.durations, p.vocab, p.omega, p.fastemit_lambda)
    occupancy = ops.node_occupancy(*saved, *labels, *lattice).view(-1)
    dropped = occupancy <= p.occupancy_threshold  # NaN is not: the gradients of such a sample are NaN
    live = dropped.logical_not().nonzero().squeeze(1)  # the host waits for how many there are
    stats.live_rows = len(live)
    stats.dropped_mass = 2 * torch.where(dropped, occupancy, 0).sum(dtype=torch.float64)
    nodes = live.to(torch.int32)
    row_of_node = torch.full_like(occupancy, -1, dtype=torch.int32)
    row_of_node[live] = torch.arange(len(live), dtype=torch.int32, device=live.device)
    del occupancy, dropped, live

    joint = _Joint(p, seed, operands, len(nodes))
    sums = [
        torch.zeros_like(x, dtype=_sum_dtype(p.dtype)) if want else None
        for x, want in zip((joint.encoder, joint.decoder, joint.weight, joint.bias), wanted)
    ]
    d_encoder, d_decoder, d_weight, d_bias = sums
    for first, last in joint.tiles(len(nodes)):
        hidden, logits = joint.tile(nodes[first:last])
        ops.gradient_tile_(
            grad_loss,
            weights,
            logits,
            nodes[first:last],
            *labels,
            *saved,
            p.blank,
            p.vocab,
            p.durations,
            p.omega,
            p.fastemit_lambda,
            p.clamp,
        )
        _add_products(d_weight, d_bias, logits, hidden)
        if d_encoder is not None or d_decoder is not None:
            d_hidden = torch.mm(logits, joint.weight, out=hidden)
            ops.joint_hidden_backward_(
                d_encoder,
                d_decoder,
                d_hidden,
                joint.encoder,
                joint.decoder,
                nodes[first:last],
                *joint.options,
                row_of_node,
                first,
            )
    return [None if s is None else s[: len(x)].to(x.dtype) for x, s in zip(operands, sums)]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _widens(x: Tensor) -> bool:
    """Whether 16-bit factors must be copied to float32 for a float32 product: on CUDA cuBLAS writes one as it is."""
    return x.dtype.itemsize == 2 and x.device.type != "cuda"


def _add_products(d_weight: Optional[Tensor], d_bias: Optional[Tensor], d_logits: Tensor, hidden: Tensor) -> None:
    """Adds d_logits^T hidden and the column sums of d_logits, in the dtype of the sums."""
    if _widens(hidden) and not (d_weight is None and d_bias is None):
        d_logits, hidden = d_logits.float(), hidden.float()
    if d_weight is not None:
        if hidden.dtype == d_weight.dtype:
            d_weight.addmm_(d_logits.t(), hidden)
        else:
            d_weight += torch.mm(d_logits.t(), hidden, out_dtype=d_weight.dtype)
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=d_bias.dtype)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem, seed, stats, rows, *tensors):
        operands, labels = tensors[:4], tensors[4:]
        with torch.autocast(operands[0].device.type, enabled=False):  # every cast is one of ours
            loss, *saved = _forward(problem, seed, rows, operands, labels, need_grad=True)
        ctx.problem, ctx.seed, ctx.stats = problem, seed, stats
        ctx.save_for_backward(*tensors, *saved)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        tensors = ctx.saved_tensors  # once: torch.utils.checkpoint computes them for that
        operands, labels, saved, weights = tensors[:4], tensors[4:7], tensors[7:10], tensors[10]
        wanted = ctx.needs_input_grad[4:8]
        with torch.no_grad(), torch.autocast(operands[0].device.type, enabled=False):
            grads = _backward(ctx.problem, ctx.seed, ctx.stats, grad_loss, operands, labels, saved, weights, wanted)
        if torch.is_grad_enabled():
            grads = _NoSecondDerivative.apply(len(grads), *grads, grad_loss, *operands)
        return (None, None, None, None, *grads, None, None, None)


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are, with a clear error for who asks for theirs."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tensors[:count]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(NO_DOUBLE_BACKWARD)
