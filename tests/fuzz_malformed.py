"""Malformed calls, each drawn from its seed alone: every one must end in a Python exception that says what is wrong, or in the documented NaN.

`check(kernel, seed, device)` draws one and raises AssertionError where something else happens. A crash is the caller's to notice: fuzz.py runs the cases
in processes of their own.
"""

from math import inf, nan

import numpy as np
import test_fused
import torch
from fuzz_valid import Draw
from support.batches import make_batch
from support.calls import Outcome, through_the_ops
from support.comparisons import same_bits

KINDS = (ValueError, TypeError)  # of wrong arguments; wrong use of autograd and of the ops is a RuntimeError
LOSSES = ("tdt_loss", "tdt_loss_joint", "rnnt_loss", "tdt_loss_fused_joint", "rnnt_loss_fused_joint")
FUNCTIONS = (*LOSSES, "tdt_align", "tdt_align_joint", "rnnt_align")
LABELS = ("targets", "logit_lengths", "target_lengths")
LOGITS = ("token_logits", "duration_logits", "logits", "encoder", "decoder", "weight", "bias")


def describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor({value.dtype}, {tuple(value.shape)}, {value.device.type}, {value.layout})"
    return repr(value)[:60]


def expect(call, kinds, words) -> None:
    """The call raises one of these, with one of the words in its message."""
    try:
        result = call()
    except kinds as error:
        assert any(word in str(error) for word in words), (
            f"{type(error).__name__} names none of {words}: {str(error)[:300]}"
        )
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}, not {kinds}: {str(error)[:300]}") from error
    else:
        raise AssertionError(f"no exception, but {describe(result)}")


# Well-formed arguments, to be spoilt


def arguments(draw: Draw, function: str, device: str) -> dict:
    """Arguments of a call that is right, by name; the logits require grad."""
    D = 0 if function.startswith("rnnt") else draw.randint(1, 5)
    B, T, U, V = draw.randint(1, 3), draw.randint(2, 6), draw.randint(1, 4), draw.randint(2, 7)
    durations = tuple(draw.sample(range(D + 1), D)) if D > 1 else (1,) * D
    dtype, seed = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]), draw.getrandbits(60)
    lengths = {
        "logit_lengths": [draw.randint(1, T) for _ in range(B)],
        "target_lengths": [draw.randint(1, U) for _ in range(B)],
    }
    result = {}
    if "fused" in function:
        problem = test_fused.make_problem(B, T, U, V, 5, durations, dtype=dtype, device=device, seed=seed, **lengths)
        result = dict(zip(test_fused.NAMES, problem.operands))
        result |= dict(zip(LABELS, problem.labels))
    else:
        batch = make_batch(B, T, U, V, durations, dtype=dtype, device=device, seed=seed, **lengths)
        if function in ("tdt_loss", "tdt_align"):
            result = {"token_logits": batch.token_logits, "duration_logits": batch.duration_logits}
        else:
            result = {"logits": batch.joint.clone()}
        result |= dict(zip(LABELS, batch.lengths))
    for name in LOGITS:
        if name in result:
            result[name] = result[name].detach().requires_grad_()
    result["blank_token_id"] = draw.randint(-V, V - 1)
    if D:
        result["durations"] = list(durations)
    result["sigma"] = 0.0
    result["delay_penalty"] = 0.0
    if function in LOSSES:
        result |= {"reduction": "none", "fastemit_lambda": 0.0, "clamp": 0.0}
        if D:
            result["omega"] = 0.0
    if "fused" in function:
        result |= {"activation": "relu", "dropout": 0.0, "max_tile_bytes": 1 << 16, "occupancy_threshold": 0.0}
    return result


def junk(draw: Draw):
    things = [None, 3, 1.5, "x", b"x", [1.0], (), {}, object(), np.zeros(3), True, range(2), ..., torch.float32]
    return draw.choice(things)


def spoilt_tensor(draw: Draw, name: str, x: torch.Tensor, device: str) -> tuple:
    """(value, words of the message)"""
    detached, index = x.detach(), name in LABELS
    kind = draw.choice(["junk", "rank", "dtype", "size", "layout"])
    if kind == "junk":
        value = junk(draw)
        return (0 if name == "bias" and value is None else value), (name,)
    if kind == "rank":
        ranks = [detached[0], detached[None], detached.sum(), detached[..., None]]
        return draw.choice(ranks + ([detached.flatten()] if x.dim() > 1 else [])), (name, "duration_logits")
    if kind == "dtype":
        floats = [torch.float32, torch.float64, torch.float16, torch.bool, torch.complex64]
        others = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128]
        return detached.to(draw.choice(floats if index else others)), (name,)
    if kind == "size":
        values = [torch.cat([detached, detached]), detached[:-1]]
        if name == "targets":
            values.append(detached[:, :-1])
        elif name != "bias" and not index:
            values += [
                detached[..., :0],
                torch.cat([detached] * 2, dim=1)[:, :, :0] if x.dim() == 4 else detached[..., :-1],
            ]
        names = (*LABELS, *LOGITS)
        if name == "weight":  # V + D rows: another number is another vocabulary
            return draw.choice(values[2:]), names
        return draw.choice(values), names
    layouts = [detached.to_sparse()]
    if name not in ("logits", "encoder", "token_logits"):  # that is a call on meta tensors, which is fine
        layouts.append(detached.to("meta"))
    if device == "cuda" and not index and name not in ("logits",):
        layouts.append(detached.cpu())
    return draw.choice(layouts), (name, "duration_logits", "decoder")


def spoilt_number(draw: Draw, name: str) -> tuple:
    not_numbers = ["0.1", None, [0.1], True, 1j, torch.tensor(0.5), object(), nan]
    ranges = {
        "sigma": [inf, -inf, 1e9, -1e7],
        "delay_penalty": [inf, -inf, 1e4 + 1, -1e300],
        "omega": [-1e-9, 1.0001, inf, -inf, 3],
        "fastemit_lambda": [-1e-30, -1, inf, 10001],
        "clamp": [inf, -inf],
        "dropout": [1.0, -0.1, inf, 7],
        "max_tile_bytes": [0, -5, inf, -inf],
        "occupancy_threshold": [-1e-30, -inf],
    }
    return draw.choice([*not_numbers, 10**400, *ranges[name]]), (name,)


def spoilt_durations(draw: Draw, good: list[int], function: str) -> tuple:
    values = [
        [],
        (),
        [*good[:-1], -1],
        [0] * len(good),
        list(range(65)),
        [*good[:-1], 1.5],
        [*good[:-1], "1"],
        [*good[:-1], None],
        [*good[:-1], True],
        [*good[:-1], torch.tensor(1.5)],
        [*good[:-1], torch.tensor([1, 2])],
        [*good[:-1], [1]],
        torch.tensor([float(d) for d in good]),
        torch.tensor([good]),
        torch.tensor(1),
        torch.tensor(good).bool(),
        torch.tensor(good, device="meta"),
        np.array([0.5] * len(good)),
        "012",
        3,
        None,
        1.5,
        object(),
    ]
    if function in ("tdt_loss", "tdt_align"):
        values += [[*good, 1], [1, *good, 2]]
    return draw.choice(values), ("durations", "duration_logits")


def wrong_argument(kernel, draw: Draw, device: str) -> str:
    function = draw.choice(FUNCTIONS)
    given = arguments(draw, function, device)
    name = draw.choice([n for n in given for _ in range(1 + isinstance(given[n], torch.Tensor) + (n == "durations"))])
    good = given[name]
    if name in LABELS and draw.maybe(0.4):
        value, words = good.detach().clone(), (name,)
        sample = draw.randrange(len(value))
        wrong = draw.choice([-1, 100, 2**31, 2**33, -(2**62), 2**63 - 1])
        if name == "targets":
            value[sample, draw.randrange(int(given["target_lengths"][sample]))] = wrong
        else:
            value[sample] = wrong
        value = value.cpu()
        if name == "targets":
            given["target_lengths"] = given["target_lengths"].cpu()
        words = (f"{name} must be in",)
    elif isinstance(good, torch.Tensor):
        value, words = spoilt_tensor(draw, name, good, device)
    elif name == "durations":
        value, words = spoilt_durations(draw, good, function)
    elif name == "blank_token_id":
        value, words = (
            draw.choice([100, -100, 2**70, -(2**70), None, 1.5, "0", True, [0], torch.tensor(0.5), nan, 1j]),
            (name,),
        )
    elif name == "reduction":
        value, words = draw.choice(["Mean", "", "average", None, 3, ["none"], b"none", {}, torch.tensor(0)]), (name,)
    elif name == "activation":
        value, words = draw.choice(["gelu", "ReLU", "", None, 0, ["relu"], torch.relu]), (name,)
    else:
        value, words = spoilt_number(draw, name)
    text = f"{function} with {name} = {describe(value)}"
    kinds = (*KINDS, RuntimeError) if name == "durations" and getattr(value, "is_meta", False) else KINDS
    return text, lambda: expect(lambda: getattr(kernel, function)(**(given | {name: value})), kinds, words)


def wrong_flag(kernel, draw: Draw, device: str) -> str:
    function = draw.choice(LOSSES)
    flags = {
        "zero_infinity": True,
        "return_occupancy": "fused" not in function,
        "inplace_grad": function in ("tdt_loss_joint", "rnnt_loss"),
        "return_stats": "fused" in function,
    }
    name = draw.choice([flag for flag, known in flags.items() if known])
    value = draw.choice([0, 1, None, "True", "", 1.0, [], (True,), torch.tensor(True), np.True_, object()])
    given = arguments(draw, function, device) | {name: value}
    text = f"{function} with {name} = {describe(value)}"
    return text, lambda: expect(lambda: getattr(kernel, function)(**given), TypeError, (f"{name} must be True or",))


def no_room_for_the_gradient(kernel, draw: Draw, device: str) -> str:
    function = draw.choice(["tdt_loss_joint", "rnnt_loss"])
    given = arguments(draw, function, device)
    logits = given["logits"].detach()
    alone = logits.shape[0] == 1 or draw.maybe(0.5)
    logits = logits.mT.contiguous().mT if alone else logits[:1].expand_as(logits)
    text = f"{function} with inplace_grad and strides {logits.stride()} of {tuple(logits.shape)}"
    call = lambda: getattr(kernel, function)(**(given | {"logits": logits.requires_grad_()}), inplace_grad=True)  # noqa: E731
    return text, lambda: expect(call, ValueError, ("inplace_grad",))


def too_large(kernel, draw: Draw, device: str) -> str:
    """More nodes than 2^31, of expanded tensors that take no memory."""
    function = draw.choice(FUNCTIONS)
    given = arguments(draw, function, device)
    T, U1 = draw.choice([(1 << 20, 1 << 12), (1 << 12, 1 << 20), (1 << 31, 1), (1 << 30, 3)])
    B = len(given["logit_lengths"])
    given["targets"] = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(B, U1 - 1)
    given["target_lengths"] = torch.zeros_like(given["target_lengths"])
    for name in ("token_logits", "duration_logits", "logits"):
        if name in given:
            given[name] = given[name].detach()[:, :1, :1].expand(-1, T, U1, -1)
    if "encoder" in given:
        T, U1 = 1 << 16, 1 << 16
        given["targets"] = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(B, U1 - 1)
        given["encoder"] = given["encoder"].detach()[:, :1].expand(-1, T, -1)
        given["decoder"] = given["decoder"].detach()[:, :1].expand(-1, U1, -1)
    text = f"{function} with {B} x {T} x {U1} nodes"
    return text, lambda: expect(
        lambda: getattr(kernel, function)(**given), (ValueError, RuntimeError), ("2^31", "memory")
    )


# Values


def run(kernel, function: str, given: dict) -> list[torch.Tensor]:
    """What a call gives for each sample: the loss and the gradients, or the alignment."""
    result = getattr(kernel, function)(**given)
    if "align" in function:
        return list(result)
    leaves = [
        given[name] for name in ("token_logits", "duration_logits", "logits", "encoder", "decoder") if name in given
    ]
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def bad_values(kernel, draw: Draw, device: str) -> str:
    """NaN or +inf at a valid node, or a node without any token: that sample is NaN, no other changes."""
    function = draw.choice(FUNCTIONS)
    given = arguments(draw, function, device)
    if function in LOSSES and draw.maybe(0.3):
        given |= {"fastemit_lambda": 0.3, "clamp": 0.1, "zero_infinity": True}
    name = draw.choice([n for n in ("token_logits", "duration_logits", "logits", "encoder", "decoder") if n in given])
    b = draw.randrange(len(given["logit_lengths"]))
    t, u = draw.randrange(int(given["logit_lengths"][b])), draw.randint(0, int(given["target_lengths"][b]))
    x = given[name].detach().clone()
    place = {"encoder": (b, t), "decoder": (b, u)}.get(name, (b, t, u))
    bad = nan if name in ("encoder", "decoder") else draw.choice([nan, inf, -inf])
    x[(*place, draw.randrange(x.shape[-1]))] = bad
    if bad == -inf:
        x[place] = bad
    spoilt = given | {name: x.requires_grad_()}
    text = f"{function} with {bad} in {name}{list(place)}"

    def verify():
        good, bad_outcome = run(kernel, function, given), run(kernel, function, spoilt)
        assert_one_is_nan(function, good, bad_outcome, b, gradient_is_nan=True)

    return text, verify


def unchanged(function: str, before: torch.Tensor, after: torch.Tensor) -> bool:
    """The bits of a dense function; a product of other rows beside may move the last ones of a fused one."""
    if "fused" not in function:
        return same_bits(before, after)
    unit = 8 * torch.finfo(before.dtype).eps
    return torch.allclose(before, after, rtol=unit, atol=unit * (before.abs().max().item() if before.numel() else 0.0))


def assert_one_is_nan(function: str, good, outcome, b: int, gradient_is_nan: bool) -> None:
    align = "align" in function
    value = outcome[-1] if align else outcome[0]
    assert value[b].isnan(), f"sample {b} has {value[b].item()}, not NaN"
    others = [i for i in range(len(value)) if i != b]
    for before, after in zip(good, outcome):
        assert unchanged(function, before[others], after[others]), "another sample changed"
    if align:
        assert all((x[b] == -1).all() for x in outcome[:-1]), "an alignment of a NaN"
    elif not gradient_is_nan:
        assert all((x[b] == 0).all() for x in outcome[1:]), "a malformed sample has a gradient"


def bad_labels(kernel, draw: Draw, device: str) -> str:
    """Lengths and labels out of range where nobody checks them on the host: NaN, gradient 0, no other sample changes."""
    function = draw.choice([f for f in FUNCTIONS if device == "cuda" or "fused" not in f])
    given = arguments(draw, function, device)
    name, b = draw.choice(LABELS), draw.randrange(len(given["logit_lengths"]))
    value = given[name].clone()
    wrong = draw.choice([-1, 100, 2**31 - 1, -(2**31), 2**33, -(2**62)])
    if name == "targets":
        value[b, draw.randrange(int(given["target_lengths"][b]))] = wrong
    else:
        value[b] = wrong
    text = f"{function} with {wrong} in {name}[{b}], not on the host"

    def verify():
        if device == "cuda":
            outcomes = [run(kernel, function, given | {name: labels}) for labels in (given[name], value)]
        else:
            outcomes = [run_ops(kernel, function, given | {name: labels}) for labels in (given[name], value)]
        assert_one_is_nan(function, *outcomes, b, gradient_is_nan=False)

    return text, verify


def batch_of(given: dict):
    """The arguments as a Batch of conftest."""
    batch = make_batch(durations=given.get("durations", ()))
    D = len(batch.durations)
    if "logits" in given:
        V = given["logits"].shape[-1] - D
        parts = given["logits"].detach().split([V, D], dim=-1)
    else:
        parts = given["token_logits"].detach(), given["duration_logits"].detach()
    labels = {name: given[name] for name in LABELS}
    return batch.replace(
        token_logits=parts[0].contiguous(),
        duration_logits=parts[1].contiguous(),
        blank=given["blank_token_id"],
        **labels,
    )


def run_ops(kernel, function: str, given: dict) -> list[torch.Tensor]:
    batch, ops = batch_of(given), kernel.loss.ops
    V, D = batch.token_logits.shape[-1], len(batch.durations)
    if "align" in function:
        node_lp, _ = ops.log_probs(*batch.op_logits(), *batch.lengths, batch.blank % V, D, 0.0, 0.0)
        return list(ops.align(node_lp, *batch.lengths, list(batch.durations), V))
    outcome: Outcome = through_the_ops(kernel, batch, "joint" if "logits" in given else "separate")
    return [outcome.losses, outcome.grad_tokens, outcome.grad_durations]


# Between forward and backward


def changed_in_between(kernel, draw: Draw, device: str) -> str:
    """torch notices, or the kernel has a copy and the gradient is what it was."""
    function = draw.choice(LOSSES)
    given = arguments(draw, function, device)
    name = draw.choice([n for n in (*LOGITS, *LABELS) if n in given])
    if name in LABELS and draw.maybe(0.3):
        given[name] = given[name].to(torch.int16)
    text = f"{function} with {name} changed in place between forward and backward"

    def verify():
        leaves = [given[n] for n in LOGITS if n in given]
        expected = torch.autograd.grad(getattr(kernel, function)(**given).sum(), leaves)
        loss = getattr(kernel, function)(**given)
        with torch.no_grad():
            given[name].add_(1)
        try:
            grads = torch.autograd.grad(loss.sum(), leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), str(error)
        else:
            assert all(map(same_bits, grads, expected)), "neither an error nor the gradient of what was given"

    return text, verify


def changed_behind_torchs_back(kernel, draw: Draw, device: str) -> str:
    """Labels and lengths that change without torch's notice spoil their own sample at most."""
    function = draw.choice(["tdt_loss", "tdt_loss_joint", "rnnt_loss"])
    given = arguments(draw, function, device)
    name, b = draw.choice(LABELS), draw.randrange(len(given["logit_lengths"]))
    wrong = draw.choice([-1, 0, 1, 3, 5, 100, 2**31 - 1, -(2**40)])
    text = f"{function} with {name}.data[{b}] = {wrong} between forward and backward"

    def verify():
        leaves = [given[n] for n in LOGITS if n in given]
        expected = torch.autograd.grad(getattr(kernel, function)(**given).sum(), leaves)
        loss = getattr(kernel, function)(**given)
        given[name].data[b] = wrong
        others = [i for i in range(len(loss)) if i != b]
        for before, after in zip(expected, torch.autograd.grad(loss.sum(), leaves)):
            assert same_bits(before[others], after[others]), "another sample changed"

    return text, verify


def misused_backward(kernel, draw: Draw, device: str) -> str:
    function = draw.choice(LOSSES)
    given = arguments(draw, function, device)
    kind = draw.choice(["twice", "double", "shape", "in place twice"])
    if kind == "in place twice":
        function = draw.choice(["tdt_loss_joint", "rnnt_loss"])
        given = arguments(draw, function, device) | {"inplace_grad": True}
    leaves = [given[n] for n in LOGITS if n in given]

    def misuse():
        loss = getattr(kernel, function)(**given)
        if kind == "shape":
            return torch.autograd.grad(loss, leaves, torch.ones(7, dtype=loss.dtype, device=device))
        grads = torch.autograd.grad(
            loss.sum(), leaves, create_graph=kind == "double", retain_graph=kind in ("in place twice", "double")
        )
        return torch.autograd.grad(sum(g.sum() for g in grads) if kind == "double" else loss.sum(), leaves)

    words = {
        "twice": "second time",
        "double": "double backward",
        "shape": "shape",
        "in place twice": "modified by an inplace operation",
    }
    return f"{function}: backward {kind}", lambda: expect(misuse, RuntimeError, (words[kind],))


# Ops


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
    tile = batch.joint.flatten(0, 2)[nodes.long()].clone()
    if op == "log_probs_tile_":
        return [tile, nodes, node_lp, row_max, *labels, blank, V, D, 0.0, 0.0]
    if op == "gradient_tile_":
        return [torch.ones_like(loss), weights, tile, nodes, *labels, *saved, blank, V, durations, omega, 0.1, 0.0]
    encoder = torch.ones(batch.token_logits.shape[0], 4, 6, dtype=tile.dtype, device=device)
    decoder, hidden = encoder.clone(), torch.zeros(len(nodes), 6, dtype=tile.dtype, device=device)
    layer = [encoder, decoder, nodes, 0, 0.25, 7]
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


FAMILIES = {
    wrong_argument: 50,
    no_room_for_the_gradient: 1,
    too_large: 2,
    bad_values: 15,
    bad_labels: 12,
    changed_in_between: 6,
    changed_behind_torchs_back: 6,
    misused_backward: 4,
    wrong_op_argument: 27,
    wrong_flag: 3,
}


def check(kernel, seed: str, device: str, skip_fused: bool = False) -> str:
    """Runs the case of a seed; returns what it is, raises AssertionError with that where the outcome is a wrong one."""
    draw = Draw(f"malformed/{seed}")
    family = draw.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    text, verify = family(kernel, draw, device)
    if skip_fused and "fused" in text:
        return f"{text}, left out"
    try:
        verify()
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    return text
