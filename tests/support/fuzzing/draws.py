"""Sizes, durations, lengths and integers of a case, drawn from its seed."""

import random
from collections.abc import Callable

import torch

ELEMENTS = 200_000  # of the logits of a case
ORACLE_STEPS = 6_000  # anti-diagonals times arcs of all samples, about 15 us each
INDEX_DTYPES = [
    getattr(torch, name) for name in ("int64", "int32", "int16", "uint8", "int8", "uint16", "uint32", "uint64")
]


class Draw(random.Random):
    """A few more distributions. A str seeds the same stream in every version of Python."""

    def maybe(self, probability: float) -> bool:
        return self.random() < probability

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.getrandbits(62))


def draw_sizes(draw: Draw) -> dict[str, int]:
    kind = draw.choices(
        ["tiny", "small", "long", "wide", "many labels", "many samples", "large", "parakeet"],
        [40, 40, 4, 4, 4, 4, 2, 2],
    )[0]
    sizes = {"B": draw.randint(1, 4), "T": draw.randint(0, 8), "U": draw.randint(0, 5), "V": draw.randint(1, 12)}
    if kind == "tiny" and draw.maybe(0.05):
        sizes["B"] = 0
    if kind != "tiny":
        sizes |= {"T": draw.randint(1, 40), "U": draw.randint(0, 20), "V": draw.randint(2, 80)}
    if kind == "long":
        sizes |= {"B": draw.randint(1, 2), "T": int(10 ** draw.uniform(2, 3.5)), "U": draw.randint(0, 5)}
    if kind == "wide":
        sizes |= {"V": int(10 ** draw.uniform(2, 4.5)), "T": draw.randint(1, 8), "U": draw.randint(0, 4)}
    if kind == "many labels":
        sizes |= {"B": draw.randint(1, 2), "U": int(10 ** draw.uniform(1.5, 3.2)), "T": draw.randint(1, 12)}
    if kind == "many samples":
        sizes |= {
            "B": int(10 ** draw.uniform(1, 2.7)),
            "T": draw.randint(0, 4),
            "U": draw.randint(0, 3),
            "V": draw.randint(1, 20),
        }
    if kind == "large":
        sizes |= {"T": draw.randint(40, 200), "U": draw.randint(10, 60), "V": draw.randint(30, 1100)}
    if kind == "parakeet":
        sizes |= {"T": draw.randint(1, 12), "U": draw.randint(0, 5), "V": draw.choice([1024, 1025, 1026, 1030])}
    return sizes


def within_budget(sizes: dict[str, int], D: int) -> dict[str, int]:
    """The sizes, the largest halved until the case is affordable."""
    sizes = dict(sizes)
    while True:
        B, T, U, V = (sizes[name] for name in "BTUV")
        too_much = B * T * (U + 1) * (V + D) > ELEMENTS
        too_slow = ORACLE_STEPS * (1 + 2 * (max(sizes.values()) > 500)) < B * (T + U + 8) * (D + 3)
        if not too_much and not too_slow:
            return sizes
        names = [name for name in "BTUV" if sizes[name] > 1 and (too_much or name != "V")]
        largest = max(names, key=lambda name: sizes[name] if not too_slow or name != "B" else 4 * sizes[name])
        sizes[largest] //= 2


def draw_durations(draw: Draw, T: int) -> tuple[int, ...]:
    top = draw.choice([1, 2, 4, 4, 4, 8, max(1, T)])
    kind = draw.choices(
        ["all", "gaps", "no zero", "duplicates", "beyond", "one", "64", "repeated zero"], [8, 4, 3, 2, 2, 2, 0.6, 1]
    )[0]
    durations = list(range(top + 1))
    if kind == "gaps":
        durations = sorted({0, draw.randint(1, 5), draw.randint(2, 20), draw.randint(2, 20)})
    elif kind == "no zero":
        durations = draw.sample(range(1, 9), draw.randint(1, 4))
    elif kind == "duplicates":
        durations = draw.choices(range(5), k=draw.randint(2, 8))
    elif kind == "beyond":
        durations += draw.choices([T, T + 1, 1000, 2**31 - 1, 2**31, 2**40, 2**62], k=draw.randint(1, 3))
    elif kind == "one":
        durations = [draw.choice([1, 1, 2, 3])]
    elif kind == "64":
        durations = draw.choices(range(70), k=64)
    elif kind == "repeated zero":
        durations = [0, 0, *range(draw.randint(1, 3))]
    if len(durations) > 24 and kind != "64":
        durations = durations[:24]
    if not any(durations):
        durations[-1] = 1
    if draw.maybe(0.25):
        draw.shuffle(durations)
    return tuple(durations)


def durations_argument(draw: Draw, durations: tuple[int, ...]) -> object:
    tensor_dtype = (
        torch.int64 if max(durations, default=0) > 255 else draw.choice([torch.int64, torch.int32, torch.uint8])
    )
    return draw.choice([list(durations), list(durations), durations, torch.tensor(durations, dtype=tensor_dtype)])


def draw_lengths(draw: Draw, B: int, most: int) -> list[int]:
    if draw.maybe(0.3):
        return [most] * B
    low = draw.choice([0, min(1, most), most // 2])
    return [draw.randint(low, most) for _ in range(B)]


def as_index(draw: Draw, tensor: torch.Tensor) -> Callable[[str], torch.Tensor]:
    """The integers in some dtype that holds them, with some strides; on the device or, now and then, on the host."""
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    dtype = draw.choice([d for d in INDEX_DTYPES if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max])
    on_host, kind = draw.maybe(0.2), draw.choice(["plain", "plain", "steps", "transposed"])

    def build(device: str) -> torch.Tensor:
        x = tensor.to(dtype).to("cpu" if on_host else device)
        if kind == "steps":
            return torch.stack([x, x], dim=-1)[..., 0]
        return x.mT.contiguous().mT if kind == "transposed" and x.dim() == 2 else x

    return build
