#!/usr/bin/env python3
"""Run the test suite and keep its outcome, with the versions that it ran on, as benchmarks/results/tests-<device>.json.

CI has no GPU: what was run on one, when and on what, stands in these files.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/record_tests.py --built-against "torch 2.13.0, nvcc 13.0" [pytest arguments]
"""

import argparse
import collections
import datetime
import json
import platform
import sys
import time
from pathlib import Path

import pytest
import torch
from records import REPO, RESULTS, commit, slug, version


class Outcomes:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.skip_reasons: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skip_reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built-against", help="what the binary was compiled with, kept as given")
    parser.add_argument("--commit", default=commit(), help="where there is no git checkout")
    parser.add_argument("--output", type=Path, help="instead of benchmarks/results/tests-<device>.json")
    options, pytest_arguments = parser.parse_known_args()

    outcomes = Outcomes()
    start = time.monotonic()
    status = pytest.main([str(REPO / "tests"), *pytest_arguments], plugins=[outcomes])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    from kernels import get_kernel

    result = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "device": device,
        "passed": outcomes.counts["passed"],
        "failed": outcomes.counts["failed"],
        "skipped": outcomes.counts["skipped"],
        "failed_tests": outcomes.failed,
        "skip_reasons": dict(outcomes.skip_reasons),
        "seconds": round(time.monotonic() - start),
        "binary": get_kernel("kernels-community/tdt-loss", version=1).__name__,
        "built_against": options.built_against,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": version("kernels"),
        "transformers": version("transformers"),
    }
    output = options.output or RESULTS / f"tests-{slug(device)}.json"
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{output}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped on {device}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
