"""Joint network and transducer loss over tiles of the lattice, without the logits of all nodes at once.

The logits of a joint network, ``weight @ act(encoder[b, t] + decoder[b, u]) + bias`` at every node (b, t, u), are the
largest tensor of a training step, and the loss needs a few numbers of each row. So a tile of rows at a time is computed,
reduced to those numbers and overwritten; backward computes it again, turns it into its gradient, and multiplies that on.
Rows are packed: padding has none, and in backward neither has a node that no alignment visits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._ops import ops
from .fakes import accumulate_dtype, allocate_lattice, call, fake_node_occupancy, record_size

ACTIVATIONS = ("relu", "tanh")  # in the order of tdt_loss_common/joint.h

_COLUMNS = 8  # of a tile come in multiples of it: at 8198 cuBLAS reaches 222 TFLOP/s, at 8200 531 (bfloat16, one H200)
_LISTED = 1 << 20  # nodes at a time, 50 MB while their list is made
_ROWS = 128  # of a tile come in multiples of it, where it has that many: a block of a matrix product


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


class Inputs(NamedTuple):
    """The tensors of a fused loss, checked."""

    encoder: Tensor
    decoder: Tensor
    weight: Tensor
    bias: Optional[Tensor]
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    given_logit_lengths: Tensor  # where the caller has them: on the host they are read for free
    given_target_lengths: Tensor
    seed: Optional[Tensor]  # () int64 on the host; None without dropout

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
        return self[:4]

    @property
    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        return self[4:7]


class _ValidRows:
    """The nodes of the batch, padding left out, in the order of their index (b * T + t) * U1 + u."""

    def __init__(self, inputs: Inputs):
        max_T, max_U1, device = inputs.encoder.shape[1], inputs.decoder.shape[1], inputs.encoder.device
        if inputs.given_logit_lengths.device.type == inputs.given_target_lengths.device.type == "cpu":
            T, U = inputs.given_logit_lengths.tolist(), inputs.given_target_lengths.tolist()
        else:  # one transfer for both
            T, U = torch.stack([x.to(torch.int64) for x in inputs.labels[1:]]).tolist()
        # A malformed sample has no rows: its loss is NaN whatever its logits.
        rows = [t * (u + 1) if 0 <= t <= max_T and 0 <= u < max_U1 else 0 for t, u in zip(T, U)]
        counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
        ends = counts.cumsum(0)
        widths = torch.tensor(U, dtype=torch.int64, device="cpu") + 1
        self.max_T, self.max_U1, self.total = max_T, max_U1, sum(rows)
        self.table = torch.stack([ends, ends - counts, widths]).to(device, non_blocking=True)

    def lists(self) -> Iterator[Tensor]:
        """The node indices, int32, in pieces of bounded length: a dozen small kernels each, too many for every tile."""
        for first in range(0, self.total, _LISTED):
            yield self._nodes(first, min(first + _LISTED, self.total))

    def _nodes(self, first: int, last: int) -> Tensor:
        ends, begins, widths = self.table
        row = torch.arange(first, last, device=ends.device)
        b = torch.searchsorted(ends, row, right=True)
        row -= begins[b]
        width = widths[b]
        t = torch.div(row, width, rounding_mode="floor")
        return ((b * self.max_T + t) * self.max_U1 + (row - t * width)).to(torch.int32)


class _Joint:
    """The joint network in the dtype of its products, with room for one tile."""

    def __init__(self, inputs: Inputs, problem: Problem, rows: int):
        encoder, decoder, weight, bias = inputs.operands
        self.columns, H = weight.shape
        padded = -(-self.columns // _COLUMNS) * _COLUMNS
        self.encoder, self.decoder = (x.to(problem.dtype).contiguous() for x in (encoder, decoder))
        self.weight, self.bias = _padded(weight, padded, problem.dtype), _padded(bias, padded, problem.dtype)
        self.options = (problem.activation, problem.dropout, 0 if inputs.seed is None else int(inputs.seed))

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
    if len(parameter) == rows:
        return parameter.to(dtype).contiguous()
    out = parameter.new_zeros((rows, *parameter.shape[1:]), dtype=dtype)
    out[: len(parameter)] = parameter
    return out


def fused_forward(inputs: Inputs, p: Problem, need_grad: bool) -> tuple[tuple[Tensor, ...], int]:
    """loss, node_lp, row_stats, ll, alpha_beta, weights, as the op `loss` returns them; and how many rows there were."""
    with torch.autocast(inputs.encoder.device.type, enabled=False):  # every cast is one of ours
        rows = _ValidRows(inputs)
        joint = _Joint(inputs, p, rows.total)
        shape, dtype = (len(joint.encoder), rows.max_T, rows.max_U1), accumulate_dtype(p.dtype)
        node_lp = joint.encoder.new_empty((*shape, record_size(len(p.durations))), dtype=dtype)
        row_stats = joint.encoder.new_empty((*shape, 2), dtype=dtype)
        emission = (p.blank, p.vocab, len(p.durations), p.sigma, p.delay_penalty)
        for nodes in rows.lists():
            for first, last in joint.tiles(len(nodes)):
                _, logits = joint.tile(nodes[first:last])
                ops.log_probs_tile_(logits, nodes[first:last], node_lp, row_stats, *inputs.labels, *emission)
        lattice = (node_lp, *inputs.labels, p.durations, p.vocab, p.omega, need_grad)
        ll, alpha_beta = call(ops.lattice, allocate_lattice, *lattice)
        loss, weights = ops.reduce(ll, inputs.target_lengths, node_lp, p.omega, p.zero_infinity, p.reduction)
        return (loss, node_lp, row_stats, ll, alpha_beta, weights), rows.total


class _LiveRows:
    """The nodes with occupancy, in the order of their index."""

    def __init__(self, inputs: Inputs, p: Problem, saved: Sequence[Tensor]):
        lattice = (p.durations, p.vocab, p.omega, p.fastemit_lambda)
        node_lp, _, ll, alpha_beta = saved
        occupancy = call(ops.node_occupancy, fake_node_occupancy, node_lp, ll, alpha_beta, *inputs.labels, *lattice)
        occupancy = occupancy.view(-1)
        dropped = occupancy <= p.occupancy_threshold  # NaN is not: the gradients of such a sample are NaN
        live = dropped.logical_not().nonzero().squeeze(1)  # the host waits for how many there are
        self.dropped_mass = 2 * torch.where(dropped, occupancy, 0).sum(dtype=torch.float64)
        self.total = len(live)
        self.nodes = live.to(torch.int32)
        self.row_of_node = torch.full_like(occupancy, -1, dtype=torch.int32)
        self.row_of_node[live] = torch.arange(self.total, dtype=torch.int32, device=live.device)


def fused_backward(
    grad_loss: Tensor, inputs: Inputs, p: Problem, saved: Sequence[Tensor], weights: Tensor, wanted: Sequence[bool]
) -> tuple[list[Optional[Tensor]], int, Tensor]:
    """The gradients of the operands that are wanted; how many rows were live, and what the others lack at most."""
    with torch.no_grad(), torch.autocast(inputs.encoder.device.type, enabled=False):
        live = _LiveRows(inputs, p, saved)
        joint = _Joint(inputs, p, live.total)
        sums = [
            torch.zeros_like(x, dtype=accumulate_dtype(p.dtype)) if want else None
            for x, want in zip((joint.encoder, joint.decoder, joint.weight, joint.bias), wanted)
        ]
        d_encoder, d_decoder, d_weight, d_bias = sums
        shaping = (p.blank, p.vocab, p.durations, p.omega, p.fastemit_lambda, p.clamp)
        for first, last in joint.tiles(live.total):
            nodes = live.nodes[first:last]
            hidden, logits = joint.tile(nodes)
            ops.gradient_tile_(grad_loss, weights, logits, nodes, *inputs.labels, *saved, *shaping)
            _add_products(d_weight, d_bias, logits, hidden)
            if d_encoder is not None or d_decoder is not None:
                d_hidden = torch.mm(logits, joint.weight, out=hidden)
                hidden_layer = (joint.encoder, joint.decoder, nodes, *joint.options)
                ops.joint_hidden_backward_(d_encoder, d_decoder, d_hidden, *hidden_layer, live.row_of_node, first)
        grads = [None if s is None else s[: len(x)].to(x.dtype) for x, s in zip(inputs.operands, sums)]
        return grads, live.total, live.dropped_mass


def _widens(x: Tensor) -> bool:
    """Whether 16-bit factors must be copied to float32 for a float32 product: on CUDA cuBLAS writes one as it is."""
    return x.dtype.itemsize == 2 and x.device.type != "cuda"


def _add_products(d_weight: Optional[Tensor], d_bias: Optional[Tensor], d_logits: Tensor, hidden: Tensor) -> None:
    """Adds d_logits^T hidden and the column sums of d_logits, in the dtype of the sums."""
    if d_weight is None and d_bias is None:
        return
    if _widens(hidden):
        d_logits, hidden = d_logits.float(), hidden.float()
    if d_weight is not None:
        if hidden.dtype == d_weight.dtype:
            d_weight.addmm_(d_logits.t(), hidden)
        else:
            d_weight += torch.mm(d_logits.t(), hidden, out_dtype=d_weight.dtype)
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=d_bias.dtype)
