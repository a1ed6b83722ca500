"""The kernel as the Hub hands it out: from a cache of its files, by version, by commit and by lock file; and what the `kernels` command says of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
NAME = "kernels-community/tdt-loss"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SCRIPT = """
import sys
from pathlib import Path
import kernels

name, commit, lock = sys.argv[1:]
by_version = kernels.get_kernel(name, version=1)
by_commit = kernels.get_kernel(name, revision=commit)
locked = kernels.load_kernel(name, lockfile=Path(lock))
for kernel in (by_version, by_commit, locked):
    assert kernel.loss.ops.name == kernel.__name__
    print(Path(kernel.__file__).parent)
"""


@pytest.fixture(scope="module")
def rust():
    return pytest.importorskip("kernels._rust", reason="lock files of this form come with kernels 0.17 and newer")


@pytest.fixture
def cache(tmp_path):
    """A cache in which version 1 is this build, as snapshot_download leaves one."""
    repo = tmp_path / "cache" / "kernels--kernels-community--tdt-loss"
    (repo / "refs").mkdir(parents=True)
    for ref in ("main", "v1"):
        (repo / "refs" / ref).write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    shutil.copytree(REPO / "build", snapshot / "build", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "cache"


def test_cached_files_load_by_version_by_commit_and_by_lock_file(rust, kernel, cache, tmp_path):
    dependency = rust.KernelDependency(repo_id=NAME, version=rust.KernelVersion.Version(1))
    lock = tmp_path / "kernels.lock"
    lock.write_text(rust.KernelLocks(locks={dependency: rust.KernelLock(commit=COMMIT)}).to_json())
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    environment |= {"KERNELS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, NAME, COMMIT, str(lock)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folders = done.stdout.split()
    variant = Path(kernel.__file__).parent.name
    assert len(folders) == 3
    assert all(Path(folder).name == variant and Path(folder).is_relative_to(cache) for folder in folders)


@pytest.mark.kernels_ci
@pytest.mark.whole_repository
def test_the_kernels_command_describes_the_build(rust):
    command = [sys.executable, "-c", "from kernels.cli import main; main()", "info", str(REPO), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert (info["name"], info["version"], info["license"]) == ("tdt-loss", 1, "Apache-2.0")
    built = {"cuda" if "-cu" in path.name else "cpu" for path in (REPO / "build").glob("torch-stable-abi210-*")}
    assert set(info["backends"]) == built
