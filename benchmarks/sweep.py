#!/usr/bin/env python3
"""Time the loss over the shapes of real training runs, against the floor that the memory bandwidth sets and against peers.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/sweep.py [--cases base ft-v2 ...] [--apis rnnt_loss ...] [--no-peers]

TDT and RNN-T. The floor is three passes over the logits (read forward; read and written backward) at the copy bandwidth measured in the same
run. Every implementation is verified before it is timed. Inputs rotate through more memory than the L2 cache holds; times are medians, 20th and 80th
percentiles of CUDA events, several calls in flight as in training. Forward and backward are each timed by themselves too: as the two overlap on the
host, their sum may differ from the time of both. What a model would do anyway, such as to cut its logits into slices, is not timed. Nothing else should
run on the host: eager calls of the small cases depend on it. Writes benchmarks/results/<gpu>.json.
"""

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from kernels import get_kernel
from records import REPO, RESULTS, commit, slug, version
from timing import Times, copy_tbps, graph_times, peak_extra_bytes, times_of

sys.path.insert(0, str(REPO / "tests"))  # the oracle's

DURATIONS = [0, 1, 2, 3, 4]
OMEGA = 0.1
L2_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    name: str
    B: int
    T: int
    U: int
    V: int
    dtype: torch.dtype
    ragged: bool = False
    D: int = len(DURATIONS)  # 0: RNN-T

    @property
    def durations(self) -> list[int]:
        return DURATIONS[: self.D]

    @property
    def nodes(self) -> int:
        return self.B * self.T * (self.U + 1)

    @property
    def logit_bytes(self) -> int:
        return self.nodes * (self.V + self.D) * self.dtype.itemsize

    def batch(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Joint logits, targets, logit lengths, target lengths; the latter in 32 bits for RNN-T, since torchaudio reads nothing else."""
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (self.B, self.T, self.U + 1, self.V + self.D)
        index = {"device": "cuda", "dtype": torch.int64 if self.D else torch.int32}
        logits = torch.empty(shape, device="cuda", dtype=self.dtype).normal_(generator=generator)
        targets = torch.randint(0, self.V - 1, (self.B, self.U), generator=generator, **index)
        share = torch.linspace(0.4, 1.0, self.B) if self.ragged else torch.ones(self.B)
        lengths = [(share * n).round().to(**index) for n in (self.T, self.U)]
        return logits, targets, *lengths


CASES = [
    Case("base", 8, 100, 20, 1025, torch.float32),
    Case("large", 4, 200, 40, 8193, torch.float32),
    Case("large", 4, 200, 40, 8193, torch.bfloat16),
    Case("large", 4, 200, 40, 8193, torch.float16),
    Case("train", 16, 188, 48, 8193, torch.bfloat16),
    Case("train ragged", 16, 188, 48, 8193, torch.bfloat16, ragged=True),
    Case("ft-v2", 16, 250, 99, 1025, torch.bfloat16),
    Case("ft-v2 ragged", 16, 250, 99, 1025, torch.bfloat16, ragged=True),
    Case("ft-v3", 16, 250, 99, 8193, torch.bfloat16),
    Case("long", 2, 1000, 400, 1025, torch.bfloat16),
]
RNNT_CASES = [
    Case("base", 8, 100, 20, 1025, torch.float32, D=0),
    Case("large", 4, 200, 40, 8193, torch.float32, D=0),
    Case("large", 4, 200, 40, 8193, torch.bfloat16, D=0),
    Case("ft-v2", 16, 250, 99, 1025, torch.float32, D=0),
    Case("ft-v2", 16, 250, 99, 1025, torch.bfloat16, D=0),
]
LATTICES = [(8, 100, 20), (4, 200, 40), (16, 250, 99), (2, 1000, 400), (1, 3000, 800)]  # B, T, U


# How the logits lie in memory. Columns that only make rows longer are NaN, so that verification sees whoever computes with them.


def whole(case: Case, *logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits


def slices(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits[..., : case.V], logits[..., case.V :]


def slices_of_view(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a model cuts them, from the output of its joint network, which is no leaf."""
    return slices(case, logits.view_as(logits))


def copies_of_slices(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in slices(case, logits))


def with_longer_rows(logits: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.nn.functional.pad(logits, (0, extra), value=float("nan"))[..., : logits.shape[3]]


def padded(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of a multiple of 8 elements, as a linear layer makes them whose weight is padded for the tensor cores."""
    return (with_longer_rows(logits, -logits.shape[3] % 8),)


def beside_durations(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The token columns of a TDT model, for RNN-T."""
    return (with_longer_rows(logits, len(DURATIONS)),)


@dataclass(frozen=True)
class Layout:
    """What becomes a leaf, and what the loss is given of the leaves."""

    store: Callable[..., tuple[torch.Tensor, ...]] = whole
    cut: Callable[..., tuple[torch.Tensor, ...]] = whole


def fresh_leaves(stored: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """With the memory and the strides of what is stored, but without a gradient that backward would add to."""
    return [x.detach().requires_grad_() for x in stored]


JOINT = Layout()
SLICES = Layout(cut=slices_of_view)


def joint(kernel, case: Case, logits, *rest, **options):
    return kernel.tdt_loss_joint(logits, *rest, case.V - 1, DURATIONS, **options)


def separate(kernel, case: Case, *logits_and_rest):
    return kernel.tdt_loss(*logits_and_rest, case.V - 1, DURATIONS)


@cache
def make_layer(kernel, compiled: bool) -> torch.nn.Module:
    made = kernel.layers.TDTLoss()
    # One compilation for each shape; whatever falls back to eager is an error, not a row that says "compiled".
    return torch.compile(made, dynamic=False, fullgraph=True) if compiled else made


def layer(kernel, case: Case, *logits_and_rest, compiled: bool = False):
    return make_layer(kernel, compiled)(*logits_and_rest, case.V - 1, DURATIONS)


def transformers_loss(kernel, case: Case, *logits_and_rest):
    from transformers.loss.loss_tdt import tdt_loss

    return tdt_loss(*logits_and_rest, case.V - 1, DURATIONS)


def rnnt(kernel, case: Case, logits, *rest):
    return kernel.rnnt_loss(logits, *rest, case.V - 1, "mean_batch")


def torchaudio_loss(kernel, case: Case, logits, *rest):
    from torchaudio.functional import rnnt_loss

    return rnnt_loss(logits, *rest, case.V - 1, reduction="mean")  # the mean over the batch


@dataclass(frozen=True)
class Api:
    name: str
    call: Callable
    layout: Layout = JOINT
    omega: float = 0.0
    peer: str = ""  # the package that it comes from, if not ours
    cases: tuple[tuple[str, torch.dtype], ...] = ()  # where it is measured; empty: everywhere

    @property
    def graph(self) -> bool:
        return self.name.endswith("CUDA graph")

    @property
    def ours_to_mend(self) -> bool:
        """Whether a failure ends the run. What a peer or the machine's compiler cannot do is a lost row."""
        return not self.peer and not self.name.endswith("compiled")


BF16_CASES = (("large", torch.bfloat16), ("train", torch.bfloat16), ("ft-v2", torch.bfloat16))
OMEGA_CASES = (("base", torch.float32), *BF16_CASES)
TRANSFORMERS_CASES = (("base", torch.float32), ("large", torch.bfloat16), ("ft-v2", torch.bfloat16))
TORCHAUDIO_CASES = tuple((case, torch.float32) for case in ("base", "large", "ft-v2"))  # it knows no bfloat16
mixed = partial(joint, omega=OMEGA)
TDT_APIS = [
    Api("tdt_loss_joint", joint),
    Api("tdt_loss_joint, CUDA graph", joint),
    Api("layers.TDTLoss", layer, SLICES),
    Api("tdt_loss", separate, Layout(store=copies_of_slices)),
    Api("tdt_loss on slices", separate, SLICES, cases=BF16_CASES),
    Api("tdt_loss on leaf slices", separate, Layout(store=slices), cases=BF16_CASES),
    Api("tdt_loss_joint of a padded product", joint, Layout(store=padded), cases=BF16_CASES),
    Api("layers.TDTLoss, compiled", partial(layer, compiled=True), SLICES, cases=BF16_CASES),
    Api("tdt_loss_joint, in place", partial(joint, inplace_grad=True)),
    Api(f"tdt_loss_joint, omega {OMEGA}", mixed, omega=OMEGA, cases=OMEGA_CASES),
    Api(f"tdt_loss_joint, omega {OMEGA}, CUDA graph", mixed, omega=OMEGA, cases=OMEGA_CASES),
    Api("transformers", transformers_loss, SLICES, peer="transformers", cases=TRANSFORMERS_CASES),
]
RNNT_APIS = [
    Api("rnnt_loss", rnnt),
    Api("rnnt_loss, CUDA graph", rnnt),
    Api("rnnt_loss of columns", rnnt, Layout(store=beside_durations), cases=(("ft-v2", torch.bfloat16),)),
    Api("torchaudio", torchaudio_loss, peer="torchaudio", cases=TORCHAUDIO_CASES),
]


def apis_of(case: Case, options: argparse.Namespace) -> list[Api]:
    """What is measured in a case."""

    def wanted(api: Api) -> bool:
        if options.apis and api.name not in options.apis:
            return False
        if api.cases and (case.name, case.dtype) not in api.cases:
            return False
        return not api.peer or (not options.no_peers and importable(api.peer))

    return [api for api in (TDT_APIS if case.D else RNNT_APIS) if wanted(api)]


@cache
def importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # its libraries may be for another CUDA
        print(f"without {package}: {error}", flush=True)
        return False
    return True


@cache  # one verification for a function and its CUDA graph
def verify(kernel, case: Case, call: Callable, layout: Layout, omega: float) -> None:
    """Compare loss and gradient of a crop, with this vocabulary and dtype, to the float64 oracle; raise where they differ."""
    from support import oracle

    crop = replace(case, B=2, T=min(case.T, 40), U=min(case.U, 36), ragged=True)
    logits, *rest = crop.batch(seed=7)
    x, targets, T, U = (tensor.cpu() for tensor in (logits.double(), *rest))  # before anything writes over the logits
    leaves = fresh_leaves(layout.store(crop, logits))
    loss = call(kernel, crop, *layout.cut(crop, *leaves), *rest)
    loss.backward()
    grad = torch.cat([leaf.grad for leaf in leaves], dim=-1).double().cpu()

    expected = oracle.tdt_loss(
        x[..., : case.V], x[..., case.V :], targets, T, U, case.V - 1, case.durations, omega=omega
    )
    # The reduction "mean" of TDT, "mean_batch" of RNN-T.
    weight = (1 / U if case.D else torch.ones(crop.B, dtype=torch.float64)) / crop.B
    wanted = torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1) * weight[:, None, None, None]
    error = (grad - wanted).abs().max() / wanted.abs().max()
    expected_loss = (expected.losses * weight).sum().item()
    if not (abs(loss.item() / expected_loss - 1) < 1e-4 and error < torch.finfo(case.dtype).eps + 1e-4):
        raise AssertionError(f"{case.name}: loss {loss.item()} for {expected_loss}, gradient off by {error:.1e}")


def measure(kernel, case: Case, api: Api) -> dict:
    verify(kernel, case, api.call, api.layout, api.omega)
    copies = max(1, min(6, L2_BYTES * 2 // case.logit_bytes + 1))

    def make_set(seed: int) -> tuple:
        logits, *rest = case.batch(seed)
        return api.layout.store(case, logits), rest

    sets = [make_set(seed) for seed in range(copies)]

    def arguments(i: int) -> tuple[torch.Tensor, ...]:
        stored, rest = sets[i % copies]
        return *api.layout.cut(case, *fresh_leaves(stored)), *rest

    def forward(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return api.call(kernel, case, *given)

    def both(given: tuple[torch.Tensor, ...]) -> None:
        forward(given).backward()

    if api.graph:
        row = graph_times([lambda i=i: both(arguments(i)) for i in range(copies)]).fields()
    else:  # in place, all but the first calls read what the last one wrote
        times = {"repeats": 3, "warmup": 1} if api.peer == "transformers" else {}
        row = times_of(both, arguments, **times).fields()
        row |= times_of(forward, arguments, **times).fields("forward")
        row |= times_of(torch.Tensor.backward, lambda i: forward(arguments(i)), **times).fields("backward")
    return row | {"peak_extra_bytes": peak_extra_bytes(lambda: both(arguments(0)))}


def lattice_times(kernel, B: int, T: int, U: int, durations: list[int]) -> Times:
    record = (3 + len(durations) + 3) // 4 * 4  # of a node: lse, blank_lp, label_lp, dur_lp, rounded up
    node_lp = torch.randn(B, T, U + 1, record, device="cuda").log_softmax(-1)
    targets = torch.zeros(B, U, dtype=torch.long, device="cuda")
    lengths = [torch.full((B,), n, device="cuda") for n in (T, U)]
    call = partial(kernel.loss.ops.lattice, node_lp, targets, *lengths, durations, 10, 0.0, True)
    calls = 5  # in one graph, since one call is short beside the launch of a graph
    return graph_times([lambda: [call() for _ in range(calls)]]).divided_by(calls)


def rows_of(kernel, options: argparse.Namespace, bandwidth: float) -> list[dict]:
    rows = []
    for case in CASES + RNNT_CASES:
        if options.cases and case.name not in options.cases:
            continue
        for api in apis_of(case, options):
            row = {"case": case.name, "api": api.name, "dtype": str(case.dtype).removeprefix("torch.")}
            row["shape"] = [case.B, case.T, case.U, case.V]
            row["floor_ms"] = 3 * case.logit_bytes / bandwidth / 1e9
            try:
                row |= measure(kernel, case, api)
            except torch.cuda.OutOfMemoryError as error:
                row |= {"ms": None, "lost": f"out of memory: {error}".splitlines()[0]}
            except Exception as error:
                if api.ours_to_mend:
                    raise
                row |= {"ms": None, "lost": f"{type(error).__name__}: {error}".splitlines()[0]}
            rows.append(row)
            torch.cuda.empty_cache()
            shown = "lost" if row["ms"] is None else f"{row['ms']:9.3f} ms, floor {row['floor_ms']:.3f}"
            print(
                f"{case.name:14} {row['dtype']:9} {api.name:38} {shown}  peak +{row.get('peak_extra_bytes', 0) / 2**20:.1f} MiB",
                flush=True,
            )
    for name, durations in (("lattice", DURATIONS), ("rnnt lattice", [])):
        for shape in LATTICES if not options.cases and (not options.apis or name in options.apis) else []:
            row = {"case": name, "api": name, "dtype": "float32", "shape": [*shape, None]}
            row |= lattice_times(kernel, *shape, durations).fields()
            rows.append(row)
            print(f"{name} B, T, U = {shape}: {row['ms']:.4f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help="only these")
    parser.add_argument("--apis", nargs="*", help="only these, by their names in the results")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()

    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    bandwidth = copy_tbps()
    gpu = torch.cuda.get_device_name()
    common = {
        "copy_tbps": bandwidth,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": version("transformers"),
        "torchaudio": version("torchaudio"),
        "gpu": gpu,
        "commit": options.commit,
        "date": datetime.date.today().isoformat(),
    }
    print(f"{gpu}: copy bandwidth {bandwidth:.2f} TB/s", flush=True)
    rows = [row | common for row in rows_of(kernel, options, bandwidth)]
    output = options.output / f"{slug(gpu)}.json"
    output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(output)


if __name__ == "__main__":
    main()
