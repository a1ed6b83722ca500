"""Logits of a case: their values, some of their rows at the edge of the dtype, and how they lie in memory."""

from collections.abc import Callable
from math import inf, log10, nan

import torch

from support.fuzzing.draws import Draw


def draw_values(draw: Draw, shape: tuple[int, ...], V: int, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Joint logits, and whether they are larger than any network puts out."""
    generator = draw.generator()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = draw.choices(["normal", "zero", "tiny", "sharp", "shifted", "huge", "extreme"], [12, 1, 1, 4, 1, 1, 1])[0]
    if kind == "normal":
        x *= draw.choice([1.0, 1.0, 1.0, 0.1, 3.0, 10.0])
    elif kind == "zero":
        x *= 0
    elif kind == "tiny":
        x *= 10 ** draw.uniform(-40, -4)
    elif kind == "sharp":  # a few entries win, as in a trained model
        x += (torch.rand(shape, generator=generator) < 0.2) * draw.choice([5.0, 20.0, 80.0])
    elif kind == "shifted":
        x += draw.choice([-1e4, -300.0, 300.0, 1e4])
    elif kind == "huge":
        x *= draw.choice([100.0, 1000.0, 1e4])
    elif kind == "extreme":
        largest = torch.finfo(dtype).max / 4
        rare = torch.rand(shape, generator=generator) < 0.1
        x = torch.where(rare, x.sign() * min(largest, 10 ** draw.uniform(4, 38)), x)
    x = x.clamp(-torch.finfo(dtype).max / 2, torch.finfo(dtype).max / 2)
    if draw.maybe(0.2):  # masked vocabulary: some columns, or some entries; never a whole row
        share = draw.choice([0.05, 0.3, 0.9])
        masked = torch.rand(shape[-1:] if draw.maybe(0.5) else shape, generator=generator) < share
        masked = masked.expand(shape).clone()
        for columns in (slice(0, V), slice(V, None)):
            if masked[..., columns].shape[-1]:
                masked[..., columns][..., draw.randrange(masked[..., columns].shape[-1])] = False
        x[masked] = -inf
    return x.to(dtype), kind in ("shifted", "huge", "extreme")


def draw_rows(draw: Draw, values: torch.Tensor, V: int) -> tuple[torch.Tensor, bool]:
    """The joint logits with some rows shifted, sharp, or masked by the lowest number instead of -inf; and whether they are that."""
    kind = draw.choices(["as they are", "shifted", "sharp", "sharp and shifted", "lowest"], [5, 2, 2, 1, 1])[0]
    if kind == "as they are" or values.numel() == 0:
        return values, False
    generator, largest = draw.generator(), torch.finfo(values.dtype).max
    share, height = draw.choice([0.3, 1.0]), 10 ** draw.uniform(0, log10(largest * 0.9))
    nodes = (*values.shape[:3], 1)

    def uniform(low, high, shape=nodes):
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    parts = []
    for part in values.double().split([V, values.shape[3] - V], dim=-1):
        n, chosen = part.shape[-1], uniform(0, 1) < share
        if "sharp" in kind and n:
            winner = torch.randint(0, n, nodes, generator=generator)
            part = part.scatter_add(-1, winner, uniform(5, 60) * chosen)
        if "shifted" in kind:
            part = part + uniform(-height, height) * chosen
        if kind == "lowest" and n:
            whole = uniform(0, 1) < 0.1
            part = part.where(~chosen | (uniform(0, 1, part.shape) < 0.6) & ~whole, -largest)
        parts.append(part.where(part.isneginf(), part.clamp(-largest, largest)))
    return torch.cat(parts, dim=-1).to(values.dtype), kind == "lowest"


def with_padded_rows(multiple: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of more columns than are used, as a matrix product may want them: [..., :1030] of 1032."""

    def change(x):
        columns = -(-x.shape[-1] // multiple) * multiple
        return torch.full((*x.shape[:-1], columns), nan, dtype=x.dtype, device=x.device)[..., : x.shape[-1]].copy_(x)

    return change


def draw_layout(draw: Draw, dims: int, inplace: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a tensor of `dims` dimensions other strides, with NaN in the gaps."""
    kind = draw.choice(["plain", "permuted", "sliced", "steps", "offset", "sliced and permuted"])
    last = [dims - 1] if inplace else []  # of the order: the innermost stays
    order = draw.sample(range(dims - len(last)), dims - len(last)) + last
    margins = [(draw.randint(0, 2), draw.randint(0, 3)) for _ in range(dims)]
    steps = [draw.choice([1, 1, 2, 3]) for _ in range(dims)]
    if inplace or draw.maybe(0.5):
        steps[-1] = 1
    offset = draw.randint(1, 9)

    def sliced(x):
        size = [low + n + high for n, (low, high) in zip(x.shape, margins)]
        index = tuple(slice(low, low + n) for n, (low, _) in zip(x.shape, margins))
        return torch.full(size, nan, dtype=x.dtype, device=x.device)[index].copy_(x)

    def dense(x):
        return x.clone(memory_format=torch.contiguous_format)

    def permuted(x, change=dense):
        return change(x.permute(order)).permute([order.index(i) for i in range(dims)])

    def change(x):
        if kind == "permuted":
            return permuted(x)
        if kind == "sliced":
            return sliced(x)
        if kind == "sliced and permuted" and not inplace:
            inner = [margins[i] for i in order]
            return permuted(
                x,
                lambda y: torch.nn.functional.pad(y, [n for pair in reversed(inner) for n in pair], value=nan)[
                    tuple(slice(low, low + n) for n, (low, _) in zip(y.shape, inner))
                ],
            )
        if kind == "steps":
            size = [n * step for n, step in zip(x.shape, steps)]
            every = tuple(slice(None, None, step) for step in steps)
            return torch.full(size, nan, dtype=x.dtype, device=x.device)[every].copy_(x)
        if kind == "offset":
            return (
                torch.full((x.numel() + offset,), nan, dtype=x.dtype, device=x.device)[offset:].view(x.shape).copy_(x)
            )
        return dense(x)

    return change


def overlapping(draw: Draw, shape: tuple[int, ...], V: int, dtype: torch.dtype) -> tuple[Callable, bool]:
    """Logits whose elements share memory: an expanded tensor, or sliding windows over one."""
    if draw.maybe(0.7):
        expanded = [draw.maybe(0.5) for _ in shape[:3]]
        base, large = draw_values(draw, (*(min(1, n) if e else n for n, e in zip(shape, expanded)), shape[3]), V, dtype)
        return (lambda device: base.to(device).expand(shape)), large
    strides = [draw.randint(1, 4) for _ in shape[:3]] + [1]
    length = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if min(shape) else 0
    base, large = draw_values(draw, (length,), length, dtype)
    base[base.isneginf()] = 0.0
    return (lambda device: base.to(device).as_strided(shape, strides)), large
