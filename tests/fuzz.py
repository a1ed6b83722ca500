#!/usr/bin/env python3
"""Fuzz the kernel: valid calls against the float64 oracle (support/fuzzing/valid.py), malformed
ones against what is documented (support/fuzzing/malformed.py).

    python tests/fuzz.py --cases 10000                            both kinds on the CPU, into benchmarks/results/fuzz-cpu.json
    python tests/fuzz.py --cases 5000 --device cuda --kind valid
    python tests/fuzz.py --kind malformed --first 64 --cases 1 --no-record --show         one case again

Case k of seed S is a function of "S/k" alone, whatever ran before it. Cases run in processes of their own, a few hundred each: a crash, a hang or a CUDA
context that an error has poisoned costs the case that did it, and the rest goes on in a new process.

For a sanitizer, one process per kind and no more: --in-process, under `compute-sanitizer --tool memcheck` or with libasan preloaded. --skip-fused leaves
out the fused losses, whose matrix products are cuBLAS' own kernels.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

KINDS = {"valid": "support.fuzzing.valid", "malformed": "support.fuzzing.malformed"}
BATCH = 250  # cases of a process
SECONDS = 900  # that a process may take


def reproduction(kind: str, device: str, seed: int, k: int) -> str:
    return (
        f"python tests/fuzz.py --kind {kind} --device {device} --seed {seed} --first {k} --cases 1 --no-record --show"
    )


def run_cases(kind: str, device: str, seed: int, first: int, cases: int, *, skip_fused=False, started=None, show=False):
    """Runs cases in this process; yields (k, None or what went wrong). `started`: a file that always holds the number of the case under way."""
    from support import environment  # noqa: F401  before torch and kernels

    check = importlib.import_module(KINDS[kind]).check
    import numpy as np
    import torch
    from kernels import get_kernel

    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    np.seterr(all="ignore")  # the oracle's logarithms of 0
    for k in range(first, first + cases):
        if started is not None:
            started.seek(0)
            started.write(f"{k:12d}")
            started.flush()
        failure = None
        try:
            text = check(kernel, f"{seed}/{k}", device, skip_fused=skip_fused)
            if show:
                print(text)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failure = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        yield k, failure


def work(options: argparse.Namespace) -> int:
    """A process of its own: failures as lines of JSON."""
    import torch

    torch.set_num_threads(options.threads)
    failed = 0
    with open(options.progress or os.devnull, "w") as started:
        arguments = (options.kind, options.device, options.seed, options.first, options.cases)
        for k, failure in run_cases(*arguments, skip_fused=options.skip_fused, started=started, show=options.show):
            if failure is None:
                continue
            failed += 1
            print(json.dumps({"case": k, "failure": failure[:2000]}), flush=True)
            if options.device == "cuda" and is_poisoned():
                return 3
    if options.in_process:
        print(f"{options.kind}: {options.cases} cases of seed {options.seed} from {options.first}, {failed} failures")
    return 0 if not options.in_process else int(failed > 0)


def is_poisoned() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def run_batch(kind: str, options: argparse.Namespace, first: int, cases: int) -> list[dict]:
    """The failures of some cases, each run in some process."""
    failures, last = [], first + cases
    while first < last:
        with tempfile.NamedTemporaryFile("r") as progress:
            command = [sys.executable, __file__, "--worker", "--progress", progress.name, "--kind", kind]
            command += ["--device", options.device, "--seed", str(options.seed), "--threads", str(options.threads)]
            command += ["--first", str(first), "--cases", str(last - first)] + ["--skip-fused"] * options.skip_fused
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                status, output, errors = done.returncode, done.stdout, done.stderr
            except subprocess.TimeoutExpired as expired:
                status, output, errors = None, (expired.stdout or b"").decode(), ""
            failures += [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
            if status == 0:
                break
            reached = progress.read().strip()
        if not reached:
            raise RuntimeError(f"no case was started:\n{errors[-3000:]}")
        k = int(reached)
        if status != 3:  # after which the case has reported itself
            name = (
                "hang"
                if status is None
                else f"signal {signal.Signals(-status).name}"
                if status < 0
                else f"exit {status}"
            )
            failures.append({"case": k, "failure": f"CRASH, {name}: {errors[-1500:]}"})
        first = k + 1
    return failures


def record(kind: str, options: argparse.Namespace, failures: list[dict], seconds: float) -> None:
    """Puts the outcome into benchmarks/results/fuzz-<device>.json, beside that of the other kind."""
    sys.path.insert(0, str(REPO / "benchmarks"))
    import torch
    from kernels import get_kernel
    from records import RESULTS, commit, slug, version
    from support import environment  # noqa: F401  before torch and kernels

    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    path = options.output or RESULTS / f"fuzz-{slug(device)}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[kind] = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or commit(),
        "device": device,
        "cases": options.cases,
        "seed": options.seed,
        "first": options.first,
        "fused": not options.skip_fused,
        "failures": len(failures),
        "failed_cases": failures,
        "seconds": round(seconds),
        "binary": get_kernel("kernels-community/tdt-loss", version=1).__name__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": version("kernels"),
    }
    path.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    print(f"written to {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, help="processes at a time (default: one per core; on cuda at most 4)")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process (default: %(default)s)")
    parser.add_argument("--skip-fused", action="store_true", help="leave out the losses that call cuBLAS")
    parser.add_argument("--in-process", action="store_true", help="no processes, no record: to run under a sanitizer")
    parser.add_argument("--show", action="store_true", help="with --cases 1: say what the case is")
    parser.add_argument("--commit", help="where there is no git checkout")
    parser.add_argument("--output", type=Path, help="instead of benchmarks/results/fuzz-<device>.json")
    parser.add_argument("--no-record", action="store_true", help="leave the results file alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = list(KINDS) if options.kind == "both" else [options.kind]
    if options.worker:
        return work(options)
    if options.in_process or options.show:
        options.in_process = True
        return max(work(argparse.Namespace(**(vars(options) | {"kind": kind}))) for kind in kinds)

    jobs = options.jobs or min(os.cpu_count() or 1, 4 if options.device == "cuda" else 64)
    total = 0
    for kind in kinds:
        start = time.monotonic()
        last = options.first + options.cases
        batches = [(first, min(BATCH, last - first)) for first in range(options.first, last, BATCH)]
        failures = []
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for found in pool.map(lambda batch, kind=kind: run_batch(kind, options, *batch), batches):
                for failure in found:
                    print(f"{kind} seed {options.seed} case {failure['case']}: {failure['failure']}")
                    print(f"  again: {reproduction(kind, options.device, options.seed, failure['case'])}", flush=True)
                failures += found
        seconds = time.monotonic() - start
        classes = Counter(failure["failure"].split(":")[0] for failure in failures)
        print(f"{kind}: {options.cases} cases of seed {options.seed} on {options.device} in {seconds:.0f} s, ", end="")
        print(f"{len(failures)} failures {dict(classes) or ''}", flush=True)
        if not options.no_record:
            record(kind, options, failures, seconds)
        total += len(failures)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
