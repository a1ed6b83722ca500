#!/usr/bin/env python3
"""Run NVIDIA's compute-sanitizer over the fuzzer on a GPU, and keep the outcome as benchmarks/results/compute-sanitizer-<device>.json.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python tools/sanitize_cuda.py --cases 300
    python tools/sanitize_cuda.py --tools racecheck --fused --kernel-name-exclude kns=gemm       further options go to compute-sanitizer

synccheck runs on a build of its own, whose warps wait for each other in the only form that it knows (tdt_loss_cuda/strip.cuh):

    python tools/build_kernel.py --backend cuda --cuda-flags=-DTDT_SYNCCHECK --output .build/synccheck/build

Every tensor gets memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that a read beyond one is a read beyond an allocation. The fused losses, whose
matrix products are cuBLAS' kernels, are left out of racecheck and initcheck unless --fused says otherwise. Of malformed calls, initcheck has nothing to
say that is not known: lengths that grow behind torch's back make the gradient of their own sample read what nobody wrote.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "benchmarks"))

from records import RESULTS, commit, slug  # noqa: E402

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
SYNCCHECK_BUILD = REPO / ".build" / "synccheck"
FOUND = 86  # exit status where a tool has found something


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False).stdout.strip()


def run(tool: str, kind: str, options: argparse.Namespace, further: list[str]) -> dict:
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--report-api-errors",
        "no",
        *further,
    ]
    command += [sys.executable, "tests/fuzz.py", "--in-process", "--device", "cuda", "--kind", kind]
    command += ["--cases", str(options.cases), "--seed", str(options.seed)]
    if tool in ("racecheck", "initcheck") and not options.fused:
        command.append("--skip-fused")
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if tool == "synccheck":
        environment["LOCAL_KERNELS"] = f"kernels-community/tdt-loss={SYNCCHECK_BUILD}"
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    summary = [line for line in lines if "SUMMARY" in line or line.startswith(f"{kind}:")]
    print(f"{tool} {kind}: exit {done.returncode}, {time.monotonic() - start:.0f} s", *summary, sep="\n  ", flush=True)
    if done.returncode != 0:
        sites = Counter(re.sub(r"^=+ +", "", line) for line in lines if re.match(r"=+ +at ", line))
        print(*lines[:40], *(f"{n} times {site}" for site, n in sites.most_common()), sep="\n", flush=True)
    return {
        "tool": tool,
        "kind": kind,
        "fused": "--skip-fused" not in command,
        "exit": done.returncode,
        "summary": [re.sub(r"^=+ ", "", line) for line in summary],
        "seconds": round(time.monotonic() - start),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="of each kind, for each tool (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--fused", action="store_true", help="the fused losses under every tool")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--output", type=Path, help="instead of benchmarks/results/compute-sanitizer-<device>.json")
    options, further = parser.parse_known_args()
    if "synccheck" in options.tools and not SYNCCHECK_BUILD.exists():
        parser.error(f"no build for synccheck in {SYNCCHECK_BUILD}: --help says how to make it")

    kinds = {tool: ["valid"] if tool == "initcheck" else ["valid", "malformed"] for tool in options.tools}
    runs = [run(tool, kind, options, further) for tool in options.tools for kind in kinds[tool]]
    device = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "device": device,
        "cases": options.cases,
        "seed": options.seed,
        "compute_sanitizer": output_of("compute-sanitizer", "--version").splitlines()[-1],
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "options": further,
        "runs": runs,
    }
    output = options.output or RESULTS / f"compute-sanitizer-{slug(device)}.json"
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {output}")
    return int(any(outcome["exit"] != 0 for outcome in runs))


if __name__ == "__main__":
    sys.exit(main())
