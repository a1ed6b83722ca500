#!/usr/bin/env python3
"""Time joint network and loss, fused against one after the other, and measure how their memory grows with the batch.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/fused.py [--cases ft-v3 ...] [--tiles]

Forward and backward of `weight @ relu(f_t + g_u) + bias` and its loss, bfloat16, H = 640. "random": normal logits. "all live":
the same, with backward made to compute every valid row. "sharp": a lattice as a trained model has it, in which each decision of
one random alignment is favoured by 10 nats. The rows that are live in backward are counted. Every pipeline is verified against
float64 before it is timed; times are medians, 20th and 80th percentiles. TFLOP/s are those of 8 * rows * H * (V + D) over all valid
rows, and of what was computed: 2 forward, 6 backward for each live row. Adds its rows to benchmarks/results/<gpu>-fused.json, in
place of older ones of the same cases, and draws the memory beside it as PNG.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kernels import get_kernel
from records import REPO, RESULTS, commit, slug
from timing import peak_extra_bytes, times_of

sys.path.insert(0, str(REPO / "tests"))  # the oracle's

H = 640
NATS = 10.0  # by which a sharp lattice favours each decision
CODE = 16  # hidden units that spell a token in it


@dataclass(frozen=True)
class Case:
    name: str
    B: int
    T: int
    U: int
    V: int
    D: int = 5  # 0: RNN-T
    ragged: bool = False
    too_large: bool = False  # for logits that exist

    @property
    def columns(self) -> int:
        return self.V + self.D

    @property
    def durations(self) -> list[int]:
        return list(range(self.D))

    def labels(self) -> tuple[torch.Tensor, ...]:
        """Targets on the GPU; logit lengths and target lengths on the host, where a data loader has them."""
        generator = torch.Generator().manual_seed(1)
        targets = torch.randint(0, self.V - 1, (self.B, self.U), generator=generator)
        share = torch.linspace(0.4, 1.0, self.B) if self.ragged else torch.ones(self.B)
        return targets.cuda(), *((share * n).round().long() for n in (self.T, self.U))

    def rows(self) -> int:
        _, T, U = self.labels()
        return int((T * (U + 1)).sum())


CASES = [
    Case("ft-v3", 16, 250, 99, 8193),
    Case("ft-v3 ragged", 16, 250, 99, 8193, ragged=True),
    Case("ft-v2", 16, 250, 99, 1025),
    Case("rnnt", 32, 400, 128, 1025, D=0),
    Case("256 x 40 s", 256, 500, 200, 8193, too_large=True),
]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # of the memory plot, in the shape of ft-v3
PIPELINES = {  # of the memory plot
    "joint network, then tdt_loss_joint": "tab:red",
    "the same, gradient in place": "tab:orange",
    "tdt_loss_fused_joint": "tab:blue",
}


def random_operands(case: Case, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """encoder, decoder, weight, bias: logits of about unit variance."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    operands = [
        normal(case.B, case.T, H),
        normal(case.B, case.U + 1, H),
        normal(case.columns, H) / H**0.5,
        normal(case.columns) * 0.1,
    ]
    return [x.to(dtype) for x in operands]


def sharp_operands(case: Case, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The same of a model that has learnt one random alignment: before the frame of the next label it says blank, from then on
    that label, by NATS. Each token is spelt by CODE hidden units; f_t = t + 1 and g_u = -t_u let them pass from t_u on."""
    generator = torch.Generator().manual_seed(0)
    targets, T, U = case.labels()
    spelling = torch.rand(case.V, H, generator=generator).argsort(1) < CODE
    encoder = (torch.arange(case.T) + 1.0)[None, :, None].expand(case.B, -1, H)
    decoder = torch.full((case.B, case.U + 1, H), -4.0 * case.T)
    for b in range(case.B):
        frames = torch.randint(0, max(int(T[b]), 1), (int(U[b]),), generator=generator).sort().values
        spelt = spelling[targets[b, : len(frames)].cpu()]
        decoder[b, : len(frames)] = torch.where(spelt, -frames.float()[:, None], -4.0 * case.T)
    weight = torch.zeros(case.columns, H)
    weight[: case.V] = spelling * (2 * NATS / CODE)
    bias = torch.zeros(case.columns)
    bias[case.V - 1] = NATS  # the blank
    if case.D:
        bias[case.V + 1] = NATS  # one frame at a time
    return [x.to("cuda", dtype) for x in (encoder, decoder, weight, bias)]


def fused(kernel, case: Case, operands, labels, **options):
    if case.D:
        return kernel.tdt_loss_fused_joint(*operands, *labels, case.V - 1, case.durations, **options)
    return kernel.rnnt_loss_fused_joint(*operands, *labels, case.V - 1, "mean", **options)


def dense(kernel, case: Case, operands, labels, **options):
    encoder, decoder, weight, bias = operands
    logits = torch.nn.functional.linear(torch.relu(encoder[:, :, None] + decoder[:, None]), weight, bias)
    if case.D:
        return kernel.tdt_loss_joint(logits, *labels, case.V - 1, case.durations, **options)
    return kernel.rnnt_loss(logits, *labels, case.V - 1, "mean", **options)


@contextmanager
def every_row_live(kernel, case: Case) -> Iterator[None]:
    """Backward computes all valid rows: the most that there can be to do."""
    ops = kernel.tiles.ops
    _, T, U = (x.cuda() for x in case.labels())
    t, u = torch.arange(case.T, device="cuda"), torch.arange(case.U + 1, device="cuda")
    valid = (t[:, None] < T[:, None, None]) & (u <= U[:, None, None])

    class Ops:
        def __getattr__(self, name: str) -> object:
            return getattr(ops, name)

        def node_occupancy(self, *args: object) -> torch.Tensor:
            return ops.node_occupancy(*args).clamp_(min=1e-30).mul_(valid)

    kernel.tiles.ops = Ops()
    try:
        yield
    finally:
        kernel.tiles.ops = ops


def verify(kernel, case: Case, function: Callable) -> None:
    """Compare loss and gradients of a crop to float64; raise where they differ by more than bfloat16 logits explain."""
    from support import oracle

    crop = Case(case.name, 3, min(case.T, 30), min(case.U, 20), case.V, case.D, ragged=True)
    labels = crop.labels()
    leaves = [x.requires_grad_() for x in random_operands(crop)]
    loss = function(kernel, crop, leaves, labels)
    loss.backward()

    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    logits = torch.nn.functional.linear(torch.relu(exact[0][:, :, None] + exact[1][:, None]), *exact[2:])
    x, z = logits.detach().split([crop.V, crop.D], dim=-1)
    targets, T, U = (label.cpu() for label in labels)
    expected = oracle.tdt_loss(x, z, targets, T, U, crop.V - 1, crop.durations)
    weight = 1 / U / crop.B  # the reduction "mean"
    logits.backward(torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1) * weight[:, None, None, None])
    wanted = (expected.losses * weight).sum().item()
    if abs(loss.item() / wanted - 1) > 1e-3:
        raise AssertionError(f"{case.name}: loss {loss.item()} for {wanted}")
    for leaf, reference in zip(leaves, exact):
        error = (leaf.grad.double().cpu() - reference.grad).norm() / reference.grad.norm()
        if error > 0.02:
            raise AssertionError(f"{case.name}: gradient off by {error:.1e}")


def make_step(kernel, case: Case, function: Callable, leaves, labels, **options) -> tuple[Callable, Callable]:
    """Forward alone, and forward and backward, of a step that starts without gradients."""

    def forward(_: int = 0) -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        return function(kernel, case, leaves, labels, **options)

    def both(_: int = 0) -> None:
        forward().backward()

    return forward, both


def measure(kernel, case: Case, function: Callable, operands: Callable, options: dict) -> dict:
    labels = case.labels()
    leaves = [x.requires_grad_() for x in operands(case)]
    repeats = {"repeats": 2, "warmup": 1} if case.too_large else {"repeats": 7, "warmup": 2}
    is_fused = function is fused
    if not is_fused:  # lengths that the dense loss would have to move each time
        labels = tuple(x.cuda() for x in labels)
    forward, both = make_step(kernel, case, function, leaves, labels, **options)

    rows = case.rows()
    row = {"rows": rows} | times_of(both, **repeats).fields()
    row |= times_of(forward, **repeats).fields("forward")
    row |= times_of(torch.Tensor.backward, forward, **repeats).fields("backward")
    row["peak_extra_bytes"] = peak_extra_bytes(both)
    flop = 8 * rows * H * case.columns
    row["tflops"] = flop / row["ms"] / 1e9
    if is_fused:
        loss, stats = fused(kernel, case, leaves, labels, return_stats=True, **options)
        loss.backward()
        row["live_rows"] = stats.live_rows
        done = (2 * rows + 6 * stats.live_rows) * H * case.columns
        row["tflops_computed"] = done / row["ms"] / 1e9
    return row


def guarded(call: Callable[[], dict]) -> dict:
    """A row that runs out of memory stays in the table."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        return {"ms": None, "lost": "out of memory"}
    finally:
        torch.cuda.empty_cache()


def show(row: dict) -> dict:
    if row["ms"] is None:
        figures = row["lost"]
    else:
        live = f", {row['live_rows'] / row['rows']:.1%} live" if "live_rows" in row else ""
        speed = f", {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        figures = f"{row['ms']:9.3f} ms, peak +{row['peak_extra_bytes'] / 2**30:.2f} GiB{live}{speed}"
    print(f"{row['case']:14} {row['api']:36} {row['lattice']:8} {figures}", flush=True)
    return row


def rows_of(kernel, names: list[str] | None) -> list[dict]:
    rows = []
    for case in CASES:
        if names and case.name not in names:
            continue
        fused_name = "tdt_loss_fused_joint" if case.D else "rnnt_loss_fused_joint"
        verify(kernel, case, fused)
        plans = [
            (fused_name, "random", fused, random_operands, {}),
            (fused_name, "sharp", fused, sharp_operands, {}),
            (fused_name, "all live", fused, random_operands, {}),
            (f"{fused_name}, dropout 0.2", "all live", fused, random_operands, {"dropout": 0.2}),
            (f"{fused_name}, threshold 1e-6", "sharp", fused, sharp_operands, {"occupancy_threshold": 1e-6}),
        ]
        if case.too_large:
            plans = plans[:2]
        else:
            verify(kernel, case, dense)
            name = "joint network, then " + ("tdt_loss_joint" if case.D else "rnnt_loss")
            plans.insert(0, (name, "random", dense, random_operands, {}))
        for api, lattice, function, operands, options in plans:
            row = {"case": case.name, "api": api, "lattice": lattice, "dtype": "bfloat16"}
            row["shape"] = [case.B, case.T, case.U, case.columns]
            with every_row_live(kernel, case) if lattice == "all live" else nullcontext():
                row |= guarded(partial(measure, kernel, case, function, operands, options))
            rows.append(show(row))
    return rows


def memory_rows(kernel) -> list[dict]:
    """Peak memory of one step against the batch size, up to out of memory."""
    rows = []
    functions = [dense, partial(dense, inplace_grad=True), fused]
    for api, function in zip(PIPELINES, functions):
        for B in BATCHES:
            case = Case("memory", B, 250, 99, 8193)
            row = {"case": "memory", "api": api, "lattice": "random", "dtype": "bfloat16", "shape": [B, 250, 99, 8198]}

            def step(case: Case = case, function: Callable = function) -> dict:
                leaves = [x.requires_grad_() for x in random_operands(case)]
                _, both = make_step(kernel, case, function, leaves, case.labels())
                peak = peak_extra_bytes(both)  # also the warm-up
                return times_of(both, repeats=3, warmup=0).fields() | {"peak_extra_bytes": peak}

            rows.append(show(row | guarded(step)))
            if rows[-1]["ms"] is None:
                break
    return rows


def tile_rows(kernel) -> list[dict]:
    """Time and memory against max_tile_bytes."""
    rows = []
    for case in CASES[2:4]:
        for mebibytes in (32, 64, 128, 256, 384, 512):
            row = {"case": f"{case.name}, tiles of {mebibytes} MiB", "api": "fused", "lattice": "random"}
            row |= {"dtype": "bfloat16", "shape": [case.B, case.T, case.U, case.columns]}
            options = {"max_tile_bytes": mebibytes << 20}
            rows.append(show(row | guarded(partial(measure, kernel, case, fused, random_operands, options))))
    return rows


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for api, color in PIPELINES.items():
        points = [row for row in rows if row["case"] == "memory" and row["api"] == api]
        held = [row for row in points if row["ms"] is not None]
        gibibytes = [row["peak_extra_bytes"] / 2**30 for row in held]
        axes.plot([row["shape"][0] for row in held], gibibytes, "o-", color=color, label=api)
        for row in points[len(held) :]:
            axes.plot(row["shape"][0], max(gibibytes) * 2, "x", color=color, markersize=10)
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="peak memory of a step, GiB")
    axes.set_title(f"Joint network and TDT loss, T = 250, U = 99, V + D = 8198, {rows[0]['gpu']}\n(x: out of memory)")
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help="only these, without the memory plot")
    parser.add_argument("--tiles", action="store_true", help="only time and memory against max_tile_bytes")
    parser.add_argument("--memory", action="store_true", help="only memory against the batch size")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()

    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    gpu = torch.cuda.get_device_name()
    rows = []
    if options.tiles:
        rows += tile_rows(kernel)
    if options.memory or not (options.tiles or options.cases):
        rows += memory_rows(kernel)
    if options.cases or not (options.tiles or options.memory):
        rows += rows_of(kernel, options.cases)
    common = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "commit": options.commit,
        "date": datetime.date.today().isoformat(),
    }
    rows = [row | common for row in rows]
    output = options.output / f"{slug(gpu)}-fused.json"
    measured = {row["case"] for row in rows}
    older = json.loads(output.read_text()) if output.exists() else []
    rows = [row for row in older if row["case"] not in measured] + rows
    output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(output)
    if any(row["case"] == "memory" for row in rows):
        plot(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
