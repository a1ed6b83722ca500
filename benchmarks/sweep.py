#!/usr/bin/env python3
"""Time the loss over the shapes of real training runs, against the floor that the memory bandwidth sets and against peers.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/sweep.py [--cases base ft-v2 ...] [--apis rnnt_loss ...] [--no-peers]

TDT and RNN-T. The floor is three passes over the logits (read forward; read and written backward) at the copy bandwidth measured in the same
run. Every implementation is verified before it is timed. Inputs rotate through more memory than the L2 cache holds; times are
medians of CUDA events, several calls in flight as in training. Nothing else should run on the host: eager calls of the small cases depend on it. Writes
benchmarks/results/<gpu>.json and .png.
"""

import argparse
import datetime
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from kernels import get_kernel
from records import REPO, RESULTS, commit, slug, version

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


def joint(kernel, case: Case, logits, *rest, **options):
    return kernel.tdt_loss_joint(logits, *rest, case.V - 1, DURATIONS, **options)


def separate(kernel, case: Case, logits, duration_logits, *rest):
    return kernel.tdt_loss(logits, duration_logits, *rest, case.V - 1, DURATIONS)


_layer = cache(lambda kernel: kernel.layers.TDTLoss())


def layer(kernel, case: Case, logits, *rest):
    return _layer(kernel)(logits[..., : case.V], logits[..., case.V :], *rest, case.V - 1, DURATIONS)


def transformers_loss(kernel, case: Case, logits, *rest):
    from transformers.loss.loss_tdt import tdt_loss

    return tdt_loss(logits[..., : case.V], logits[..., case.V :], *rest, case.V - 1, DURATIONS)


def rnnt(kernel, case: Case, logits, *rest):
    return kernel.rnnt_loss(logits, *rest, case.V - 1, "mean_batch")


def torchaudio_loss(kernel, case: Case, logits, *rest):
    from torchaudio.functional import rnnt_loss

    return rnnt_loss(logits, *rest, case.V - 1, reduction="mean")  # the mean over the batch


@dataclass(frozen=True)
class Api:
    name: str
    call: Callable
    leaves: int = 1  # how many tensors of logits it takes
    omega: float = 0.0
    peer: str = ""  # the package that it comes from, if not ours

    @property
    def graph(self) -> bool:
        return self.name.endswith("CUDA graph")

    @property
    def in_place(self) -> bool:
        return self.name.endswith("in place")


mixed = partial(joint, omega=OMEGA)
TDT_APIS = [
    Api("tdt_loss_joint", joint),
    Api("tdt_loss_joint, CUDA graph", joint),
    Api("layers.TDTLoss", layer),
    Api("tdt_loss", separate, leaves=2),
    Api("tdt_loss_joint, in place", partial(joint, inplace_grad=True)),
    Api(f"tdt_loss_joint, omega {OMEGA}", mixed, omega=OMEGA),
    Api(f"tdt_loss_joint, omega {OMEGA}, CUDA graph", mixed, omega=OMEGA),
    Api("transformers", transformers_loss, peer="transformers"),
]
RNNT_APIS = [
    Api("rnnt_loss", rnnt),
    Api("rnnt_loss, CUDA graph", rnnt),
    Api("torchaudio", torchaudio_loss, peer="torchaudio"),
]


def apis_of(case: Case, options: argparse.Namespace) -> list[Api]:
    """What is measured in a case: omega and peers in some only."""

    def wanted(api: Api) -> bool:
        if options.apis and api.name not in options.apis:
            return False
        if api.omega > 0:
            return (case.name, case.dtype) in [
                ("base", torch.float32),
                ("large", torch.bfloat16),
                ("train", torch.bfloat16),
                ("ft-v2", torch.bfloat16),
            ]
        if api.peer == "transformers":
            shapes = ("base", "large", "ft-v2")
            return (
                not options.no_peers and case.name in shapes and (case.name == "base" or case.dtype == torch.bfloat16)
            )
        if api.peer == "torchaudio":  # knows no bfloat16
            return not options.no_peers and case.dtype == torch.float32 and importable(api.peer)
        return True

    return [api for api in (TDT_APIS if case.D else RNNT_APIS) if wanted(api)]


@cache
def importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # its libraries may be for another CUDA
        print(f"without {package}: {error}", flush=True)
        return False
    return True


def median_ms(call: Callable[[int], None], repeats: int = 0, warmup: int = 8) -> float:
    """The median of `repeats` calls. 0: of as many as a fifth of a second holds, 25 to 400; of calls shorter than a millisecond the lowest of five such
    medians, since the host decides about them, and what else it does only makes them longer."""
    for i in range(warmup):
        call(i)
    windows = 1
    if not repeats:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(warmup):  # again: the first calls also load kernels and get memory
            call(i)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / warmup
        repeats = min(400, max(25, int(0.2 / seconds)))
        windows = 5 if seconds < 1e-3 else 1
    return min(_median_ms(call, repeats) for _ in range(windows))


def _median_ms(call: Callable[[int], None], repeats: int) -> float:
    events = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(i)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def graph_ms(calls: list[Callable[[], None]]) -> float:
    """Time of one call when all are replayed as CUDA graphs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    return median_ms(lambda i: graphs[i % len(graphs)].replay())


def copy_tbps() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda i: target.copy_(source), repeats=10) / 1e9


def peak_extra_bytes(call: Callable[[], None]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@cache  # one verification for a function and its CUDA graph
def verify(kernel, case: Case, call: Callable, leaves: int, omega: float) -> None:
    """Compare loss and gradient of a crop, with this vocabulary and dtype, to the float64 oracle; raise where they differ."""
    import oracle

    crop = replace(case, B=2, T=min(case.T, 40), U=min(case.U, 36), ragged=True)
    logits, *rest = crop.batch(seed=7)
    parts = (logits[..., : case.V], logits[..., case.V :]) if leaves == 2 else (logits,)
    inputs = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in parts]
    loss = call(kernel, crop, *inputs, *rest)
    loss.backward()
    grad = torch.cat([x.grad for x in inputs], dim=-1).double().cpu()

    x, targets, T, U = (tensor.cpu() for tensor in (logits.double(), *rest))
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


def measure(kernel, case: Case, api: Api, bandwidth: float) -> dict:
    verify(kernel, case, api.call, api.leaves, api.omega)
    copies = max(1, min(6, L2_BYTES * 2 // case.logit_bytes + 1))
    sets = [case.batch(seed) for seed in range(copies)]
    if api.leaves == 2:
        sets = [(x[..., : case.V].contiguous(), x[..., case.V :].contiguous(), *rest) for x, *rest in sets]

    def forward(i: int) -> torch.Tensor:
        batch = sets[i % copies]
        inputs = [x.detach().requires_grad_() for x in batch[: api.leaves]]
        return api.call(kernel, case, *inputs, *batch[api.leaves :])

    def both(i: int) -> None:
        forward(i).backward()

    times = {"repeats": 3, "warmup": 1} if api.peer == "transformers" else {}
    row = {"ms": None, "ms_forward": None, "ms_backward": None}
    if api.graph:
        row["ms"] = graph_ms([partial(both, i) for i in range(copies)])
    elif api.in_place:  # the second call would read what the first wrote: random numbers all the same
        row["ms"] = median_ms(both)
    else:
        row["ms"] = median_ms(both, **times)
        row["ms_forward"] = median_ms(lambda i: forward(i) and None, **times)
        row["ms_backward"] = row["ms"] - row["ms_forward"]
    row["peak_extra_bytes"] = peak_extra_bytes(partial(both, 0))
    return row | {"floor_ms": 3 * case.logit_bytes / bandwidth / 1e9}


def lattice_ms(kernel, B: int, T: int, U: int, durations: list[int]) -> float:
    record = (3 + len(durations) + 3) // 4 * 4  # of a node: lse, blank_lp, label_lp, dur_lp, rounded up
    node_lp = torch.randn(B, T, U + 1, record, device="cuda").log_softmax(-1)
    targets = torch.zeros(B, U, dtype=torch.long, device="cuda")
    lengths = [torch.full((B,), n, device="cuda") for n in (T, U)]
    call = partial(kernel.loss.ops.lattice, node_lp, targets, *lengths, durations, 10, 0.0, True)
    return graph_ms([lambda: [call() for _ in range(5)]]) / 5


def rows_of(kernel, options: argparse.Namespace, bandwidth: float) -> list[dict]:
    rows = []
    for case in CASES + RNNT_CASES:
        if options.cases and case.name not in options.cases:
            continue
        for api in apis_of(case, options):
            row = {"case": case.name, "api": api.name, "dtype": str(case.dtype).removeprefix("torch.")}
            row["shape"] = [case.B, case.T, case.U, case.V]
            try:
                row |= measure(kernel, case, api, bandwidth)
            except torch.cuda.OutOfMemoryError as error:
                row |= {"ms": None, "lost": f"out of memory: {error}".splitlines()[0]}
            except (RuntimeError, AssertionError) as error:
                if not api.peer:
                    raise
                row |= {"ms": None, "lost": str(error).splitlines()[0]}
            rows.append(row)
            torch.cuda.empty_cache()
            shown = "lost" if row["ms"] is None else f"{row['ms']:9.3f} ms, floor {row['floor_ms']:.3f}"
            print(
                f"{case.name:14} {row['dtype']:9} {api.name:38} {shown}  peak +{row.get('peak_extra_bytes', 0) / 2**20:.1f} MiB",
                flush=True,
            )
    for name, durations in (("lattice", DURATIONS), ("rnnt lattice", [])):
        for shape in LATTICES if not options.cases and (not options.apis or name in options.apis) else []:
            ms = lattice_ms(kernel, *shape, durations)
            rows.append({"case": name, "api": name, "dtype": "float32", "shape": [*shape, None], "ms": ms})
            print(f"{name} B, T, U = {shape}: {ms:.4f} ms", flush=True)
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
