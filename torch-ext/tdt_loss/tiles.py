"""Rows of the joint network's logits, a tile at a time, without the logits of all nodes at once.

The logits of a joint network, ``weight @ act(encoder[b, t] + decoder[b, u]) + bias`` at every node (b, t, u), are the
largest tensor of a training step, and the loss needs a few numbers of each row. So a tile of rows at a time is computed,
reduced to those numbers and overwritten; backward computes it again, turns it into its gradient, and multiplies that on.
Rows are packed: padding has none, forward computes those of the band (band.py), and backward those that an alignment visits.

A product of 16-bit operands is summed in float32, and stays float32 until it has become a log-probability or a gradient.
"""

import copy
import functools
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._ops import ops
from .fakes import accumulate_dtype

ACTIVATIONS = ("relu", "tanh")  # in the order of tdt_loss_common/joint.h

_COLUMNS = 8  # of a tile come in multiples of it: at 8198 cuBLAS reaches 222 TFLOP/s, at 8200 531 (bfloat16, one H200)
_LISTED = 1 << 20  # nodes at a time
_ROWS = 128  # of a tile come in multiples of it, where it has that many: a block of a matrix product
SUMMED_ROWS = 32  # rows whose columns the gradient of a tile adds up: TileGradient::kRows in tdt_loss_common/tile.h


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
    tolerance: float
    dtype: torch.dtype  # of hidden units and of what the products multiply


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

    def of_samples(self, own: slice) -> "Inputs":
        """Those of some samples; the head is that of all."""
        samples = {name: getattr(self, name)[own] for name in self._fields if name not in ("weight", "bias", "seed")}
        return self._replace(**samples)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
        return self[:4]

    @property
    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        return self[4:7]


class ValidRows:
    """The rows of the batch, padding left out, in the order of their node's index (b * T + t) * U1 + u.

    ``block``: the rows of a sample are made up to a multiple of it by repeating its last one."""

    def __init__(self, inputs: Inputs, extents: tuple[list[int], list[int]], block: int = 1):
        self.extents, self.block = extents, block
        self.max_T, self.max_U1 = inputs.encoder.shape[1], inputs.decoder.shape[1]
        rows, end = [], 0
        for t, u in zip(*extents):
            # A malformed sample has no rows: its loss is NaN whatever its logits.
            count = t * (u + 1) if 0 <= t <= self.max_T and 0 <= u < self.max_U1 else 0
            begin, end = end, end + -(-count // block) * block
            rows.append((end, begin, count, u + 1))
        self.valid, self.total = sum(count for _, _, count, _ in rows), end
        self._rows, self._device = rows, inputs.encoder.device

    @functools.cached_property
    def table(self) -> Tensor:
        """RowTable of tdt_loss_common/band.h (4, B), on the device."""
        columns = [list(column) for column in zip(*self._rows)] or [[]] * 4
        return torch.tensor(columns, dtype=torch.int64, device="cpu").to(self._device, non_blocking=True)

    def unblocked(self, inputs: Inputs) -> "ValidRows":
        """The same rows one behind the other."""
        return ValidRows(inputs, self.extents)

    def nodes(self, first: int, count: int, step: int = 1) -> Tensor:
        """The node indices of so many rows, int32."""
        nodes = torch.empty(count, dtype=torch.int32, device=self._device)
        ops.list_rows_(nodes, self.table, first, step, self.max_T, self.max_U1)
        return nodes

    def lists(self) -> Iterator[Tensor]:
        """The node indices in pieces of bounded length."""
        for first in range(0, self.total, _LISTED):
            yield self.nodes(first, min(_LISTED, self.total - first))


def extents_of(inputs: Inputs) -> tuple[list[int], list[int]]:
    """Frames and labels of every sample, on the host; waits for the device where the caller has the lengths there."""
    if inputs.given_logit_lengths.device.type == inputs.given_target_lengths.device.type == "cpu":
        return inputs.given_logit_lengths.tolist(), inputs.given_target_lengths.tolist()
    T, U = torch.stack([x.to(torch.int64) for x in inputs.labels[1:]]).tolist()  # one transfer for both
    return T, U


class Joint:
    """The joint network in the dtype of its products."""

    def __init__(self, inputs: Inputs, problem: Problem):
        encoder, decoder, weight, bias = inputs.operands
        self.columns, self.H = weight.shape
        self.dtype, self.wide = problem.dtype, accumulate_dtype(problem.dtype)
        self.padded = -(-self.columns // _COLUMNS) * _COLUMNS
        self.encoder, self.decoder = (x.to(problem.dtype).contiguous() for x in (encoder, decoder))
        self.weight = _padded(weight, self.padded, problem.dtype)
        if bias is None:
            self.bias = self.encoder.new_zeros(self.padded, dtype=self.wide)
        else:
            self.bias = _padded(bias.to(problem.dtype), self.padded, self.wide)
        self.activation, self.dropout = problem.activation, problem.dropout
        self.seed = 0 if inputs.seed is None else int(inputs.seed)
        self.first_node = 0  # of the batch that dropout counts in
        self.max_tile_bytes = problem.max_tile_bytes
        self.factor = widened(self.weight)

    @property
    def options(self) -> tuple[int, float, int, int]:
        return self.activation, self.dropout, self.seed, self.first_node

    def of_samples(self, first: int, last: int) -> "Joint":
        """The same for some of the samples."""
        part = copy.copy(self)
        part.first_node = first * self.encoder.shape[1] * self.decoder.shape[1]
        part.encoder, part.decoder = self.encoder[first:last], self.decoder[first:last]
        return part

    def rows_of_tile(self, columns: int, gradient: bool = False) -> int:
        """How many rows fit: hidden units, logits of so many columns, and with ``gradient`` their gradient beside them."""
        bytes_of_row = self.H * self.dtype.itemsize + columns * self.wide.itemsize
        if gradient and self.dtype != self.wide:
            bytes_of_row += columns * self.dtype.itemsize
        if _copies(self.weight):
            bytes_of_row += self.H * 4 + (columns * 4 if gradient else 0)
        rows = max(1, self.max_tile_bytes // bytes_of_row)
        return rows - rows % _ROWS if rows > _ROWS else rows

    def hidden(self, nodes: Tensor, out: Tensor) -> Tensor:
        """The hidden units of the nodes, in the first rows of ``out``."""
        out = out[: len(nodes)]
        ops.joint_hidden_(out, self.encoder, self.decoder, nodes, *self.options)
        return out

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits without the bias, in the first rows of ``out``."""
        out = out[: len(hidden)]
        multiply(hidden, self.factor.t(), out)
        return out

    def hidden_gradient(self, d_logits: Tensor, out: Tensor) -> Tensor:
        """The gradient of hidden units, over them. On a CPU a product of 16-bit factors may be fifty times slower than theirs
        in float32."""
        if self.factor.dtype == out.dtype:
            return torch.mm(d_logits, self.factor, out=out)
        return out.copy_(d_logits.to(self.factor.dtype) @ self.factor)


class Tiles:
    """Room for a tile, and the tiles of a list of nodes one after the other."""

    def __init__(self, joint: Joint, rows: int, gradient: bool = False):
        self.joint = joint
        self.rows = min(joint.rows_of_tile(joint.padded, gradient), rows)
        self.hidden = joint.encoder.new_empty((self.rows, joint.H))
        self.logits = joint.encoder.new_empty((self.rows, joint.padded), dtype=joint.wide)

    def of(self, nodes: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """The first row of each tile, its nodes, hidden units and logits, in place of those of the last tile."""
        for first in range(0, len(nodes), max(1, self.rows)):
            own = nodes[first : first + self.rows]
            hidden = self.joint.hidden(own, self.hidden)
            yield first, own, hidden, self.joint.logits(hidden, self.logits)


def multiply(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """a @ b into ``out``, or added to it, summed in the dtype of ``out``; b may be `widened` already."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif _copies(a):
        multiply(a.to(out.dtype), b.to(out.dtype), out, accumulate)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def widened(x: Tensor) -> Tensor:
    """A factor of many products, copied once where each of them would copy it."""
    return x.float() if _copies(x) else x


def _copies(x: Tensor) -> bool:
    """Whether 16-bit factors must be copied to float32 for a float32 product: on CUDA cuBLAS writes one as it is."""
    return x.dtype.itemsize == 2 and x.device.type != "cuda"


def _padded(parameter: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The parameter cast, with rows of zeros after its own: the logits there are 0, and nobody reads them."""
    if len(parameter) == rows:
        own = parameter.to(dtype).contiguous()
        return own if own.data_ptr() % 16 == 0 else own.clone()  # a view may begin anywhere; kernels read vectors
    out = parameter.new_zeros((rows, *parameter.shape[1:]), dtype=dtype)
    out[: len(parameter)] = parameter
    return out
