"""Ops called directly with one wrong argument: an exception, and one that says something."""

from math import inf, nan

import torch

from support.batches import make_batch
from support.fuzzing.arguments import KINDS, describe
from support.fuzzing.draws import Draw


def op_arguments(kernel, draw: Draw, device: str, op: str) -> list:
    """Arguments of an op, in the order of its schema, as a forward leaves them."""
    ops = kernel.loss.ops
    api, omega = draw.choice(["joint", "separate"]), draw.choice([0.0, 0.4])
    batch = make_batch(
        draw.randint(2, 3),
        4,
        3,
        5,
        draw.choice([(), (0, 1, 2)]) if op != "gradient_" else (0, 1, 2),
        device=device,
        dtype=draw.choice([torch.float32, torch.float64]),
        seed=draw.getrandbits(60),
        omega=omega,
    )
    if not batch.durations:
        batch, omega = batch.without_durations(), 0.0
    V, durations, D = batch.token_logits.shape[-1], list(batch.durations), len(batch.durations)
    labels, blank = batch.lengths, batch.op_arcs[0]
    loss, *saved, weights = ops.loss(*batch.loss_op_args(api, reduction=draw.choice([0, 1])))
    node_lp, row_max, ll, alpha_beta = saved
    if op == "loss":
        return list(batch.loss_op_args(api))
    if op == "log_probs":
        return [*batch.op_logits(api), *labels, blank, D, 0.0, 0.0]
    if op == "lattice":
        return [node_lp, *labels, durations, V, omega, True]
    if op == "reduce":
        return [ll, labels[2], node_lp, omega, False, 1]
    if op in ("gradient", "gradient_"):
        full = list(
            batch.gradient_op_args("joint" if op == "gradient_" else api, torch.ones_like(loss), weights, *saved)
        )
        if op == "gradient_":
            del full[3]
            full[2] = full[2].clone()
        return full
    if op == "occupancy":
        _, first, _, first_ll, first_ab, _ = ops.loss(*batch.replace(options={}).loss_op_args(api))
        return [first, first_ll, first_ab, *labels, durations, V]
    if op == "align":
        return [node_lp, *labels, durations, V]
    if op == "node_occupancy":
        return [node_lp, ll, alpha_beta, *labels, durations, V, omega, 0.1]
    nodes = torch.arange(0, batch.valid.numel(), 2, dtype=torch.int32, device=device)
    tile = torch.nn.functional.pad(batch.joint.flatten(0, 2)[nodes.long()], (0, -(V + D) % 8))
    bias = torch.ones_like(tile[0])
    if op == "log_probs_tile_":
        return [tile, bias, nodes, node_lp, row_max, *labels, blank, V, D, 0.0, 0.0]
    if op == "gradient_tile_":
        pieces = [torch.empty_like(tile), tile.new_empty(-(-len(tile) // 32), tile.shape[1])]
        return [*pieces, torch.ones_like(loss), weights, tile, bias, nodes, *labels, *saved, blank, V, durations, omega, 0.1, 0.0]
    encoder = torch.ones(batch.token_logits.shape[0], 4, 6, dtype=tile.dtype, device=device)
    decoder, hidden = encoder.clone(), torch.zeros(len(nodes), 6, dtype=tile.dtype, device=device)
    layer = [encoder, decoder, nodes, 0, 0.25, 7, 0]
    if op == "joint_hidden_":
        return [hidden, *layer]
    row_of_node = torch.full((batch.valid.numel(),), -1, dtype=torch.int32, device=device)
    row_of_node[nodes.long()] = torch.arange(len(nodes), dtype=torch.int32, device=device)
    return [torch.zeros_like(encoder), torch.zeros_like(decoder), hidden, *layer, row_of_node, 0]


OPS = (
    "loss",
    "log_probs",
    "lattice",
    "reduce",
    "gradient",
    "gradient_",
    "occupancy",
    "align",
    "node_occupancy",
    "log_probs_tile_",
    "gradient_tile_",
    "joint_hidden_",
    "joint_hidden_backward_",
)
# Arguments of ops that are numbers, and values they may not have.
NUMBERS = {
    "blank": [-1, 5, 2**31, 2**40, -(2**63)],
    "num_durations": [-1, -7, 65, 10**6, 2**40],
    "omega": [-0.1, 1.5, nan, inf],
    "reduction": [-1, 5, 2**40],
    "activation": [-1, 2, 2**32],
    "dropout": [-0.1, 1.0, nan],
}
ANY_LAYOUT = ("targets", "logit_lengths", "target_lengths", "grad_loss")


def wrong_op_argument(kernel, draw: Draw, device: str) -> str:
    op = draw.choice(OPS)
    values = op_arguments(kernel, draw, device, op)
    names = [argument.name for argument in getattr(kernel.loss.ops, op).default._schema.arguments]
    candidates = [
        i
        for i, (n, v) in enumerate(zip(names, values))
        if (isinstance(v, torch.Tensor) and n != "like") or n in NUMBERS
    ]
    if "durations" in names:
        candidates.append(names.index("durations"))
    i = draw.choice([i for i in candidates if not (op == "reduce" and names[i] == "omega")])
    name, good = names[i], values[i]
    if name == "durations":
        value = draw.choice(
            [[-1] * max(1, len(good)), list(range(65)), [2**64] * max(1, len(good)), [1] * 40, [1.5], None]
        )
    elif name in NUMBERS:
        value = draw.choice(NUMBERS[name])
    else:
        choices = [good.to(torch.int8), good.to(torch.complex64), "x", 5]
        if good.dim() == 0:
            choices.append(good.expand(9))
        elif good.numel():
            choices.append(good.sum())
            if name != "ll" or op != "reduce":
                choices.append(torch.cat([good, good]))
            if name != "weights":
                choices.append(good[:0])
        gaps = torch.stack([good, good], dim=-1)[..., 0]
        dense = gaps.is_contiguous() or (gaps.dim() > 0 and gaps.shape[-1] == 1)
        if name not in ANY_LAYOUT and not dense:
            choices.append(gaps)
        if device == "cuda":
            choices.append(good.cpu())
        elif name == "nodes":  # of which the host knows that they lie outside
            outside = good.clone()
            outside[draw.randrange(len(good))] = draw.choice([-1, 10**6, 2**31 - 1, -(2**31)])
            choices.append(outside)
        if name == "grad_loss" and good.dim() == 1:
            choices = [choice for choice in choices if not (isinstance(choice, torch.Tensor) and choice.dim() == 0)]
        value = draw.choice(choices)
    text = f"op {op} with {name} = {describe(value)}"

    def call():
        return getattr(kernel.loss.ops, op)(*values[:i], value, *values[i + 1 :])

    def verify():
        try:
            result = call()
        except (RuntimeError, *KINDS) as error:
            assert str(error) and "API call failed" not in str(error), f"the message says nothing: {str(error)[:300]}"
        else:
            raise AssertionError(f"no exception, but {describe(result)}")

    return text, verify
