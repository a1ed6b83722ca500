#!/usr/bin/env python3
"""Time whole training steps of transformers' models, with their own loss and with the losses of this package.

    make build && LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python benchmarks/end_to_end.py [--earlier FOLDER_OR_REVISION]

Parakeet-TDT 0.6B with 1,025 and with 8,193 tokens, and Nemotron 3.5 (RNN-T, 13,088 tokens): random weights of the released sizes, utterances of
20 s with 99 labels, autocast to bfloat16, AdamW. The losses are transformers' own, the kernel published before (--earlier), ours from the logits
(`use_loss`) and ours without them (`use_fused_loss`). Each is compared to the first in evaluation before it is timed.

A step is zero_grad, forward, backward and the optimizer, until the GPU has done it. The losses take turns, ROUNDS times, so that what else the host does
falls on all of them. Recorded are the median, the 20th and 80th percentiles, the time in which the GPU had anything to do (by the profiler, of one
step), the peak of torch's allocator with weights and optimizer, and the largest batch that trains where the allocator may hold 24 and 80 GiB. Once
--seconds are spent, what is left is named and left out. Writes benchmarks/results/<gpu>-end-to-end.json; `--tiny --device cpu` runs the same
code on small models in a minute, without memory and the GPU's time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a CPU that others use too, threads would spin

import earlier
import torch
from kernels import get_kernel
from records import RESULTS, commit, slug, version
from speech_models import SIZES, TINY, Size, build_model, make_batch
from timing import Times

ROUNDS = 3  # in which the losses take turns; 1 for tiny models
WARMUP = 2  # steps at the start of each turn
LEAST, MOST = 3, 20  # timed steps of a turn
TURN_SECONDS = 3.0  # of timed steps in a turn, beyond LEAST; none for tiny models
LIMITS_GIB = (24, 80)
TOLERANCE = 0.01  # between the values of two losses, relative: logits are bfloat16
GIB = 2**30


def own_loss(kernel, model: torch.nn.Module) -> None:
    """transformers' own: `model.loss_function` as it is."""


def earlier_loss(kernel, model: torch.nn.Module, *, published=None) -> None:
    """The kernel published before, in the place of the model's loss function."""
    if not hasattr(model.config, "durations"):
        raise NotImplementedError("it has no RNN-T loss")

    def loss_function(
        token_logits, duration_logits, labels, logit_lengths, label_lengths, blank_token_id, durations, **kwargs
    ):
        lengths = (labels, logit_lengths, label_lengths)
        return earlier.tdt_loss(published, token_logits, duration_logits, *lengths, blank_token_id, list(durations))

    model.loss_function = loss_function


def dense_loss(kernel, model: torch.nn.Module) -> None:
    kernel.use_loss(model)


def fused_loss(kernel, model: torch.nn.Module) -> None:
    kernel.use_fused_loss(model)


@contextlib.contextmanager
def using(install: Callable, kernel, model: torch.nn.Module) -> Iterator[None]:
    """The model with one of the losses; afterwards as it was."""
    before = model._loss_function if hasattr(model, "_loss_function") else None
    try:
        install(kernel, model)
        yield
    finally:
        kernel.restore_loss(model)
        if before is None:
            vars(model).pop("_loss_function", None)
        else:
            model._loss_function = before


class Training:
    """One model and its optimizer on one device."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        self.model = build_model(size, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def batch(self, samples: int) -> dict[str, torch.Tensor]:
        return make_batch(self.size, self.model, samples, self.device)

    def autocast(self) -> torch.autocast:
        # Not on a CPU, where LSTMs of bfloat16 need instructions that many lack.
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu")

    def value(self, batch: dict[str, torch.Tensor]) -> float:
        """The loss in evaluation, where there is no dropout."""
        self.model.eval()
        with torch.no_grad(), self.autocast():
            loss = self.model(**batch).loss.item()
        self.model.train()
        return loss

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.synchronize()

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def timed_steps(self, batch: dict[str, torch.Tensor], seconds: float) -> list[float]:
        """Milliseconds of the steps of one turn."""
        for _ in range(WARMUP):
            self.step(batch)
        times: list[float] = []
        while len(times) < LEAST or (len(times) < MOST and sum(times) < seconds * 1e3):
            start = time.perf_counter()
            self.step(batch)
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def peak_bytes(self, batch: dict[str, torch.Tensor]) -> int | None:
        if self.device == "cpu":
            return None
        release()
        torch.cuda.reset_peak_memory_stats()
        self.step(batch)
        return torch.cuda.max_memory_allocated()

    def busy_ms(self, batch: dict[str, torch.Tensor]) -> float | None:
        """Milliseconds of one step in which the GPU ran a kernel or a copy."""
        if self.device == "cpu":
            return None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            self.step(batch)
        events = profile.profiler.kineto_results.events()
        gpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        # Annotations span the kernels that they name, with the gaps between these.
        work = [event for event in gpu if not event.is_user_annotation() and not event.name().startswith("Optimizer.")]
        return covered((event.start_ns(), event.start_ns() + event.duration_ns()) for event in work) / 1e6

    def fits(self, samples: int, limit: int) -> bool:
        """Whether a step of so many samples gets by with `limit` bytes of torch's allocator."""
        release()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        try:
            self.step(self.batch(samples))
            return True
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            self.optimizer.zero_grad(set_to_none=True)
            release()


def covered(intervals) -> int:
    """The length of the union of (start, end)."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n for which `fits(n)`, where it holds for all smaller ones too; 0 for none. Few calls where the guess is near."""
    low, step = 0, 1
    n = max(1, guess)
    if fits(n):
        low = n
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = n
        while high - step > 0 and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def guess_from(peaks: dict[int, int], limit: int) -> int:
    """The batch at which a line through two peaks meets the limit."""
    (first, low), (second, high) = sorted(peaks.items())[:2]
    slope = (high - low) / (second - first)
    return max(1, int(first + (limit - low) / slope)) if slope > 0 else second


def largest_batches(training: Training) -> dict[str, int | None]:
    """By the limit in GiB. None where the machine has less."""
    if training.device == "cpu":
        return {}
    peaks = {samples: training.peak_bytes(training.batch(samples)) for samples in (2, 4)}
    found: dict[str, int | None] = {}
    for gib in LIMITS_GIB:
        enough = gib * GIB <= torch.cuda.get_device_properties(0).total_memory
        fits = partial(training.fits, limit=gib * GIB)
        found[str(gib)] = largest(fits, guess_from(peaks, gib * GIB)) if enough else None
    return found


@dataclass(frozen=True)
class Clock:
    end: float

    def over(self) -> bool:
        return time.monotonic() > self.end


def reason_against(training: Training, kernel, install: Callable) -> str:
    """Nothing, or why the model does not train with this loss."""
    try:
        with using(install, kernel, training.model):
            training.value(training.batch(1))
    except NotImplementedError as error:
        return str(error)
    except TypeError as error:
        if install is not own_loss:
            raise
        return f"transformers cannot train it: {error}"
    return ""


@contextlib.contextmanager
def guarded(training: Training, rows: dict[str, dict], name: str) -> Iterator[None]:
    """With the memory of before given back; out of memory loses the row."""
    release()
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        rows[name] = {"ms": None, "lost": "out of memory"}
        training.optimizer.zero_grad(set_to_none=True)


def measure_batch(training: Training, kernel, losses: dict[str, Callable], samples: int, tiny: bool) -> dict[str, dict]:
    """The losses in turns. What does not fit is a lost row."""
    rows: dict[str, dict] = {name: {} for name in losses}
    times: dict[str, list[float]] = {name: [] for name in losses}
    batch = training.batch(samples)
    expected = None
    for name, install in losses.items():  # before any step, which changes the weights
        with guarded(training, rows, name), using(install, kernel, training.model):
            value = training.value(batch)
            expected = value if expected is None else expected
            if not abs(value / expected - 1) < TOLERANCE:
                rows[name] = {"ms": None, "lost": f"another loss: {value:.6g} for {expected:.6g}"}
    rounds, seconds = (1, 0.0) if tiny else (ROUNDS, TURN_SECONDS)
    for turn in range(rounds):
        for name, install in losses.items():
            if "lost" in rows[name]:
                continue
            with guarded(training, rows, name), using(install, kernel, training.model):
                times[name] += training.timed_steps(batch, seconds)
                if turn == rounds - 1:
                    rows[name] |= {
                        "peak_bytes": training.peak_bytes(batch),
                        "ms_gpu_busy": training.busy_ms(batch),
                    }
    for name, row in rows.items():
        if "lost" not in row:
            row |= Times.of(times[name]).fields() | {"steps": len(times[name])}
    return rows


def measure(
    size: Size, kernel, losses: dict[str, Callable], batches: list[int], device: str, tiny: bool, clock: Clock
) -> list[dict]:
    """All rows of one model."""
    common = {"model": size.name, "V": size.V, "seconds": size.seconds, "labels": size.labels}
    try:
        training = Training(size, device)
    except AttributeError as error:
        return [common | {"loss": name, "ms": None, "lost": f"transformers: {error}"} for name in losses]
    common["parameters"] = sum(p.numel() for p in training.model.parameters())
    reasons = {name: reason_against(training, kernel, install) for name, install in losses.items()}
    rows = [common | {"loss": name, "ms": None, "lost": reason} for name, reason in reasons.items() if reason]
    losses = {name: install for name, install in losses.items() if not reasons[name]}
    for samples in batches:
        if clock.over():
            print(f"left out for lack of time: {size.name}, batch {samples}", flush=True)
            continue
        for name, row in measure_batch(training, kernel, losses, samples, tiny).items():
            rows.append(common | {"loss": name, "batch": samples} | row)
            show(rows[-1])
    for name, install in losses.items() if device != "cpu" else ():
        if clock.over():
            print(f"left out for lack of time: the largest batch of {size.name}, {name}", flush=True)
            continue
        with using(install, kernel, training.model):
            rows.append(common | {"loss": name, "largest_batch": largest_batches(training)})
            print(f"{size.name:28} {name:20} largest batch by GiB: {rows[-1]['largest_batch']}", flush=True)
    return rows


def show(row: dict) -> None:
    said = row.get("lost") or f"{row['ms']:8.1f} ms ({row['ms_p20']:.1f} to {row['ms_p80']:.1f})"
    if row.get("peak_bytes"):
        said += f", GPU {row['ms_gpu_busy']:.1f} ms, peak {row['peak_bytes'] / GIB:.1f} GiB"
    print(f"{row['model']:28} {row['loss']:20} batch {row['batch']:3} {said}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--batches", type=int, nargs="*", help="8 and 16 by default, 2 of tiny models")
    parser.add_argument("--models", nargs="*", metavar="WORD", help="only those with one of these words in their names")
    parser.add_argument("--earlier", "--upstream", metavar="FOLDER_OR_REVISION", help=earlier.HELP)
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing new after so long")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder")
    options = parser.parse_args(argv)

    clock = Clock(time.monotonic() + options.seconds)
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    if not hasattr(kernel, "use_fused_loss"):
        raise SystemExit(
            "kernels-community/tdt-loss is the kernel published before: set LOCAL_KERNELS to this checkout"
        )
    losses: dict[str, Callable] = {"transformers": own_loss}
    if options.earlier:
        losses["earlier kernel"] = partial(earlier_loss, published=earlier.load(options.earlier))
    losses |= {"ours, from logits": dense_loss, "ours, fused": fused_loss}
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    batches = options.batches or ([2] if options.tiny else [8, 16])
    rows: list[dict] = []
    for size in TINY if options.tiny else SIZES:
        if options.models and not any(word in size.name for word in options.models):
            continue
        rows += measure(size, kernel, losses, batches, options.device, options.tiny, clock)
        release()
    common = {
        "gpu": device_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": version("transformers"),
        "earlier": options.earlier and Path(options.earlier).name,
        "commit": options.commit,
        "date": datetime.date.today().isoformat(),
    }
    output = options.output / f"{slug(device_name)}-end-to-end.json"
    output.write_text("[\n" + ",\n".join(json.dumps(row | common) for row in rows) + "\n]\n")
    print(output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
