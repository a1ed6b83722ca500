"""Calls of the dense losses and of the alignments, drawn and held against the oracle.

A path beyond `FAINT` nats may count as none: infinite loss, gradient 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan

import torch

from support.alignment import best_by_recursion
from support.batches import Batch
from support.comparisons import assert_close, assert_log_probs_match, same_bits
from support.fuzzing.draws import (
    Draw,
    as_index,
    draw_durations,
    draw_lengths,
    draw_sizes,
    durations_argument,
    within_budget,
)
from support.fuzzing.logits import draw_layout, draw_rows, draw_values, overlapping, with_padded_rows
from support.tolerances import TOLERANCE, grad_limit, loss_limit

FAINT = 2.5e6  # nats; scaled.h: a weight below -2.9e6 counts as 0
REDUCTIONS = ("none", "sum", "mean_batch", "mean", "mean_volume")


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


def draw_options(draw: Draw, function: str, T: int) -> tuple[dict, dict]:
    """(flags, numbers) of a function, those that it has."""
    rnnt, align = function.startswith("rnnt"), "align" in function
    flags, options = {}, {}
    if not align and function != "TDTLoss":
        flags = {name: True for name in ("zero_infinity", "return_occupancy") if draw.maybe(0.2)}
        if (rnnt or "joint" in function) and draw.maybe(0.25):
            flags["inplace_grad"] = True
        options = {
            "fastemit_lambda": draw.choice([0, 0.01, 0.5, 10.0]) if draw.maybe(0.3) else 0.0,
            "clamp": draw.choice([-1.0, 1e-3, 0.1, 10]) if draw.maybe(0.3) else 0.0,
        }
        if not rnnt:
            options["omega"] = draw.choice([0, 1, 0.1, 0.5, 1e-6]) if draw.maybe(0.4) else 0.0
    if function != "TDTLoss" and draw.maybe(0.25):
        options["delay_penalty"] = draw.choice([0.01, -0.3, 2.0, -50.0, 1e4 if T < 100 else 1.0])
    return flags, options


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

    flags, options = draw_options(draw, function, T)
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
    batch = case.batch
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

    check_gradients(batch, grads, weights, faint, lost)
    if occupancy is not None:
        check_occupancy(batch, occupancy)


def check_gradients(batch: Batch, grads: tuple, weights: torch.Tensor, faint: torch.Tensor, lost: torch.Tensor) -> None:
    """Against the oracle's times `weights`; anything where a sample is `faint`, but 0 where its loss is that of `lost`."""
    tolerance = TOLERANCE[batch.token_logits.dtype]
    V = batch.token_logits.shape[3]
    parts = grads if len(grads) == 2 else (grads[0][..., :V], grads[0][..., V:])
    stretch = grad_limit(batch) * (1 + batch.option("fastemit_lambda"))
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


def check_occupancy(batch: Batch, occupancy: tuple[torch.Tensor, ...]) -> None:
    """Of the first lattice, which may be fainter than the mixture of omega is."""
    first, slack = -batch.expected.ll[0], grad_limit(batch)
    faint = first.isfinite() & (first > FAINT)
    for name, actual, wanted in zip(
        ("blank", "label"), occupancy, (batch.expected.blank_occ, batch.expected.label_occ)
    ):
        shape = (-1,) + (1,) * (wanted.dim() - 1)
        assert_close(f"occupancy of {name}", actual, wanted, slack.view(shape), faint.view(shape).expand(wanted.shape))


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
