"""tools/official_build.py: what reaches the official builder, and the environment of its CI test. And what `kernels benchmark` needs."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (REPO / "tools").is_dir(), reason="needs the whole repository")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def official():
    return load(REPO / "tools" / "official_build.py")


def test_sources_and_python_files_reach_the_builder(official):
    names = {path.as_posix() for path in official.reaching_files(REPO)}
    assert {"build.toml", "torch-ext/torch_binding.cpp", "tdt_loss_cpu/rows.h", "tdt_loss_cuda/lattice.cu"} <= names
    assert {"torch-ext/tdt_loss/__init__.py", "tests/conftest.py"} <= names
    assert not any(name.startswith(("benchmarks/", "examples/", "tools/", "docs/")) for name in names)


def test_packages_of_the_ci_test_are_read_from_the_flake(official):
    assert official.check_inputs((REPO / "flake.nix").read_text()) == ["hypothesis", "numpy"]
    assert official.check_inputs("path = ./.;") == []


def test_requirements_are_followed_and_extras_are_not(official):
    found = official.with_requirements(["pytest"])
    assert {"pytest", "pluggy"} <= found and "torch" not in found
    absent = official.absent_modules(found)
    assert "torch" in absent and "pluggy" not in absent


def test_modules_of_other_packages_cannot_be_imported(official, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(official.SITECUSTOMIZE.format(names={"numpy"}))
    check = "import importlib.util as u; print(u.find_spec('numpy'), u.find_spec('pytest') is not None)"
    done = subprocess.run(
        [sys.executable, "-c", check], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "True"]


def test_without_the_program_it_says_what_is_left_out(tmp_path):
    command = [sys.executable, str(REPO / "tools" / "official_build.py"), "--program", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "left out" in done.stdout and "kernel-builder" in done.stdout
    assert subprocess.run([*command, "--require"], capture_output=True).returncode == 1


def test_workloads_of_the_kernels_command_import_nothing_but_torch_and_kernels():
    tree = ast.parse((REPO / "benchmarks" / "benchmark.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert {name.split(".")[0] for name in names} == {"torch", "kernels"}


@pytest.mark.parametrize("name, D", [("TDTLossBenchmark", 5), ("RNNTLossBenchmark", 0)])
@pytest.mark.parametrize("shape", [(2, 30, 7, 50), (2, 3, 5, 9), (1, 1, 0, 4)], ids=str)
def test_workloads_are_verified_by_a_recursion_of_their_own(kernel, name, D, shape):
    """Within rounding, not only within the 1e-2 of the command."""
    kind = getattr(load(REPO / "benchmarks" / "benchmark.py"), name)
    workload = kind.__new__(kind)
    workload.device, workload.kernel = "cpu", kernel
    torch.manual_seed(0)
    workload.prepare(*shape, D, torch.float32)
    workload.run()
    expected = workload.reference()
    assert expected.isfinite().all()
    torch.testing.assert_close(workload.out, expected, atol=5e-6, rtol=1e-5)
