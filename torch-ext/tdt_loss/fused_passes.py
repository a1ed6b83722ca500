"""Forward and backward of the losses without logits, over the rows of the band (band.py), a tile at a time (tiles.py)."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._ops import ops
from .band import BLOCK, NODES_AT_ONCE, Found, Records, all_rows, find_band, make_bounds, pays
from .fakes import allocate_lattice, call, fake_node_occupancy, record_size
from .tiles import SUMMED_ROWS, Inputs, Joint, Problem, Tiles, ValidRows, extents_of, multiply


class Forward(NamedTuple):
    """What a forward gives: as the op `loss` returns it, and how the rows were."""

    outputs: tuple[Tensor, ...]  # loss, node_lp, row_max, ll, alpha_beta, weights
    valid_rows: int
    forward_rows: int
    gap: Tensor  # (B,)
    dropped: Tensor  # (B,) occupancy of the rows that were not computed, at most


def fused_forward(inputs: Inputs, p: Problem, need_grad: bool) -> Forward:
    with torch.autocast(inputs.encoder.device.type, enabled=False):  # every cast is one of ours
        extents = extents_of(inputs)
        joint = Joint(inputs, p)
        shape = (len(joint.encoder), joint.encoder.shape[1], joint.decoder.shape[1])
        records = Records(
            joint.encoder.new_empty((*shape, record_size(len(p.durations))), dtype=joint.wide),
            joint.encoder.new_empty(shape, dtype=joint.wide),
        )
        valid, found = _find_rows(joint, inputs, p, extents, records)
        if found.lattice is None:
            lattice = (records.node_lp, *inputs.labels, p.durations, p.vocab, p.omega, need_grad)
            ll, alpha_beta = call(ops.lattice, allocate_lattice, *lattice)
        else:
            ll, alpha_beta = found.lattice
            alpha_beta = alpha_beta.contiguous() if need_grad else alpha_beta.new_empty((0,))
        loss, weights = ops.reduce(ll, inputs.target_lengths, records.node_lp, p.omega, p.zero_infinity, p.reduction)
        outputs = (loss, *records, ll, alpha_beta, weights)
        return Forward(outputs, valid, found.rows, found.gap, found.dropped)


def _find_rows(
    joint: Joint, inputs: Inputs, p: Problem, extents: tuple[list[int], list[int]], records: Records
) -> tuple[int, Found]:
    """Fills the records; some samples at a time, so that what the search needs beside them stays small."""
    max_U1 = records.row_max.shape[2]
    rows = ValidRows(inputs, extents, BLOCK)
    if not pays(joint, p, rows.valid, max_U1):
        return rows.valid, all_rows(joint, rows.unblocked(inputs), inputs, p, records)
    bounds = make_bounds(joint, rows, inputs, p)
    B, nodes = len(records.row_max), records.row_max[0].numel()
    together = max(1, NODES_AT_ONCE // nodes)
    if together >= B:
        return rows.valid, find_band(joint, bounds, rows, inputs, p, records)
    parts = []
    for first in range(0, B, together):
        own = slice(first, min(first + together, B))
        own_inputs = inputs.of_samples(own)
        part = find_band(
            joint.of_samples(own.start, own.stop),
            bounds.of_samples(own),
            ValidRows(own_inputs, tuple(lengths[own] for lengths in extents), BLOCK),
            own_inputs,
            p,
            Records(*(x[own] for x in records)),
        )
        parts.append(part._replace(lattice=None))
    gap, dropped = (torch.cat([getattr(part, name) for part in parts]) for name in ("gap", "dropped"))
    return rows.valid, Found(sum(part.rows for part in parts), gap, dropped, None)


class _LiveRows:
    """The nodes with occupancy, in the order of their index."""

    def __init__(self, inputs: Inputs, p: Problem, saved: Sequence[Tensor], dropped: Tensor):
        node_lp, _, ll, alpha_beta = saved
        lattice = (p.durations, p.vocab, p.omega, p.fastemit_lambda)
        occupancy = call(ops.node_occupancy, fake_node_occupancy, node_lp, ll, alpha_beta, *inputs.labels, *lattice)
        if p.occupancy_threshold > 0:
            below = occupancy <= p.occupancy_threshold  # NaN is not: the gradients of such a sample are NaN
            dropped = dropped + torch.where(below, occupancy, 0).sum((1, 2), dtype=torch.float64)
            occupancy = torch.where(below, 0, occupancy)
        # Rows of next to no occupancy go too, as long as all of a sample's add up to no more than the tolerance.
        nodes, self.row_of_node, count, less = ops.select_nodes_(
            None, occupancy, ll, *inputs.labels, p.omega, p.tolerance
        )
        self.nodes = nodes[: count.item()]  # the host waits for how many there are
        self.dropped_mass = 2 * (dropped + less).sum()


class Backward(NamedTuple):
    """What a backward gives."""

    grads: list[Optional[Tensor]]  # of the operands that are wanted
    live_rows: int
    dropped_mass: Tensor


def fused_backward(
    grad_loss: Tensor,
    inputs: Inputs,
    p: Problem,
    saved: Sequence[Tensor],
    weights: Tensor,
    dropped: Tensor,
    wanted: Sequence[bool],
) -> Backward:
    """``saved``: node_lp, row_max, ll and alpha_beta of the forward; ``weights``, ``dropped``: its own."""
    with torch.no_grad(), torch.autocast(inputs.encoder.device.type, enabled=False):
        live = _LiveRows(inputs, p, saved, dropped)
        joint = Joint(inputs, p)
        tiles = Tiles(joint, len(live.nodes), gradient=True)
        d_encoder, d_decoder, d_weight, d_bias = sums = [
            torch.zeros_like(x, dtype=joint.wide) if want else None
            for x, want in zip((joint.encoder, joint.decoder, joint.weight, joint.bias), wanted)
        ]
        d_logits_room = tiles.logits if p.dtype == joint.wide else torch.empty_like(tiles.logits, dtype=p.dtype)
        shaping = (p.blank, p.vocab, p.durations, p.omega, p.fastemit_lambda, p.clamp)
        for first, nodes, hidden, logits in tiles.of(live.nodes):
            d_logits = d_logits_room[: len(nodes)]
            pieces = -(-len(nodes) // SUMMED_ROWS)
            column_sums = None if d_bias is None else d_bias.new_empty((pieces, joint.padded))
            ops.gradient_tile_(
                d_logits, column_sums, grad_loss, weights, logits, joint.bias, nodes, *inputs.labels, *saved, *shaping
            )
            if d_bias is not None:
                d_bias += column_sums.sum(0)
            if d_weight is not None:
                multiply(d_logits.t(), hidden, d_weight, accumulate=True)
            if d_encoder is not None or d_decoder is not None:
                d_hidden = joint.hidden_gradient(d_logits, out=hidden)
                hidden_layer = (joint.encoder, joint.decoder, nodes, *joint.options)
                ops.joint_hidden_backward_(d_encoder, d_decoder, d_hidden, *hidden_layer, live.row_of_node, first)
        grads = [None if s is None else s[: len(x)].to(x.dtype) for x, s in zip(inputs.operands, sums)]
        return Backward(grads, len(live.nodes), live.dropped_mass)
