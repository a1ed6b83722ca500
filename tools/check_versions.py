#!/usr/bin/env python3
"""Run the quick subset of the suite with the torch of this interpreter on a binary that another torch compiled.

    python tools/check_versions.py --variant cpu --built-against "torch 2.13.0+cpu, g++ 12.2"

The outcome goes into benchmarks/results/abi.json, a row for each variant, torch and device, and all rows into the table
of docs/BUILDING.md. Any torch that the stable ABI of build.toml reaches will do, beside what
requirements-dev.txt names; words after the options go to pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "benchmarks"))

from records import RESULTS, put, version  # noqa: E402
from records import commit as commit_at_hand  # noqa: E402

ABI = RESULTS / "abi.json"
BUILDING = REPO / "docs" / "BUILDING.md"


def run(
    variant: str, as_cuda: str | None, built_against: str | None, commit: str | None, pytest_arguments: list[str]
) -> dict:
    os.environ["LOCAL_KERNELS"] = f"kernels-community/tdt-loss={REPO}"
    import torch

    if variant == "cpu":
        torch.version.cuda = None  # kernels then takes the CPU variant, also where torch is a CUDA build
    elif as_cuda:
        torch.version.cuda = as_cuda
    import kernels
    import pytest
    import record_tests

    outcomes = record_tests.Outcomes()
    pytest.main([str(REPO / "tests"), "-m", "kernels_ci", *pytest_arguments], plugins=[outcomes])
    kernel = kernels.get_kernel("kernels-community/tdt-loss", version=1)
    return {
        "variant": Path(kernel.__file__).parent.name,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if variant == "cuda" and torch.cuda.is_available() else "CPU",
        "passed": outcomes.counts["passed"],
        "failed": outcomes.counts["failed"],
        "skipped": outcomes.counts["skipped"],
        "skip_reasons": dict(outcomes.skip_reasons),
        "binary": kernel.__name__,
        "built_against": built_against,
        "python": platform.python_version(),
        "kernels": version("kernels"),
        "commit": commit or commit_at_hand(),
        "date": datetime.date.today().isoformat(),
    }


def place(row: dict) -> tuple[str, list[int], str]:
    """What a row is about, for there is one for each; and its place in the table."""
    numbers = [int(part) for part in row["torch"].split("+")[0].split(".")[:2]]
    return row["variant"], numbers, row["device"]


def table(rows: list[dict]) -> str:
    lines = ["| variant | built against | run with | on | passed | failed | commit | date |", "| --- " * 8 + "|"]
    for row in rows:
        variant = row["variant"].removeprefix("torch-stable-abi")
        cells = [variant, row["built_against"], f"torch {row['torch']}", row["device"], row["passed"], row["failed"]]
        lines.append("| " + " | ".join(map(str, [*cells, row["commit"], row["date"]])) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["cpu", "cuda"], required=True, help="the build to load")
    parser.add_argument(
        "--as-cuda",
        metavar="VERSION",
        help="load the variant of this CUDA, not that of torch's: for its CPU kernels alone, where there is no GPU",
    )
    parser.add_argument("--built-against", help="what the binary was compiled with, kept as given")
    parser.add_argument("--commit", help="where there is no git checkout")
    options, pytest_arguments = parser.parse_known_args()

    row = run(options.variant, options.as_cuda, options.built_against, options.commit, pytest_arguments)
    rows = json.loads(ABI.read_text()) if ABI.exists() else []
    rows = sorted([row, *(other for other in rows if place(other) != place(row))], key=place)
    ABI.write_text(json.dumps(rows, indent=2) + "\n")
    BUILDING.write_text(put(BUILDING.read_text(), "abi", table(rows)))
    print(f"{row['variant']} with torch {row['torch']}: {row['passed']} passed, {row['failed']} failed")
    return 1 if row["failed"] or not row["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
