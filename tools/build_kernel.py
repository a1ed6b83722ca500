#!/usr/bin/env python3
"""Build the kernel for this machine where nix is not to be had, laid out as the Hub holds it:

    build/torch-stable-abi210-cpu-x86_64-linux/     always
    build/torch-stable-abi210-cu130-x86_64-linux/   where there is nvcc; no GPU and no CUDA build of PyTorch is needed
        __init__.py loss.py ...                     the files of torch-ext/<package>
        _ops.py                                     the ops of this build, under a namespace of its own
        _<package>_<backend>_<id>.abi3.so           <id> is a hash over sources and flags
        metadata.json

Sources, flags and the version of PyTorch's stable ABI come from build.toml. Objects are cached in .build under a hash of
everything that goes into them, so only what changed is compiled. A variant is replaced as a whole, and only after
everything compiled: a failed build leaves the last good one.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTHON_ABI = "0x03090000"  # the limited API of Python 3.9
CUDA_ARCHS = ["8.0", "9.0+PTX"]  # machine code for 8.x and 9.x, and PTX for everything newer
CACHE_DAYS = 7

# The few names of Python's stable ABI that a module without methods needs, so that no Python headers must be installed.
REGISTRATION_H = """\
#pragma once

#include <cstddef>

extern "C" {
struct RegisteredModule {
  ptrdiff_t refcount;
  void* type;
  void* init;
  ptrdiff_t index;
  void* copy;
  const char* name;
  const char* doc;
  ptrdiff_t size;
  void* rest[5];
};
void* PyModule_Create2(RegisteredModule* module, int abi);
}

#define REGISTRATION_CONCAT_(a, b) a##b
#define REGISTRATION_CONCAT(a, b) REGISTRATION_CONCAT_(a, b)
#define REGISTRATION_STRING_(a) #a
#define REGISTRATION_STRING(a) REGISTRATION_STRING_(a)

// Makes the library an importable Python module; the import runs the static initialisers that register the ops.
#define REGISTER_EXTENSION(name)                                                                     \\
  extern "C" __attribute__((visibility("default"))) void* REGISTRATION_CONCAT(PyInit_, name)() {     \\
    static RegisteredModule module = {1, nullptr, nullptr, 0, nullptr, REGISTRATION_STRING(name), nullptr, 0, {}}; \\
    return PyModule_Create2(&module, 3);                                                             \\
  }
"""

OPS_PY = '''\
import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an op of this build, for torch.library."""
    return f"{name}::{{op_name}}"
'''

# Nothing but the module's entry point is visible, so that no other library can bind to what is linked in.
EXPORTS = "{ global: PyInit_*; local: *; };\n"


class BuildError(Exception):
    """What the user has to know about a build that cannot go on."""


@dataclass(frozen=True)
class Project:
    """What build.toml says."""

    root: Path
    name: str
    version: int
    license: str
    python_depends: list[str]
    stable_abi: dict[str, str]
    torch: dict[str, Any]
    kernels: list[dict[str, Any]]

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    @classmethod
    def read(cls, root: Path) -> Project:
        toml = read_toml(root / "build.toml")
        general = toml["general"]
        return cls(
            root=root,
            name=general["name"],
            version=general["version"],
            license=general["license"],
            python_depends=general.get("python-depends", []),
            stable_abi=toml["torch"]["stable-abi"],
            torch=toml["torch"],
            kernels=list(toml["kernel"].values()),
        )

    def sections(self, backend: str) -> list[dict[str, Any]]:
        """The tables that list this backend's sources: the kernels', then the binding's."""
        return [*(kernel for kernel in self.kernels if kernel["backend"] == backend), self.torch]


@dataclass(frozen=True)
class Toolchain:
    """The compilers, and the PyTorch whose headers they read."""

    cxx: str
    cxx_version: str
    torch: Path
    torch_version: str
    nvcc: str | None
    nvcc_version: str

    @property
    def cuda_tag(self) -> str:
        release = re.search(r"release (\d+)\.(\d+)", self.nvcc_version)
        if release is None:
            raise BuildError(f"{self.nvcc} --version names no CUDA release:\n{self.nvcc_version}")
        return f"cu{release[1]}{release[2]}"


@dataclass
class Unit:
    """One source file of one variant."""

    source: str
    content: str  # hash of the file and of the project's headers that it includes
    flags: list[str]  # what the id of the build depends on
    local: list[str]  # what differs from machine to machine
    compiler: str
    versions: str  # of compiler and PyTorch
    output: Path = field(default=Path())

    def command(self) -> list[str]:
        return [self.compiler, *self.flags, *self.local, "-c", self.source]

    def key(self) -> str:
        return hash_of([self.command(), self.versions, self.content])


@dataclass(frozen=True)
class Variant:
    """One folder of build/."""

    backend: str
    folder: str  # its name
    ops_name: str  # Python module, op namespace and metadata id of this build
    units: list[Unit]
    archs: list[str]
    extra_flags: list[str]


def read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise BuildError("reading build.toml takes Python 3.11 or newer, or the package tomli") from None
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BuildError(f"cannot read {path}: {error}") from None


def hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]


def write_if_changed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def version_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [os.environ.get("NVCC"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def find_toolchain(project: Project) -> Toolchain:
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "c++", "clang++"]
    cxx = next((path for name in names if (path := shutil.which(name))), None)
    if cxx is None:
        hint = "set CXX to a compiler that exists" if wanted else "install g++, or set CXX"
        raise BuildError(f"no C++ compiler: none of {', '.join(names)} was found; {hint}")

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"PyTorch is not installed for {sys.executable}: pip install torch")
    torch_version = importlib.metadata.version("torch")
    newest = max(project.stable_abi.values(), key=release)
    if release(torch_version) < release(newest):
        raise BuildError(f"PyTorch {newest} or newer is needed for its stable ABI, this is {torch_version}")

    nvcc = find_nvcc()
    return Toolchain(
        cxx=cxx,
        cxx_version=version_of(cxx),
        torch=Path(spec.submodule_search_locations[0]),
        torch_version=torch_version,
        nvcc=nvcc,
        nvcc_version=version_of(nvcc) if nvcc else "",
    )


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def content_hash(source: Path, include_dirs: list[Path]) -> str:
    """Hash of a source file and of every `#include "..."` that it reaches and that is found in the project."""
    seen: dict[Path, str] = {}
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        try:
            text = path.read_text()
        except OSError as error:
            raise BuildError(f"cannot read a source that build.toml lists: {error}") from None
        seen[path] = hashlib.sha256(text.encode()).hexdigest()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            found = next((p for d in [path.parent, *include_dirs] if (p := d / name).is_file()), None)
            if found:
                todo.append(found.resolve())
    return hash_of(sorted(seen.values()))


def plan(
    project: Project,
    tools: Toolchain,
    backend: str,
    archs: list[str],
    extra_flags: list[str],
    extra_cuda_flags: list[str],
    work: Path,
) -> Variant:
    """What has to be compiled for one backend, and how."""
    major, minor = release(project.stable_abi[backend])
    defines = [
        "-DTORCH_STABLE_ONLY",
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000",
        f"-DPy_LIMITED_API={PYTHON_ABI}",
        f"-D{backend.upper()}_KERNEL",
    ]
    if backend == "cuda":
        defines.append("-DUSE_CUDA")  # declares the stream and error-check functions of PyTorch's stable ABI
    gencode = [f"-gencode={code}" for arch in archs for code in gencode_of(arch)] if backend == "cuda" else []

    units = []
    for section in project.sections(backend):
        include_dirs = [work / "include", *(project.root / name for name in section.get("include", []))]
        places = [*(f"-I{path}" for path in include_dirs), "-isystem", f"{tools.torch}/include"]
        # What the compiler records of file names is the same on every machine.
        maps = [f"-ffile-prefix-map={project.root}/=", f"-ffile-prefix-map={tools.torch}/include/="]
        for source in section["src"]:
            if source.endswith((".h", ".hpp", ".cuh")):
                continue
            cuda = source.endswith(".cu")
            common = ["-std=c++17", "-O3", *defines]
            host = ["-fPIC", "-fvisibility=hidden", "-Wall"]
            if cuda:
                host = [f"-Xcompiler={','.join(host)}"]
                flags = [
                    *common,
                    *host,
                    *gencode,
                    "--expt-relaxed-constexpr",
                    "-lineinfo",
                    *section.get("cuda-flags", []),
                    *extra_cuda_flags,
                ]
                local = ["-ccbin", tools.cxx, "--threads=2", f"-Xcompiler={','.join(maps)}", *places]
            else:
                flags = [*common, *host, *section.get("cxx-flags", []), *extra_flags]
                local = [*maps, *places]
            units.append(
                Unit(
                    source=source,
                    content=content_hash(project.root / source, include_dirs),
                    flags=flags,
                    local=local,
                    compiler=str(tools.nvcc) if cuda else tools.cxx,
                    versions=f"{tools.cxx_version} {tools.nvcc_version if cuda else ''} {tools.torch_version}",
                )
            )

    build_id = hash_of([[unit.source, unit.content, unit.flags] for unit in units])[:12]
    ops_name = f"_{project.package}_{backend}_{build_id}"
    for unit in units:
        if unit.source in project.torch["src"]:
            unit.flags.append(f"-DTORCH_EXTENSION_NAME={ops_name}")
        unit.output = work / "objects" / f"{unit.key()}.o"

    tag = tools.cuda_tag if backend == "cuda" else "cpu"
    folder = f"torch-stable-abi{major}{minor}-{tag}-{platform.machine()}-linux"
    return Variant(backend, folder, ops_name, units, archs if backend == "cuda" else [], extra_flags)


def gencode_of(arch: str) -> Iterator[str]:
    """nvcc's words for a compute capability as kernel metadata writes it: "9.0", "9.0a" or "9.0+PTX"."""
    if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
        raise BuildError(f'a CUDA architecture is written "9.0", "9.0a" or "9.0+PTX", got "{arch}"')
    number = arch.replace("+PTX", "").replace(".", "")
    yield f"arch=compute_{number},code=sm_{number}"
    if arch.endswith("+PTX"):
        yield f"arch=compute_{number},code=compute_{number}"


def run(command: list[str], output: Path, cwd: Path, label: str, verbose: bool) -> None:
    """Run a compiler; its output appears under its final name only when it is whole."""
    if verbose:
        print(shlex.join([*command, "-o", str(output)]), flush=True)
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    start = time.monotonic()
    done = subprocess.run(
        [*command, "-o", str(partial)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{label.strip()} failed:\n{done.stdout}")
    os.replace(partial, output)
    # One write, since several compilers run at a time.
    sys.stdout.write(f"{label}  {time.monotonic() - start:.1f} s\n{done.stdout}")
    sys.stdout.flush()


def compile_all(units: Iterable[Unit], root: Path, jobs: int, verbose: bool) -> None:
    missing = {}
    for unit in units:
        if unit.output.exists():
            os.utime(unit.output)
        else:
            missing[unit.output] = unit
    # The slow ones first, so that no core idles at the end.
    todo = sorted(missing.values(), key=lambda unit: not unit.source.endswith(".cu"))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(run, u.command(), u.output, root, f"  {u.source}", verbose) for u in todo]
        try:
            for future in futures:
                future.result()
        except BuildError:
            for future in futures:
                future.cancel()
            raise


def link(variant: Variant, tools: Toolchain, work: Path, verbose: bool) -> Path:
    """The shared library of a variant.

    Of PyTorch only the name libtorch.so is recorded: importing torch has loaded it, with the CPU or the CUDA libraries
    behind it. The CUDA runtime is shared too: the one in the process is PyTorch's own, and the kernels library picks a
    variant only where its CUDA version suits that.
    """
    exports = write_if_changed(work / "include" / "exports.map", EXPORTS)
    linker = [f"--version-script={exports}", "--no-as-needed"]
    if variant.backend == "cuda":
        command = [str(tools.nvcc), "-ccbin", tools.cxx, "-cudart=shared", *(f"-Xlinker={word}" for word in linker)]
    else:
        command = [tools.cxx, *variant.extra_flags, *(f"-Wl,{word}" for word in linker)]
    command += ["-shared", *(str(unit.output) for unit in variant.units), f"-L{tools.torch}/lib", "-ltorch"]
    output = work / "objects" / f"{hash_of([command, tools.cxx_version, EXPORTS])}.so"
    if output.exists():
        os.utime(output)
    else:
        run(command, output, work, f"  {variant.ops_name}.abi3.so", verbose)
    return output


def digest(folder: Path) -> dict[str, str]:
    """Base64 SHA-256 of every file that counts as part of a variant, as kernel metadata holds it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith("metadata.json"):
            files[path.relative_to(folder).as_posix()] = base64.b64encode(
                hashlib.sha256(path.read_bytes()).digest()
            ).decode()
    return files


def assemble(project: Project, variant: Variant, library: Path, work: Path, output: Path) -> None:
    """Lay the variant out aside, and put it in place if it differs from what is there."""
    stage = work / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    package = project.root / "torch-ext" / project.package
    shutil.copytree(package, stage, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "_ops.py"))
    (stage / "_ops.py").write_text(OPS_PY.format(name=variant.ops_name))
    shutil.copy(library, stage / f"{variant.ops_name}.abi3.so")

    metadata = {
        "id": variant.ops_name,
        "name": project.name,
        "version": project.version,
        "license": project.license,
        "python-depends": project.python_depends,
        "backend": {"type": variant.backend, **({"archs": variant.archs} if variant.archs else {})},
        "digest": {"algorithm": "sha256", "files": digest(stage)},
    }
    text = json.dumps(metadata, indent=2) + "\n"
    (stage / "metadata.json").write_text(text)

    target = output / variant.folder
    old_metadata = target / "metadata.json"
    if old_metadata.is_file() and old_metadata.read_text() == text and digest(target) == metadata["digest"]["files"]:
        print(f"{target.parent.name}/{variant.folder}: up to date")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        old = work / "old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    stage.rename(target)
    shutil.rmtree(work / "old", ignore_errors=True)
    print(f"{target.parent.name}/{variant.folder}: built")


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """One build at a time in a tree."""
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def drop_old_objects(work: Path) -> None:
    oldest = time.time() - CACHE_DAYS * 86400
    for path in (work / "objects").iterdir():
        if path.stat().st_mtime < oldest:
            path.unlink()


def build(args: argparse.Namespace) -> None:
    root: Path = args.root.resolve()
    work = root / ".build"
    if args.clean:
        for folder in (work, root / "build"):
            shutil.rmtree(folder, ignore_errors=True)
        return
    if sys.platform != "linux":
        raise BuildError(f"this builder works on Linux, not on {sys.platform}")

    project = Project.read(root)
    tools = find_toolchain(project)
    if args.backend in ("cuda", "all") and tools.nvcc is None:
        raise BuildError("no CUDA compiler: nvcc is neither on PATH nor under CUDA_HOME or /usr/local/cuda")
    backends = {"cpu": ["cpu"], "cuda": ["cuda"], "all": ["cpu", "cuda"]}.get(args.backend)
    if backends is None:
        backends = ["cpu", "cuda"] if tools.nvcc else ["cpu"]

    with locked(work):
        (work / "objects").mkdir(exist_ok=True)
        write_if_changed(work / "include" / "registration.h", REGISTRATION_H)
        extra = args.cxx_flags.split(), args.cuda_flags.split()
        variants = [plan(project, tools, backend, args.cuda_archs, *extra, work) for backend in backends]
        compile_all((unit for variant in variants for unit in variant.units), root, args.jobs, args.verbose)
        libraries = [link(variant, tools, work, args.verbose) for variant in variants]
        for variant, library in zip(variants, libraries):
            assemble(project, variant, library, work, args.output or root / "build")
        drop_old_objects(work)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the kernel variants for this machine into build/.")
    parser.add_argument(
        "--backend", choices=["auto", "cpu", "cuda", "all"], default="auto", help="auto: cuda only if there is nvcc"
    )
    parser.add_argument("--cuda-archs", nargs="+", default=CUDA_ARCHS, metavar="ARCH", help="default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="files compiled at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parent.parent, help="the folder that holds build.toml"
    )
    parser.add_argument(
        "--cxx-flags", default="", metavar="FLAGS", help="more flags for the C++ compiler and its linker, in one word"
    )
    parser.add_argument(
        "--cuda-flags", default="", metavar="FLAGS", help="more flags for the CUDA compiler, in one word"
    )
    parser.add_argument("--output", type=Path, help="the folder that gets the variants (default: build)")
    parser.add_argument("--verbose", action="store_true", help="print every compiler command")
    parser.add_argument("--clean", action="store_true", help="remove everything built, and build nothing")
    try:
        build(parser.parse_args(argv))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
