"""Run the losses inside real frameworks: an environment for each, its run, and what came out in benchmarks/results/frameworks.json
and in the docs.

    make test-frameworks                       all of them
    python tools/test_frameworks.py nemo       one

The environments lie under .frameworks/ and are made once; remove a folder to make its environment anew. The kernel must be
built (`make build`). Each run is a script in tests/frameworks/, which trains on the five recordings of the examples and fails
where a bound is broken. The record of a framework that is not run stays as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.json"
SHARED = ["torch==2.13.0", "kernels==0.17.2", "numpy"]
# For each framework, calls of pip in order. Flags stand where the requirements of a package exclude each other.
ENVIRONMENTS = {
    "transformers": [
        [*SHARED, "transformers==5.22.2", "accelerate", "librosa", "jiwer", "matplotlib", "tqdm", "peft"],
        ["--no-deps", "transformers==5.24.0"],  # it asks for kernels 0.18.2, which no index has
    ],
    "transformers-oldest": [
        [*SHARED, "transformers==5.22.2", "accelerate", "librosa", "jiwer", "matplotlib", "tqdm"],
        ["transformers==5.14.0"],  # the first with all four models
    ],
    "nemo": [[*SHARED, "nemo_toolkit[asr]==3.0.0"]],
    "speechbrain": [[*SHARED, "speechbrain==1.1.2", "numba"]],
    "espnet": [
        # Its pinned requirements do not install together; these are those that the transducer needs.
        [*SHARED, "scipy", "typeguard", "humanfriendly", "librosa", "PyYAML", "soundfile", "h5py", "kaldiio"],
        ["torch_complex", "nltk", "protobuf", "opt-einsum", "sentencepiece", "editdistance", "jamo", "packaging"],
        ["configargparse", "torch_optimizer", "asteroid_filterbanks", "einops", "setuptools", "numba"],
        ["--no-deps", "espnet==202511"],
    ],
}
SCRIPTS = {"transformers-oldest": "run_transformers.py"}
VERSIONS = (
    "torch",
    "kernels",
    "transformers",
    "nemo_toolkit",
    "lightning",
    "speechbrain",
    "espnet",
    "torchaudio",
    "numba",
)


def environment(name: str) -> tuple[Path, float]:
    """The interpreter of a framework's environment, and the seconds it took to make it (0: it was there)."""
    folder = ROOT / ".frameworks" / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.is_file():
        return python, 0.0
    print(f"{name}: installing into {folder.relative_to(ROOT)}", flush=True)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for arguments in ENVIRONMENTS[name]:
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
        subprocess.run(pip, check=True)
    if not next(folder.glob("lib/*/site-packages/torch/lib/libtorch_cuda.so"), None):
        # torchaudio's binary wants CUDA's libraries, and torchaudio imports without it; SpeechBrain needs the import alone.
        for binary in folder.glob("lib/*/site-packages/torchaudio/lib/*.so"):
            binary.unlink()
    ready.touch()
    return python, time.monotonic() - start


def installed(python: Path) -> dict[str, str]:
    """Versions of what matters in an environment."""
    code = "import json, sys\nfrom importlib import metadata\n"
    code += "print(json.dumps({d.name.lower(): d.version for d in metadata.distributions(path=sys.path) if d.name}))"
    found = json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
    return {name: found[key] for name in VERSIONS if (key := name.replace("_", "-")) in found or (key := name) in found}


def run(name: str, seconds: int) -> dict:
    """The record of one framework: versions, times, what its script found, whether it passed."""
    python, install = environment(name)
    script = ROOT / "tests" / "frameworks" / SCRIPTS.get(name, f"run_{name}.py")
    own = {"LOCAL_KERNELS": f"kernels-community/tdt-loss={ROOT}", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    print(f"{name}: {script.relative_to(ROOT)}", flush=True)
    start, lines, code = time.monotonic(), [], None
    process = subprocess.Popen(
        [python, script], env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        lines, code = output.splitlines(), process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        lines = process.communicate()[0].splitlines()
    print("\n".join(lines[:-1]), flush=True)
    record = {"passed": code == 0, "date": date.today().isoformat(), "versions": installed(python)}
    record["seconds"] = {"run": round(time.monotonic() - start, 1)}
    if install:
        record["seconds"]["install"] = round(install, 1)
    try:
        record["found"] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        record["found"] = {"failures": [f"ended with status {code}: {' '.join(lines[-1:])[:200]}"]}
    print(f"{name}: {'passed' if record['passed'] else 'FAILED'} in {record['seconds']['run']} s", flush=True)
    return record


PAGES = {
    "TRANSFORMERS.md": ("transformers", "transformers-oldest"),
    "NEMO.md": ("nemo",),
    "MIGRATING.md": ("speechbrain", "espnet"),
}
MARK = "<!-- what was run -->"


def table(name: str, record: dict) -> str:
    """What a framework's run has found, in Markdown."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    verdict = "passed" if record["passed"] else "FAILED: " + "; ".join(record["found"].get("failures", []))
    rows = [f"**{name}**, {record['date']}, on a CPU: {versions}; {verdict} in {record['seconds']['run']} s.", ""]
    rows += ["| what | found |", "| --- | --- |"]
    for what, value in record["found"].items():
        if what not in ("failures", "paths", "seconds", "version"):
            rows.append(f"| {what} | {value:.2g} |" if isinstance(value, float) else f"| {what} | {value} |")
    return "\n".join(rows)


def write_docs(results: dict[str, dict]) -> None:
    """Put the tables at the end of the pages, behind the mark."""
    for page, names in PAGES.items():
        path = ROOT / "docs" / page
        text = path.read_text(encoding="utf-8").split(MARK)[0]
        tables = [table(name, results[name]) for name in names if name in results]
        path.write_text(text + MARK + "\n\n" + "\n\n".join([*tables, ""]).rstrip("\n") + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the losses inside real frameworks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for each run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in ENVIRONMENTS:
            parser.error(f"no framework {name!r}; there are {', '.join(ENVIRONMENTS)}")
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    failed = []
    for name in args.names or ENVIRONMENTS:
        record = run(name, args.timeout)
        record["python"], record["processor"] = platform.python_version(), platform.machine()
        if "install" not in record["seconds"] and "install" in results.get(name, {}).get("seconds", {}):
            record["seconds"]["install"] = results[name]["seconds"]["install"]  # of when the environment was made
        results[name] = record
        failed += [name] if not record["passed"] else []
        args.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if args.output == RESULTS:
        write_docs(results)
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
