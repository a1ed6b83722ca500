"""The band: which rows forward must compute so that the loss is that of all rows to within a tolerance, guaranteed.

Theory: docs/GUARANTEE.md; bounds and budget: tdt_loss_common/band.h. Narrow rows bound every arc from above. The lattice of
the bounds says where the alignments can be at all; there rows are computed in full. A lattice with full rows there and
bounds elsewhere, less one with nothing elsewhere, is all that the rest can add; where that is too much, another band follows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import ops
from .fakes import allocate_lattice, call
from .tiles import Inputs, Joint, Problem, Tiles, ValidRows, widened

_PILOTS = 1024  # rows, evenly spaced, whose softmax says which tokens are frequent
_FREQUENT, _GROUPS = 128, 8
_FIRST_SHARE = 0.1  # of the tolerance, for what the first band leaves out by the bounds alone: then it mostly suffices
_MOST = 0.6  # share of the rows from which on all are computed
NODES_AT_ONCE = 1 << 21  # of samples that are looked at together, at least one sample: 0.3 GB
MOST_NODES = 1 << 24  # of one sample, whose search needs 110 bytes a node beside the 52 that forward keeps
LEAST_OPERATIONS = 4e11  # of all rows: on a GPU less is done before a band is found (launches and waits of about 1 ms)
BLOCK = 1024  # rows of one sample in a product of narrow rows
_LABELS = ("targets", "logit_lengths", "target_lengths")


class Bounds(NamedTuple):
    """The head of the joint network narrowed for each sample, for upper bounds of its nodes."""

    weight: Tensor  # (B, columns, H)
    bias: Tensor  # (B, columns)
    counted: Tensor  # (B, columns)
    frequent: int
    groups: int
    split: bool
    rounding: float

    def of_samples(self, own: slice) -> "Bounds":
        return self._replace(weight=self.weight[own], bias=self.bias[own], counted=self.counted[own])


def columns_of_bounds(joint: Joint, p: Problem, max_U1: int) -> tuple[int, int, int]:
    """How many tokens are taken as frequent, how many groups the others make, and of how many columns a narrow row is."""
    frequent, groups = min(_FREQUENT, p.vocab - 1), min(_GROUPS, p.vocab)
    residuals = groups if joint.dtype != joint.wide else 0
    columns = 1 + (max_U1 - 1) + frequent + groups + residuals + 1 + len(p.durations)
    return frequent, groups, -(-columns // 8) * 8


def pays(joint: Joint, p: Problem, rows: int, max_U1: int) -> bool:
    """Whether narrow rows are so much cheaper than full ones that it is worth to look for a band among so many."""
    if p.tolerance == 0 or rows == 0 or 2 * columns_of_bounds(joint, p, max_U1)[2] > joint.padded:
        return False
    if joint.encoder.shape[1] * max_U1 > MOST_NODES:
        return False
    return joint.encoder.device.type == "cpu" or 2 * rows * joint.padded * joint.H >= LEAST_OPERATIONS


def make_bounds(joint: Joint, rows: ValidRows, inputs: Inputs, p: Problem) -> Bounds:
    """Any choice of frequent tokens and groups gives bounds; what rows of this very batch say makes them tight."""
    max_U1, D = inputs.decoder.shape[1], len(p.durations)
    frequent, groups, columns = columns_of_bounds(joint, p, max_U1)
    nodes = rows.nodes(0, min(_PILOTS, rows.total), max(1, rows.total // _PILOTS))
    hidden = joint.hidden(nodes, joint.encoder.new_empty((len(nodes), joint.H)))
    logits = joint.logits(hidden, joint.encoder.new_empty((len(nodes), joint.padded), dtype=joint.wide))
    weight, bias = joint.weight[: joint.columns], joint.bias[: joint.columns]
    said = ops.pilots(logits, bias, weight, p.blank, D, frequent, groups, p.activation, p.dropout)
    labels = (inputs.targets, inputs.target_lengths)
    narrowed = ops.bound_columns(weight, bias, *labels, *said, p.blank, max_U1, D, columns)
    return Bounds(*narrowed, frequent, groups, joint.dtype != joint.wide, _rounding(joint))


def _rounding(joint: Joint) -> float:
    """What a product may be off by, relative to the sum of its terms' absolute values."""
    if joint.dtype == torch.float64:
        return 2.0**-44
    if joint.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-7
    return 2.0**-16  # of 16-bit weights also what the residual of a centroid leaves


def add_bounds(joint: Joint, bounds: Bounds, rows: ValidRows, inputs: Inputs, p: Problem, node_lp: Tensor) -> None:
    """Upper bounds of the log-probabilities of all nodes, into their records; `rows` come in blocks."""
    columns = bounds.weight.shape[1]
    count = rows.total // BLOCK
    nodes_of_sample = rows.max_T * rows.max_U1
    blocks = min(max(1, joint.rows_of_tile(columns) // BLOCK), count)
    hidden_room = joint.encoder.new_empty((blocks * BLOCK, joint.H))
    logits_room = joint.encoder.new_empty((blocks * BLOCK, columns), dtype=joint.wide)
    emission = (p.vocab, len(p.durations), bounds.frequent, bounds.groups, bounds.split, p.sigma, p.delay_penalty)
    for first in range(0, count, max(1, blocks)):
        last = min(first + blocks, count)
        nodes = rows.nodes(first * BLOCK, (last - first) * BLOCK)
        hidden, logits = joint.hidden(nodes, hidden_room), logits_room[: len(nodes)]
        samples = nodes[::BLOCK] // nodes_of_sample
        weight = widened(bounds.weight.index_select(0, samples))
        _multiply_blocks(hidden.view(-1, BLOCK, joint.H), weight, logits.view(-1, BLOCK, columns))
        labels = (nodes, node_lp, *inputs.labels)
        ops.bound_rows_(logits, bounds.bias, bounds.counted, *labels, *emission, bounds.rounding)


def _multiply_blocks(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a (n, rows, H) @ b (n, columns, H)^T into out, summed in the dtype of out."""
    b = b.transpose(1, 2)
    if a.dtype == out.dtype or b.dtype == out.dtype:
        torch.bmm(a.to(out.dtype), b, out=out)
    else:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)


class Found(NamedTuple):
    """A band, and what lies outside of it at most."""

    rows: int  # computed in full
    gap: Tensor  # (B,) nats by which the loss of all rows may be smaller, at most
    dropped: Tensor  # (B,) occupancy outside of the band, at most
    lattice: tuple[Tensor, Tensor] | None  # ll and alpha_beta of the band, where they are known already


def find_band(joint: Joint, bounds: Bounds, rows: ValidRows, inputs: Inputs, p: Problem, out: "Records") -> Found:
    """Fills the records of the nodes of a band, and of all others with log-probabilities of -inf; `rows` come in blocks."""
    B = len(out.row_max)
    both = out.node_lp.new_empty((2, *out.node_lp.shape))
    upper, lower = both
    add_bounds(joint, bounds, rows, inputs, p, upper)
    known = torch.zeros(out.row_max.shape, dtype=torch.uint8, device=upper.device)

    ll, alpha_beta = _lattice(upper, inputs.labels, p)
    mass = _mass(upper, alpha_beta, ll, inputs, p)
    nodes, _ = _select(known, mass, ll, inputs, p, p.tolerance * _FIRST_SHARE)
    computed = len(nodes)
    if computed > _MOST * rows.valid:
        return all_rows(joint, rows.unblocked(inputs), inputs, p, out)
    lower.fill_(-torch.inf)
    records = Records(lower, out.row_max)
    add_records(joint, nodes, inputs, p, records)
    torch.where(known.view(torch.bool)[..., None], lower, upper, out=upper)

    # Both lattices at once, as a batch twice as large: a lattice is a chain of steps, however many run side by side.
    twice = inputs._replace(**{name: torch.cat([x, x]) for name, x in zip(_LABELS, inputs.labels)})
    ll, alpha_beta = _lattice(both.flatten(0, 1), twice.labels, p)
    ll_upper, ll_lower = ll[:, :B].contiguous(), ll[:, B:].contiguous()
    mass = _mass(both.flatten(0, 1), alpha_beta, torch.cat([ll_lower, ll_lower], 1), twice, p)
    nodes, dropped = _select(known, mass[:B], ll_upper, inputs, p, p.tolerance)
    lattice = (ll_lower, alpha_beta[:, :, B:])
    if len(nodes) > 0:
        computed += len(nodes)
        if computed > _MOST * rows.valid:
            return all_rows(joint, rows.unblocked(inputs), inputs, p, out)
        add_records(joint, nodes, inputs, p, records)
        lattice = None
    out.node_lp.copy_(lower)
    return Found(computed, torch.log1p(dropped), dropped, lattice)


class Records(NamedTuple):
    """Where eq. 1 to 3 of the nodes go."""

    node_lp: Tensor  # (B, T, U1, record size)
    row_max: Tensor  # (B, T, U1)


def add_records(joint: Joint, nodes: Tensor, inputs: Inputs, p: Problem, records: Records) -> None:
    """The records of the listed nodes, by full rows."""
    emission = (p.blank, p.vocab, len(p.durations), p.sigma, p.delay_penalty)
    for _, own, _, logits in Tiles(joint, len(nodes)).of(nodes):
        ops.log_probs_tile_(logits, joint.bias, own, *records, *inputs.labels, *emission)


def all_rows(joint: Joint, rows: ValidRows, inputs: Inputs, p: Problem, out: Records) -> Found:
    """The records of all nodes."""
    for nodes in rows.lists():
        add_records(joint, nodes, inputs, p, out)
    nothing = torch.zeros(len(out.row_max), dtype=torch.float64, device=out.row_max.device)
    return Found(rows.valid, nothing, nothing, None)


def _lattice(node_lp: Tensor, labels: tuple[Tensor, ...], p: Problem) -> tuple[Tensor, Tensor]:
    return call(ops.lattice, allocate_lattice, node_lp, *labels, p.durations, p.vocab, p.omega, True)


def _mass(node_lp: Tensor, alpha_beta: Tensor, ll: Tensor, inputs: Inputs, p: Problem) -> Tensor:
    """At least the occupancy of every node (B, T, U1), by alpha and beta of upper bounds and ll of lower ones."""
    return ops.posterior(node_lp, alpha_beta, ll, *inputs.labels, p.omega, 1 + p.fastemit_lambda)


def _select(
    known: Tensor, mass: Tensor, ll_upper: Tensor, inputs: Inputs, p: Problem, tolerance: float
) -> tuple[Tensor, Tensor]:
    """The nodes that must join the band, and the mass outside of it."""
    nodes, _, count, dropped = ops.select_nodes_(known, mass, ll_upper, *inputs.labels, p.omega, tolerance)
    return nodes[: count.item()], dropped  # the host waits for how many there are
