#!/usr/bin/env python3
"""Build and test as the official builder of Hugging Face does, without nix.

    python tools/official_build.py [--program kernel-builder] [--work FOLDER] [--require]

The official builder writes a CMake project beside the sources and compiles that, and its CI runs the tests that are marked
kernels_ci in an environment with few packages. This script repeats it for the CPU, in a folder of its own:

  1. The files that reach the builder are copied: build.toml, the sources that it lists, and the Python files under
     torch-ext and tests. README.md, benchmarks/, examples/ and tools/ do not reach it.
  2. `kernel-builder check-config` reads build.toml and `kernel-builder create-pyproject` writes the CMake project.
  3. CMake compiles it with the official flags.
  4. pytest runs the tests marked kernels_ci on that build, where only torch, kernels, pytest, what these need, and the packages that
     flake.nix names in pythonCheckInputs can be imported.

It takes the program kernel-builder, which is on no package registry (docs/BUILDING.md), CMake 3.26 or newer, ninja and setuptools. Where
one of them is absent, the script says what is left out and ends with 0; with --require it ends with 1. Otherwise the exit status is that
of the first step that fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CMAKE = (3, 26)  # what the official project asks for
NO_TESTS = 5  # pytest's exit status where nothing is selected, with which the official CI is content

# Runs before anything else in each interpreter of step 4: the modules of all other installed packages cannot be imported.
SITECUSTOMIZE = """\
import sys
from importlib.machinery import PathFinder


class PresentFinder(PathFinder):
    absent = {names!r}

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in cls.absent else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = PresentFinder
"""


def reaching_files(root: Path) -> list[Path]:
    """What the builder takes of the repository, relative to it."""
    config = tomllib.loads((root / "build.toml").read_text())
    listed = [*config["torch"]["src"], *(name for kernel in config["kernel"].values() for name in kernel["src"])]
    python = (path.relative_to(root) for folder in ("torch-ext", "tests") for path in (root / folder).rglob("*.py"))
    return sorted({Path("build.toml"), *map(Path, listed), *python})


def check_inputs(flake: str) -> list[str]:
    """The packages that flake.nix adds to the environment of the tests."""
    match = re.search(r"pythonCheckInputs\s*=[^\[]*\[([^\]]*)\]", flake)
    return match[1].split() if match else []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names: Iterable[str]) -> set[str]:
    """The packages and all that they require on this machine, extras left out."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform or Python
        found.add(name)
        waiting += [canonical(re.match(r"[\w.-]+", line)[0]) for line in requirements if "extra ==" not in line]
    return found


def absent_modules(present: set[str]) -> set[str]:
    """The top-level modules of this interpreter's packages that belong to none of those `present`."""
    return {
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not present & {canonical(package) for package in packages}
    }


def cmake_version(path: str) -> tuple[int, ...]:
    """(0,) where there is none."""
    program = shutil.which("cmake", path=path)
    if program is None:
        return (0,)
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else (0,)


def missing(program: str | None, path: str) -> list[str]:
    lacking = [] if program else ["the program kernel-builder (on PATH, in KERNEL_BUILDER or by --program)"]
    if cmake_version(path) < CMAKE:
        lacking.append("CMake 3.26 or newer (pip install cmake)")
    if shutil.which("ninja", path=path) is None:
        lacking.append("ninja (pip install ninja)")
    try:
        importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        lacking.append("setuptools (pip install setuptools)")
    return lacking


def step(title: str, command: list[str | Path], cwd: Path, environment: dict[str, str]) -> int:
    """Runs it; shows what it printed only where it fails, except for pytest's words."""
    print(f"-- {title}", flush=True)
    if "pytest" in map(str, command):
        return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout)
        return done.returncode
    # Warnings of the compilers about our sources would be findings; those about the generated project are not ours.
    for line in done.stdout.splitlines():
        if re.search(r"(tdt_loss_\w+|torch-ext)/.*warning", line):
            print(line)
    return 0


def replay(program: str, work: Path, environment: dict[str, str]) -> int:
    source = work / "source"
    for file in reaching_files(REPO):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / file, source / file)
    git = ["git", "-C", str(REPO), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "0" * 40
    create = [program, "create-pyproject", "--force", "--unique-id", commit[:7], "--kernel-sha", commit, source]
    for title, command in (
        ("kernel-builder check-config", [program, "check-config", source]),
        ("kernel-builder create-pyproject", create),
        ("the official CMake build", [sys.executable, "setup.py", "build_kernel"]),
    ):
        if status := step(title, command, source, environment):
            return status
    built = sorted(path.parent for path in (source / "build").glob("*/metadata.json"))
    if not built:
        print("the build left no variant behind")
        return 1
    print("built", *(f"{path.name}: {json.loads((path / 'metadata.json').read_text())['id']}" for path in built))

    inputs = check_inputs((REPO / "flake.nix").read_text())
    present = with_requirements(["torch", "kernels", "pytest", *inputs])
    site = work / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(names=absent_modules(present)))
    tests = environment | {
        "PYTHONPATH": os.pathsep.join([str(site), str(built[0])]),
        "LOCAL_KERNELS": f"kernels-community/tdt-loss={source}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins of absent packages would fail to load
    }
    command = [sys.executable, "-m", "pytest", source / "tests", "-m", "kernels_ci", "-q", "-p", "no:cacheprovider"]
    status = step("the CI test", command, work, tests)
    return 0 if status == NO_TESTS else status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("KERNEL_BUILDER") or "kernel-builder")
    parser.add_argument("--work", type=Path, help="a new folder that is kept; otherwise a temporary one")
    parser.add_argument("--require", action="store_true", help="fail where something is absent")
    options = parser.parse_args()

    # What pip puts beside the interpreter comes before what the system has.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(options.program, path=path)
    if lacking := missing(program, path):
        print("left out: the official build and its CI test, for lack of", "; ".join(lacking))
        return 1 if options.require else 0
    program = str(Path(program).resolve())  # the steps run in other folders
    environment = os.environ | {"PATH": path}
    if options.work:
        options.work.mkdir(parents=True)
        return replay(program, options.work.resolve(), environment)
    with tempfile.TemporaryDirectory(prefix="official-build-") as work:
        return replay(program, Path(work), environment)


if __name__ == "__main__":
    sys.exit(main())
