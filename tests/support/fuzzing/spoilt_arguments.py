"""Arguments of the wrong type, shape, dtype, layout or size: an exception that names the argument or the rule."""

from math import inf, nan

import numpy as np
import torch

from support.fuzzing.arguments import FUNCTIONS, KINDS, LABELS, LOGITS, LOSSES, arguments, describe, expect
from support.fuzzing.draws import Draw


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


def gradient_that_does_not_fit(kernel, draw: Draw, device: str) -> str:
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
