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
from .tiles import Inputs, Joint, Problem, Tiles, ValidRows, multiply, widened

_PILOTS = 1024  # rows, evenly spaced, whose softmax says which tokens are frequent
_PROFILED = 4  # every so many of them, by whose logits the other tokens are grouped
_FREQUENT, _GROUPS = 96, 32
_FIRST_SHARE = 0.1  # of the tolerance, for what the first band leaves out by the bounds alone: then it mostly suffices
_MOST = 0.6  # share of the rows from which on all are computed
NODES_AT_ONCE = 1 << 21  # of samples that are looked at together, at least one sample: 0.3 GB
_BLOCK = 1024  # rows of one sample in a product of narrow rows
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
    others = p.vocab - max_U1  # tokens that are not of any sample, at least
    frequent, groups = min(_FREQUENT, max(0, others)), min(_GROUPS, max(0, others - _FREQUENT))
    residuals = groups if joint.dtype != joint.wide else 0
    columns = 1 + (max_U1 - 1) + frequent + groups + residuals + 1 + len(p.durations)
    return frequent, groups, -(-columns // 8) * 8


def pays(joint: Joint, p: Problem, max_U1: int) -> bool:
    """Whether narrow rows are so much cheaper than full ones that it is worth to look for a band."""
    return p.tolerance > 0 and 2 * columns_of_bounds(joint, p, max_U1)[2] <= joint.padded


def make_bounds(joint: Joint, rows: ValidRows, inputs: Inputs, p: Problem) -> Bounds:
    """Any choice of frequent tokens and groups gives bounds; a good one makes them tight. From rows of this very batch."""
    max_U1 = inputs.decoder.shape[1]
    frequent, groups, columns = columns_of_bounds(joint, p, max_U1)
    step = max(1, rows.total // _PILOTS)
    nodes = rows.nodes(0, min(_PILOTS, rows.total), step)
    hidden = joint.hidden(nodes, joint.encoder.new_empty((len(nodes), joint.H)))
    logits = joint.logits(hidden, joint.encoder.new_empty((len(nodes), joint.padded), dtype=joint.wide))
    logits = logits[:, : p.vocab] + joint.bias[: p.vocab]
    mean = torch.softmax(logits, 1).mean(0)
    mean[p.blank] = 0
    top = mean.topk(frequent + groups).indices
    chosen, seeds = top[:frequent], top[frequent:]

    # Each other token joins the seed whose logits are nearest to its own over the pilots.
    profiles = logits[::_PROFILED]
    profiles = profiles - profiles.mean(0)
    centers = profiles[:, seeds]
    nearest = (profiles.t() @ centers).sub_((centers * centers).sum(0), alpha=0.5)
    group_of = nearest.argmax(1) if groups else torch.zeros_like(mean, dtype=torch.int64)
    # The distribution in a group, but for a factor; a token that the pilots never saw has no part in it.
    share = (mean / mean.amax().clamp(min=torch.finfo(mean.dtype).tiny)).to(joint.dtype)
    share[chosen] = 0
    group_of = torch.where(share > 0, group_of, -1).to(torch.int32)
    members = torch.where(group_of == torch.arange(groups, device=share.device)[:, None], share, 0)
    group_weight = torch.empty((groups, joint.H), dtype=joint.wide, device=share.device)
    multiply(members, joint.weight[: p.vocab], group_weight)
    share, members = share.to(joint.wide), members.to(joint.wide)
    terms = torch.stack([torch.ones_like(share), share.clamp(min=torch.finfo(share.dtype).tiny).log()])
    biases = torch.where(members > 0, joint.bias[: p.vocab], 0)
    group_sums = torch.cat([terms @ members.t(), (members * biases).sum(1)[None]])
    weight = joint.weight[: joint.columns]
    rounding = _rounding_column(joint, p)
    weight, bias, counted = ops.bound_columns(
        weight, joint.bias[: joint.columns], inputs.targets, inputs.target_lengths, chosen.to(torch.int32), group_of,
        share, group_weight, group_sums.contiguous(), rounding, p.blank, max_U1, len(p.durations), columns,
    )  # fmt: skip
    return Bounds(weight, bias, counted, frequent, groups, joint.dtype != joint.wide, _rounding(joint))


def _rounding_column(joint: Joint, p: Problem) -> Tensor:
    """Weights and bias of a column that is at least the sum of |hidden unit * weight| + |bias| of every column."""
    largest = joint.weight.abs().amax(0).to(joint.wide) * (1 + 2.0**-7)  # rounded up to 16 bits
    bias = joint.bias.abs().amax()
    if p.activation == 1:  # tanh: a hidden unit is at most 1, before dropout has scaled it
        bias = bias + largest.sum() / (1 - p.dropout)
        largest = torch.zeros_like(largest)
    return torch.cat([largest, bias[None]])


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
    blocks = max(1, joint.rows_of_tile(columns) // _BLOCK)
    sample_of_block = torch.repeat_interleave(torch.arange(len(rows.blocks)), torch.tensor(rows.blocks))
    sample_of_block = sample_of_block.to(joint.encoder.device, non_blocking=True)
    count = len(sample_of_block)
    blocks = min(blocks, count)
    hidden_room = joint.encoder.new_empty((blocks * _BLOCK, joint.H))
    logits_room = joint.encoder.new_empty((blocks * _BLOCK, columns), dtype=joint.wide)
    emission = (p.vocab, len(p.durations), bounds.frequent, bounds.groups, bounds.split, p.sigma, p.delay_penalty)
    for first in range(0, count, max(1, blocks)):
        last = min(first + blocks, count)
        nodes = rows.nodes(first * _BLOCK, (last - first) * _BLOCK)
        hidden, logits = joint.hidden(nodes, hidden_room), logits_room[: len(nodes)]
        weight = widened(bounds.weight.index_select(0, sample_of_block[first:last]))
        _multiply_blocks(hidden.view(-1, _BLOCK, joint.H), weight, logits.view(-1, _BLOCK, columns))
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


def find_band(
    joint: Joint, bounds: Bounds, inputs: Inputs, p: Problem, extents: tuple[list[int], list[int]], out: "Records"
) -> Found:
    """Fills the records of the nodes of a band, and of all others with log-probabilities of -inf."""
    rows = ValidRows(inputs, extents, _BLOCK)
    B = len(extents[0])
    both = out.node_lp.new_empty((2, *out.node_lp.shape))
    upper, lower = both
    add_bounds(joint, bounds, rows, inputs, p, upper)
    known = torch.zeros(out.row_max.shape, dtype=torch.uint8, device=upper.device)

    ll, alpha_beta = _lattice(upper, inputs.labels, p)
    mass = _mass(upper, alpha_beta, ll, inputs, p)
    nodes, dropped = _select(known, mass, ll, inputs, p, p.tolerance * _FIRST_SHARE)
    computed = len(nodes)
    lower.fill_(-torch.inf)
    if computed > _MOST * rows.valid:
        return all_rows(joint, inputs, p, extents, out)
    records = Records(lower, out.row_max)
    add_records(joint, nodes, inputs, p, records)
    torch.where(known.view(*known.shape, 1).bool(), lower, upper, out=upper)

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
            return all_rows(joint, inputs, p, extents, out)
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


def all_rows(
    joint: Joint, inputs: Inputs, p: Problem, extents: tuple[list[int], list[int]], out: Records
) -> Found:
    """The records of all nodes."""
    rows = ValidRows(inputs, extents)
    for nodes in rows.lists():
        add_records(joint, nodes, inputs, p, out)
    nothing = torch.zeros(len(extents[0]), dtype=torch.float64, device=out.node_lp.device)
    return Found(rows.total, nothing, nothing, None)


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
