"""What the records of measurements and test runs share: their files, what they say of where they come from, and their tables in the documents."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results"


def slug(device: str) -> str:
    """A device's name as its files have it: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False).stdout.strip() or None


def put(text: str, marker: str, content: str) -> str:
    """The text with what stands between two markers replaced."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"
