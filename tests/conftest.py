"""Fixtures and hooks; what tests call by name stands in `support/`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Before its modules are imported, so that a failed assertion of theirs says what it compares.
pytest.register_assert_rewrite("support")

from support import environment  # noqa: E402, F401, I001  before torch and kernels

import hypothesis  # noqa: E402
import torch  # noqa: E402

# Derandomized: a test suite that guards a commit must give the same verdict twice.
hypothesis.settings.register_profile("suite", derandomize=True, max_examples=25, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset for a quick check of a build, under 60 s")
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "two_gpus: needs two NVIDIA GPUs")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="session")
def kernel():
    from kernels import get_kernel

    return get_kernel("kernels-community/tdt-loss", version=1)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture(params=["separate", "joint"])
def api(request):
    """Token and duration logits as two tensors (tdt_loss), or as one (tdt_loss_joint)."""
    return request.param


@pytest.fixture
def fresh_dynamo():
    """What other tests have compiled does not count, nor what this one compiles for others."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
