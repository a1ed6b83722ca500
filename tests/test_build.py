"""The build: build.toml by the official rules, tools/build_kernel.py on a small tree with stand-ins for the compilers, the variants in build/."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import kernels
import pytest

REPO = Path(__file__).resolve().parent.parent

BUILD_TOML = """
[general]
name = "tiny-op"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cuda", "cpu"]

[torch]
src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"]

[torch.stable-abi]
cuda = "2.10"
cpu = "2.10"

[kernel.cpu]
backend = "cpu"
depends = ["torch"]
cxx-flags = ["-DFROM_BUILD_TOML"]
src = ["common.h", "one.cpp", "two.cpp"]

[kernel.cuda]
backend = "cuda"
depends = ["torch"]
src = ["common.h", "one.cpp", "kernel.cu"]
"""

SOURCES = {
    "build.toml": BUILD_TOML,
    "common.h": "// shared\n",
    "one.cpp": '#include "common.h"\n',
    "two.cpp": "// includes nothing\n",
    "kernel.cu": '#include "common.h"\n',
    "torch-ext/torch_binding.h": "",
    "torch-ext/torch_binding.cpp": '#include "registration.h"\n#include "torch_binding.h"\n',
    "torch-ext/tiny_op/__init__.py": "from .loss import f\n",
    "torch-ext/tiny_op/loss.py": "def f(): ...\n",
}

# Logs what it is asked, and writes its own log's size as the output; fails while the file `fail` is there.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in, release 13.0"; exit; fi
echo "$@" >> "{log}"
if [ -e "{fail}" ]; then echo "expected ';' before '}}'"; exit 1; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
wc -c < "{log}" > "$out"
"""


@pytest.fixture(scope="module")
def rust() -> ModuleType:
    """The official parsers of build.toml and metadata.json."""
    return pytest.importorskip("kernels._rust", reason="the official parsers come with kernels 0.17 and newer")


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_kernel", REPO / "tools" / "build_kernel.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "build_kernel", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def tree(tmp_path, monkeypatch, builder):
    """A small project, with stand-ins as compilers. `build()` returns the exit code, `compiled()` what was compiled since it was last asked."""
    root = tmp_path / "project"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    log, fail = tmp_path / "log", tmp_path / "fail"
    for program in ("cxx", "nvcc"):
        path = tmp_path / program
        path.write_text(STAND_IN.format(log=log, fail=fail))
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))

    def build(*args: str) -> int:
        return builder.main(["--root", str(root), *(args or ["--backend=cpu"])])

    def commands() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def compiled() -> list[str]:
        return sorted(found[1] for line in commands() if (found := re.search(r" -c (\S+)", line)))

    def variant(tag: str = "cpu") -> Path:
        (found,) = (root / "build").glob(f"torch-stable-abi210-{tag}-*-linux")
        return found

    return SimpleNamespace(root=root, fail=fail, build=build, commands=commands, compiled=compiled, variant=variant)


def sources_of(backend: str) -> set[str]:
    """What is in the tree for a backend, the CUDA variant holding the CPU kernels too."""
    folders = ["torch-ext", "tdt_loss_common", "tdt_loss_cpu"] + (["tdt_loss_cuda"] if backend == "cuda" else [])
    files = (path for folder in folders for path in (REPO / folder).glob("*.*"))
    return {path.relative_to(REPO).as_posix() for path in files if path.suffix in {".h", ".cpp", ".cu", ".cuh"}}


def test_official_rules_accept_build_toml(rust):
    assert rust.Build.open(REPO).general.backends == [rust.Backend.CUDA, rust.Backend.CPU]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_build_toml_lists_every_source_and_header(builder, backend):
    sections = builder.Project.read(REPO).sections(backend)
    listed = [source for section in sections for source in section["src"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == sources_of(backend)


def test_stable_abi_version_is_2_10(builder):
    assert builder.Project.read(REPO).stable_abi == {"cpu": "2.10", "cuda": "2.10"}


def test_names_that_the_official_builder_generates_are_not_in_the_tree():
    for name in (
        "pyproject.toml",
        "setup.py",
        "CMakeLists.txt",
        "cmake",
        "torch-ext/tdt_loss/_ops.py",
        "torch-ext/registration.h",
    ):
        assert not (REPO / name).exists(), name


def test_variant_holds_what_the_hub_holds(tree, rust):
    assert tree.build() == 0
    metadata = rust.Metadata.read_from_file(tree.variant() / "metadata.json")
    library = f"{metadata.id}.abi3.so"
    names = sorted(path.name for path in tree.variant().iterdir())
    assert names == ["__init__.py", "_ops.py", library, "loss.py", "metadata.json"]
    assert re.fullmatch(r"_tiny_op_cpu_[0-9a-f]{12}", metadata.id)
    assert f"torch.ops.{metadata.id}\n" in (tree.variant() / "_ops.py").read_text()
    assert (str(metadata.name), metadata.version, metadata.license) == ("tiny-op", 3, "Apache-2.0")
    assert metadata.backend.backend_type == rust.Backend.CPU
    metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, tree.variant()))


def test_flags_follow_build_toml(tree):
    tree.build()
    lines = [line for line in tree.commands() if " -c " in line]
    assert len(lines) == 3
    for line in lines:
        assert (
            "-DTORCH_STABLE_ONLY -DTORCH_TARGET_VERSION=0x020a000000000000 -DPy_LIMITED_API=0x03090000 -DCPU_KERNEL"
            in line
        )
        assert ("-DFROM_BUILD_TOML" in line) == ("torch_binding" not in line)
        assert ("-DTORCH_EXTENSION_NAME=_tiny_op_cpu_" in line) == ("torch_binding" in line)


def test_cuda_variant_needs_neither_gpu_nor_cuda_torch(tree, rust):
    assert tree.build("--backend=all", "--cuda-archs", "8.0", "9.0+PTX") == 0
    (cu,) = (line for line in tree.commands() if "-c kernel.cu" in line)
    for code in ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"):
        assert f"-gencode=arch={code}" in cu
    assert "-DCUDA_KERNEL" in cu
    assert "-DUSE_CUDA" in cu
    backend = rust.Metadata.read_from_file(tree.variant("cu130") / "metadata.json").backend
    assert (backend.backend_type, backend.archs) == (rust.Backend.CUDA, ["8.0", "9.0+PTX"])
    assert tree.variant("cpu").exists()


def test_nothing_is_compiled_when_nothing_changed(tree, capsys):
    tree.build("--backend=all")
    assert tree.commands()
    before = {path: path.stat().st_mtime_ns for path in (tree.root / "build").rglob("*")}
    assert tree.build("--backend=all") == 0
    assert tree.commands() == []
    assert {path: path.stat().st_mtime_ns for path in (tree.root / "build").rglob("*")} == before
    assert capsys.readouterr().out.count("up to date") == 2


def test_changed_header_recompiles_what_includes_it_and_renames_the_ops(tree):
    tree.build()
    old = tree.variant() / "_ops.py"
    old_text = old.read_text()
    tree.compiled()
    (tree.root / "common.h").write_text("// changed\n")
    tree.build()
    # The binding because the namespace is new; two.cpp does not include the header.
    assert tree.compiled() == ["one.cpp", "torch-ext/torch_binding.cpp"]
    assert old.read_text() != old_text
    assert len(list(tree.variant().glob("*.so"))) == 1


def test_going_back_to_old_sources_compiles_nothing(tree):
    tree.build()
    (tree.root / "one.cpp").write_text("// changed\n")
    tree.build()
    tree.commands()
    (tree.root / "one.cpp").write_text(SOURCES["one.cpp"])
    tree.build()
    assert tree.commands() == []


def test_changed_python_is_copied_and_compiles_nothing(tree):
    tree.build()
    tree.commands()
    package = tree.root / "torch-ext" / "tiny_op"
    (package / "loss.py").rename(package / "losses.py")
    assert tree.build() == 0
    assert tree.commands() == []
    assert (tree.variant() / "losses.py").exists()
    assert not (tree.variant() / "loss.py").exists()


def test_edited_variant_is_put_right(tree):
    tree.build()
    (tree.variant() / "loss.py").write_text("edited\n")
    tree.build()
    assert (tree.variant() / "loss.py").read_text() == SOURCES["torch-ext/tiny_op/loss.py"]


def test_failed_build_leaves_the_last_good_variant(tree, capsys):
    tree.build()
    before = (tree.variant() / "metadata.json").read_text()
    (tree.root / "two.cpp").write_text("int x }\n")
    tree.fail.touch()
    assert tree.build() == 1
    error = capsys.readouterr().err
    assert "two.cpp" in error
    assert "expected ';' before '}'" in error
    assert (tree.variant() / "metadata.json").read_text() == before
    tree.fail.unlink()
    assert tree.build() == 0
    assert (tree.variant() / "metadata.json").read_text() != before


def test_clean_removes_what_was_built(tree):
    tree.build()
    assert tree.build("--clean") == 0
    assert sorted(path.name for path in tree.root.iterdir() if path.is_dir()) == ["torch-ext"]


def test_missing_compiler_is_named(tree, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert tree.build() == 1
    assert "no C++ compiler: none of /nowhere/g++ was found; set CXX" in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert tree.build() == 1
    assert "install g++" in capsys.readouterr().err


def test_missing_torch_is_named(tree, builder, monkeypatch, capsys):
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda name: None)
    assert tree.build() == 1
    assert "PyTorch is not installed" in capsys.readouterr().err


def test_too_old_torch_is_named(tree, builder, monkeypatch, capsys):
    monkeypatch.setattr(builder.importlib.metadata, "version", lambda name: "2.9.1+cu130")
    assert tree.build() == 1
    assert "PyTorch 2.10 or newer is needed for its stable ABI, this is 2.9.1+cu130" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["cuda", "all"])
def test_cuda_without_nvcc_is_refused(tree, builder, monkeypatch, capsys, backend):
    monkeypatch.setattr(builder, "find_nvcc", lambda: None)
    assert tree.build(f"--backend={backend}") == 1
    assert "no CUDA compiler" in capsys.readouterr().err
    assert tree.build("--backend=auto") == 0
    assert tree.variant("cpu").exists()


def test_malformed_arch_is_named(tree, capsys):
    assert tree.build("--backend=cuda", "--cuda-archs", "sm_90") == 1
    assert 'got "sm_90"' in capsys.readouterr().err


def test_missing_source_and_malformed_build_toml_are_named(tree, capsys):
    (tree.root / "two.cpp").unlink()
    assert tree.build() == 1
    assert "two.cpp" in capsys.readouterr().err
    (tree.root / "build.toml").write_text("[general\n")
    assert tree.build() == 1
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.kernels_ci
def test_built_variants_are_whole(rust):
    abi = pytest.importorskip("kernel_abi_check")
    variants = sorted((REPO / "build").glob("torch-stable-abi210-*"))
    assert variants, "run make build"
    for variant in variants:
        metadata = rust.Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
        assert abi.ObjectFile(variant / f"{metadata.id}.abi3.so").check_python_abi("3.9") == []


@pytest.mark.kernels_ci
@pytest.mark.whole_repository
def test_kernel_loads_by_name_and_by_path(kernel):
    assert kernel.loss.ops.name.startswith("_tdt_loss_")
    assert kernels.get_local_kernel(REPO).loss.ops.name == kernel.loss.ops.name
    assert kernels.get_kernel("kernels-community/tdt-loss", version=1).tdt_loss is kernel.tdt_loss


@pytest.mark.kernels_ci
def test_namespace_is_the_id_of_the_build(kernel):
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())
    assert kernel.loss.ops.name == metadata["id"] == kernel.__name__


@pytest.mark.kernels_ci
@pytest.mark.whole_repository
def test_examples_of_the_card_run(kernel):
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template((REPO / "CARD.md").read_text(), undefined=jinja2.StrictUndefined)
    card = template.render(
        repo_id="kernels-community/tdt-loss", license="Apache-2.0", functions=["tdt_loss"], has_benchmark=True
    )
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(example, names)
    assert names["loss"].isfinite()
    assert names["logits"].grad.isfinite().all()


def test_make_help_lists_every_target():
    makefile = (REPO / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    described = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert described == targets
    assert {"help", "build", "train", "test", "test-kernels-ci", "lint", "format", "abi", "clean"} <= targets
