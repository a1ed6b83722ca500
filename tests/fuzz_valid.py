"""Valid calls of every public function, each drawn from its seed alone, held against the float64 oracle.

`check(kernel, seed, device)` draws one and raises AssertionError where the kernel is wrong. Most calls are small; a tail has one large dimension, or
all that `ELEMENTS` and `ORACLE_STEPS` leave room for: the oracle, not the kernel, is what takes the time.

Tolerances are those of conftest, from the log-probabilities of the arcs that matter: how large the logits are does not count. A path beyond `FAINT` nats
may count as none: infinite loss, gradient 0.

A case is what its draws make of it, in their order: what is new is drawn last, or in the place of something else, so that old seeds stay what they are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log10, nan, sqrt

import fuzz_fused
import test_fused
import torch
from conftest import TOLERANCE, Batch, assert_close, assert_log_probs_match, grad_limit, loss_limit, same_bits
from test_align import best_by_recursion

ELEMENTS = 200_000  # of the logits of a case
ORACLE_STEPS = 6_000  # anti-diagonals times arcs of all samples, about 15 us each
FAINT = 2.5e6  # nats; scaled.h: a weight below -2.9e6 counts as 0
REDUCTIONS = ("none", "sum", "mean_batch", "mean", "mean_volume")
INDEX_DTYPES = [
    getattr(torch, name) for name in ("int64", "int32", "int16", "uint8", "int8", "uint16", "uint32", "uint64")
]
FUNCTIONS = {
    "tdt_loss": 5,
    "tdt_loss_joint": 5,
    "rnnt_loss": 4,
    "TDTLoss": 1,
    "tdt_align": 1,
    "tdt_align_joint": 1,
    "rnnt_align": 1,
    "tdt_loss_fused_joint": 2,
    "rnnt_loss_fused_joint": 1,
}  # and how often each is drawn


class Draw(random.Random):
    """A few more distributions. A str seeds the same stream in every version of Python."""

    def maybe(self, probability: float) -> bool:
        return self.random() < probability

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.getrandbits(62))


@dataclass
class Call:
    """A dense case: the batch, and how it reaches the function."""

    function: str
    batch: Batch  # on the CPU, plainly laid out
    place: Callable[[str], list[torch.Tensor]]  # the logits arguments on a device, in the layout of the case
    labels: Callable[[str], list[torch.Tensor]]
    durations: object  # list, tuple, range or tensor
    reduction: str
    upstream: torch.Tensor | float
    flags: dict  # zero_infinity, return_occupancy, inplace_grad
    repeat: bool

    def __str__(self) -> str:
        b = self.batch
        B, T, U1, V = b.token_logits.shape
        options = {**b.options, **self.flags, "sigma": b.sigma, "reduction": self.reduction}
        lengths = f"T={b.logit_lengths.tolist()[:8]} U={b.target_lengths.tolist()[:8]}"
        layout = [(tuple(x.shape), x.stride(), x.storage_offset()) for x in self.place("cpu")]
        return (
            f"{self.function} B,T,U1,V={B, T, U1, V} durations={list(b.durations)} blank={b.blank} {b.token_logits.dtype} "
            f"{lengths} options={options} layout={layout}"
        )


# Shapes, durations, labels


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


# Logits


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


def draw_call(draw: Draw, function: str) -> Call:
    sizes = draw_sizes(draw)
    rnnt, align = function.startswith("rnnt"), "align" in function
    durations = () if rnnt else draw_durations(draw, sizes["T"])
    D = len(durations)
    if align:  # the reference is a loop over nodes and arcs
        sizes |= {"B": min(sizes["B"], 3), "T": min(sizes["T"], 60), "U": min(sizes["U"], 12)}
    sizes = within_budget(sizes, D)
    B, T, U, V = (sizes[name] for name in "BTUV")
    dtype = draw.choices(list(TOLERANCE), [2, 4, 2, 2])[0]
    shape = (B, T, U + 1, V + D)
    joint = rnnt or "joint" in function or function == "TDTLoss"

    flags, options = {}, {}
    if not align and function != "TDTLoss":
        flags = {name: True for name in ("zero_infinity", "return_occupancy") if draw.maybe(0.2)}
        if joint and draw.maybe(0.25):
            flags["inplace_grad"] = True
        options = {
            "fastemit_lambda": draw.choice([0, 0.01, 0.5, 10.0]) if draw.maybe(0.3) else 0.0,
            "clamp": draw.choice([-1.0, 1e-3, 0.1, 10]) if draw.maybe(0.3) else 0.0,
        }
        if not rnnt:
            options["omega"] = draw.choice([0, 1, 0.1, 0.5, 1e-6]) if draw.maybe(0.4) else 0.0
    if function != "TDTLoss" and draw.maybe(0.25):
        options["delay_penalty"] = draw.choice([0.01, -0.3, 2.0, -50.0, 1e4 if T < 100 else 1.0])
    inplace = "inplace_grad" in flags

    if not inplace and draw.maybe(0.1):
        place, large = overlapping(draw, shape, V, dtype)
        values, places, shared = place("cpu").clone(memory_format=torch.contiguous_format), [place], True
    else:
        values, large = draw_values(draw, shape, V, dtype)
        shared = False
        changes = [draw_layout(draw, 4, inplace) for _ in range(1 if joint or draw.maybe(0.3) else 2)]

    blank = draw.randint(-V, V - 1)
    targets = torch.randint(0, V, (B, U), generator=draw.generator())
    logit_lengths, target_lengths = draw_lengths(draw, B, T), draw_lengths(draw, B, U)
    batch = Batch(
        values[..., :V].contiguous(),
        values[..., V:].contiguous(),
        targets,
        torch.tensor(logit_lengths, dtype=torch.int64),
        torch.tensor(target_lengths, dtype=torch.int64),
        blank,
        # Beyond every frame a duration does not land, whatever it is; the oracle adds it to int64 frames.
        tuple(min(d, T + 1) for d in durations),
        draw.choice([0.05, -0.5, 3, 100.0]) if draw.maybe(0.3) and function != "TDTLoss" else 0.0,
        options,
    )
    if not shared and draw.maybe(0.3):  # padding is never read
        values = values.clone()
        values[~batch.valid] = draw.choice([nan, inf, -inf, torch.finfo(dtype).max])
    if targets.shape[1]:
        garbage = draw.choice([0, V, 10**6, -1, -(2**40)])
        beyond = torch.arange(U) >= batch.target_lengths[:, None]
        if draw.maybe(0.3):
            targets = torch.where(beyond, garbage, targets)
    if draw.maybe(0.2):
        targets = torch.nn.functional.pad(targets, (0, draw.randint(1, 4)), value=draw.choice([0, -5, 10**9]))

    def build(device):
        if shared:
            parts = [places[0](device)]
        elif len(changes) == 1:
            parts = [changes[0](values.to(device))]
        else:
            parts = [change(part.to(device)) for change, part in zip(changes, (values[..., :V], values[..., V:]))]
        return parts if joint or len(parts) == 2 else [parts[0][..., :V], parts[0][..., V:]]

    indices = [as_index(draw, x) for x in (targets, batch.logit_lengths, batch.target_lengths)]
    reduction = "none" if large or draw.maybe(0.5) else draw.choice(REDUCTIONS)
    each = torch.randn(B, generator=draw.generator(), dtype=torch.float64) * draw.choice([1.0, 1.0, 100.0])
    upstream, repeat = each if reduction == "none" else draw.choice([1.0, -2.5, 128.0]), draw.maybe(0.15)
    if not shared:
        values, lowest = draw_rows(draw, values, V)
        batch = batch.replace(token_logits=values[..., :V].contiguous(), duration_logits=values[..., V:].contiguous())
        if lowest:  # whose sums overflow
            reduction, upstream = "none", each
        if draw.maybe(0.15):
            changes = [with_padded_rows(draw.choice([4, 8]))] * len(changes)
    return Call(
        function,
        batch,
        build,
        lambda device: [index(device) for index in indices],
        durations_argument(draw, durations) if durations else (),
        reduction,
        upstream,
        flags,
        repeat,
    )


# Checks


def check(kernel, seed: str, device: str, skip_fused: bool = False) -> str:
    """Runs the case of a seed; returns what it is, raises AssertionError with that where the kernel is wrong."""
    draw = Draw(f"valid/{seed}")
    function = draw.choices(list(FUNCTIONS), list(FUNCTIONS.values()))[0]
    if "fused" in function:
        if skip_fused:
            return f"{function}, left out"
        return check_fused(kernel, draw, function, device)
    case = draw_call(draw, function)
    try:
        (check_alignment if "align" in function else check_loss)(kernel, case, device)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
    return str(case)


def run_loss(kernel, case: Call, device: str):
    """(loss, occupancy, gradients of the logits arguments, the arguments)"""
    leaves = [x.detach().requires_grad_() for x in case.place(device)]
    labels, batch = case.labels(device), case.batch
    options = {**batch.options, **case.flags}
    if case.function == "TDTLoss":
        V = batch.token_logits.shape[3]
        parts = leaves[0][..., :V], leaves[0][..., V:]
        loss = kernel.layers.TDTLoss()(*parts, *labels, batch.blank, case.durations, batch.sigma, case.reduction)
    elif case.function == "rnnt_loss":
        loss = kernel.rnnt_loss(*leaves, *labels, batch.blank, case.reduction, sigma=batch.sigma, **options)
    else:
        function = getattr(kernel, case.function)
        loss = function(*leaves, *labels, batch.blank, case.durations, batch.sigma, case.reduction, **options)
    loss, occupancy = loss if "return_occupancy" in case.flags else (loss, None)
    grads = torch.autograd.grad(loss, leaves, torch.as_tensor(case.upstream, dtype=loss.dtype, device=loss.device))
    return loss.detach(), occupancy, grads, leaves


def weights_of(case: Call) -> torch.Tensor:
    """(B,) d (what is differentiated) / d losses."""
    B, U = len(case.batch.logit_lengths), case.batch.target_lengths.double()
    upstream = torch.as_tensor(case.upstream, dtype=torch.float64).expand(B)
    each = {
        "none": torch.ones_like(U),
        "sum": torch.ones_like(U),
        "mean_batch": torch.full_like(U, 1 / max(B, 1)),
        "mean": 1 / max(B, 1) / U.clamp(min=1),
        "mean_volume": (1 / U.sum().clamp(min=1)).expand(B),
    }
    return upstream * each[case.reduction]


def check_loss(kernel, case: Call, device: str) -> None:
    batch, tolerance = case.batch, TOLERANCE[case.batch.token_logits.dtype]
    before = [surroundings(x) for x in case.place(device)]
    loss, occupancy, grads, leaves = run_loss(kernel, case, device)
    assert loss.dtype == (torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32)
    if "inplace_grad" in case.flags:
        assert grads[0].data_ptr() == leaves[0].data_ptr(), "the gradient is not where the logits were"
        assert all(same_bits(*pair) for pair in zip(before, map(surroundings, leaves))), "wrote beside the logits"
    else:
        assert all(same_bits(x.detach(), y) for x, y in zip(leaves, case.place(device))), "the logits were modified"
    if case.repeat:
        again = run_loss(kernel, case, device)
        assert same_bits(loss, again[0]) and all(map(same_bits, grads, again[2])), "the same call gave other bits"

    losses = batch.expected.losses
    faint = losses.isfinite() & (losses > FAINT)
    if case.flags.get("zero_infinity"):
        losses = torch.where(losses == inf, 0.0, losses)
    weights, slack = weights_of(case), loss_limit(batch)
    if case.reduction == "none":
        expected = losses
        lost = faint & (loss.cpu() == (0.0 if case.flags.get("zero_infinity") else inf))
    else:
        assert loss.shape == ()
        each = weights / (case.upstream or 1.0)
        expected, slack, lost = (
            (losses * each).sum(),
            (slack * each).nan_to_num(nan=0.0, posinf=0.0).sum(),
            torch.zeros(len(losses), dtype=torch.bool),
        )
        if len(losses) == 0 and case.reduction != "sum":
            expected = loss.cpu().double()  # the mean of nothing
    assert_close("loss", loss, expected, slack, lost if case.reduction == "none" else None)

    V = batch.token_logits.shape[3]
    parts = grads if len(grads) == 2 else (grads[0][..., :V], grads[0][..., V:])
    slack = grad_limit(batch)
    stretch = slack * (1 + batch.option("fastemit_lambda"))
    for name, actual, of in zip(("tokens", "durations"), parts, (batch.token_logits, batch.duration_logits)):
        actual = actual.cpu()
        assert actual.dtype == of.dtype and actual.shape == of.shape
        assert (actual[~batch.valid] == 0).all(), f"gradient of {name}: not exactly 0 in the padding"
        masked = of.isneginf() & batch.valid[..., None]
        assert (actual[masked] == 0).all(), f"gradient of {name}: not exactly 0 where masked"
        wanted = getattr(batch.expected, f"grad_{name}") * weights[:, None, None, None]
        finest = torch.finfo(of.dtype).tiny * torch.finfo(of.dtype).eps
        atol = (stretch * weights.abs())[:, None, None, None] + finest + tolerance.rounding * wanted.abs()
        assert_close(f"gradient of {name}", actual, wanted, atol, faint[:, None, None, None].expand(wanted.shape))
        assert (actual[lost] == 0).all()
    if occupancy is not None:  # of the first lattice, which may be fainter than the mixture of omega is
        first = -batch.expected.ll[0]
        faint = first.isfinite() & (first > FAINT)
        for name, actual, wanted in zip(
            ("blank", "label"), occupancy, (batch.expected.blank_occ, batch.expected.label_occ)
        ):
            shape = (-1,) + (1,) * (wanted.dim() - 1)
            assert_close(
                f"occupancy of {name}", actual, wanted, slack.view(shape), faint.view(shape).expand(wanted.shape)
            )


def surroundings(x: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, with zeros where the tensor is."""
    x = x.detach()
    size = x.untyped_storage().nbytes() // x.element_size()
    copy = x.as_strided((size,), (1,), 0).clone()
    copy.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    return copy


def check_alignment(kernel, case: Call, device: str) -> None:
    """The record of every node against the oracle; frames, durations and score, to the last bit, against a search over these records."""
    batch = case.batch
    logits, labels, durations = case.place(device), case.labels(device), list(batch.durations)
    delay_penalty, D = batch.option("delay_penalty"), len(batch.durations)
    if D:
        result = getattr(kernel, case.function)(
            *logits, *labels, batch.blank, case.durations, batch.sigma, delay_penalty=delay_penalty
        )
        frames, steps, score = result
    else:
        frames, score = kernel.rnnt_align(*logits, *labels, batch.blank, sigma=batch.sigma, delay_penalty=delay_penalty)
        steps = None
    wide = [x.to(logits[0].device, torch.int64) for x in labels]
    V = batch.token_logits.shape[3]
    # Where they lie: a row that starts elsewhere may be summed in another order.
    rows = [kernel.checks.with_dense_rows(x) for x in logits]
    node_lp, _ = kernel.loss.ops.log_probs(
        rows[0], rows[1] if len(rows) == 2 else None, *wide, batch.blank % V, D, batch.sigma, delay_penalty
    )
    node_lp = node_lp.cpu()
    assert_log_probs_match(node_lp, batch)
    assert frames.shape == labels[0].shape and score.shape == batch.logit_lengths.shape
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        best = best_by_recursion(node_lp[b, :T, : U + 1].double().numpy(), durations)
        padding = [-1] * (frames.shape[1] - len(best.frames))
        assert frames[b].tolist() == best.frames + padding, (
            f"sample {b}: frames {frames[b].tolist()}, not {best.frames}"
        )
        assert steps is None or steps[b].tolist() == best.durations + padding, f"sample {b}: durations"
        assert score[b].item() == torch.tensor(best.score, dtype=score.dtype).item(), f"sample {b}: score"


# The fused losses


def check_fused(kernel, draw: Draw, function: str, device: str) -> str:
    sizes = draw_sizes(draw)
    durations = () if function.startswith("rnnt") else draw_durations(draw, sizes["T"])
    sizes = within_budget(sizes, len(durations))
    B, T, U, V = (sizes[name] for name in "BTUV")
    H = draw.choice([1, 3, 8, 24, 64])
    dtype = draw.choices(list(TOLERANCE), [2, 4, 1, 1])[0]
    narrow = dtype.itemsize == 2
    options = {}
    if not narrow:
        for name, values in (
            ("fastemit_lambda", [0.01, 0.5]),
            ("clamp", [0.01, 0.2]),
            ("delay_penalty", [0.1, -2.0]),
            ("omega", [0.3, 1.0]),
        ):
            if draw.maybe(0.25) and (durations or name != "omega"):
                options[name] = draw.choice(values)
    problem = test_fused.make_problem(
        max(B, 0),
        T,
        U,
        max(V, 2),
        H,
        tuple(min(d, T + 1) for d in durations),
        dtype=dtype,
        device=device,
        seed=draw.getrandbits(62),
        scale=draw.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        bias=draw.maybe(0.8),
        logit_lengths=draw_lengths(draw, B, T),
        target_lengths=draw_lengths(draw, B, U),
        activation=draw.choice(["relu", "tanh"]),
        sigma=0.0 if narrow else draw.choice([0.0, 0.05]),
        options=options,
    )
    problem = problem.replace(blank=draw.randint(-problem.vocab, problem.vocab - 1))
    dropout = draw.choice([0.0, 0.0, 0.3]) if not narrow else 0.0
    extra = {
        "max_tile_bytes": draw.choice(
            [1 if problem.nodes < 200 else 1 << 14, problem.tile_bytes * draw.randint(8, 60), 1 << 20]
        ),
        "zero_infinity": draw.maybe(0.2),
        "tolerance": 0.0,  # fuzz_fused.py draws others
    }
    changes = [draw_layout(draw, dims, False) for dims in (3, 3, 2, 1)]
    laid_out = problem.replace(
        **{
            name: None if x is None else change(x)
            for name, x, change in zip(test_fused.NAMES, problem.operands, changes)
        }
    )
    upstream = torch.randn(B, generator=draw.generator(), dtype=torch.float64)
    seed = draw.getrandbits(30)
    text = (
        f"{function} B,T,U,V,H={B, T, U, problem.vocab, H} {durations=} blank={problem.blank} {dtype} "
        f"T={problem.logit_lengths.tolist()[:8]} U={problem.target_lengths.tolist()[:8]} {problem.activation} {options} {extra} {dropout=}"
    )
    try:
        torch.manual_seed(seed)
        outcome = test_fused.fused(
            kernel, laid_out, upstream=upstream.to(device, _sum_dtype(dtype)), dropout=dropout, **extra
        )
        factors = None
        if dropout and B * T:
            torch.manual_seed(seed)
            drawn = int(torch.randint(2**63 - 1, ()))
            factors = test_fused.draw(
                kernel, dropout, drawn, B=B, T=T, U1=U + 1, H=H, dtype=torch.float64, device=device
            ).cpu()
        compare_fused(kernel, problem, outcome, upstream, factors, extra)
        del extra["tolerance"]
        upstream = upstream.to(device, _sum_dtype(dtype))
        call = {"dropout": dropout, "factors": factors, "seed": seed, **extra}
        text += f" {fuzz_fused.check_tolerance(kernel, draw, problem, upstream, **call)}"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    return text


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare_fused(kernel, problem, outcome, upstream, factors, extra) -> None:
    """Loss by sample, gradients in norm; 16-bit ones beside those of the dense pipeline, whose logits are rounded as often."""
    reference = test_fused.expected(problem, upstream, factors)
    operands = [None if x is None else x.double().cpu() for x in problem.operands]
    B, T, U1 = len(problem.logit_lengths), problem.encoder.shape[1], problem.decoder.shape[1]
    hidden = getattr(torch, problem.activation)(operands[0][:, :, None] + operands[1][:, None])
    logits = test_fused.logits_of(operands, problem.activation, factors)
    largest = max([1.0, *(x.abs().max().item() for x in (logits, hidden) if x.numel())])
    largest = max(largest, abs(problem.options.get("delay_penalty", 0.0)) * T / 2)
    path = max(1.0, sqrt(T + U1) / 8)
    dtype = problem.encoder.dtype
    narrow = dtype.itemsize == 2
    unit = torch.finfo(dtype).eps * 4 if narrow else test_fused.TOLERANCE[dtype]
    losses = torch.where(reference.loss == inf, 0.0, reference.loss) if extra["zero_infinity"] else reference.loss
    assert outcome.loss.dtype == _sum_dtype(dtype)
    assert_close("loss", outcome.loss, losses, unit * (losses.abs() + largest * path))
    assert outcome.stats.valid_rows == problem.nodes
    # The size of what is summed: a gradient may cancel to nothing, and its error does not.
    sizes = {
        "encoder": operands[2].norm().item(),
        "decoder": operands[2].norm().item(),
        "weight": hidden.norm().item(),
        "bias": sqrt(problem.nodes),
    }
    summed = 2**-50 * losses[losses.isfinite()].abs().max().item() if losses.isfinite().any() else 0.0
    strength = (1 + problem.options.get("fastemit_lambda", 0.0)) * (upstream.abs().max().item() if B else 0.0)
    for name, expected in reference.grads.items():
        actual = outcome.grads[name].double().cpu()
        assert outcome.grads[name].dtype == dtype and actual.shape == expected.shape
        error, size = (actual - expected).norm().item(), expected.norm().item()
        allowed = (unit * largest + summed) * path * (size + strength * max(1.0, sizes[name])) * 2
        assert error <= allowed, f"gradient of {name}: error {error:.3g} of {size:.3g}, allowed {allowed:.3g}"
