"""Default devices, fake and meta tensors, and the modes that the package may be imported in."""

import subprocess
import sys

import pytest
import torch
from support.public_calls import (
    ALIGN,
    CALLS,
    Inputs,
    assert_same_outcome,
    every_call,
    options_of,
    outcome,
    own_logits,
)
from torch._subclasses import FakeTensorMode


@pytest.fixture
def default_device():
    """Sets torch's default device until the test is over."""
    yield torch.set_default_device
    torch.set_default_device(None)


@every_call
@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("labels_on_the_host", [False, True])
def test_default_device(kernel, device, default_device, name, default, labels_on_the_host):
    """What the package makes for itself lies where its arguments lie."""

    def inputs():
        return Inputs(device, "cpu" if labels_on_the_host else device)

    expected = outcome(kernel, name, inputs())
    given = [inputs(), inputs()]
    with torch.device(default):
        assert_same_outcome(outcome(kernel, name, given[0]), expected)
    default_device(default)
    assert_same_outcome(outcome(kernel, name, given[1]), expected)


OPTIONS = {
    "plain": {},
    "not reduced": {"reduction": "none"},
    "mean_volume": {"reduction": "mean_volume"},
    "omega": {"omega": 0.3},
    "occupancy": {"return_occupancy": True},
    "stats": {"return_stats": True},
    "dropout": {"dropout": 0.3},
    "in place": {"inplace_grad": True},
    "items": {"num_items_in_batch": 20, "reduction": "mean_volume"},
}


def described(kernel, name, inputs, options):
    """Shapes, strides and dtypes of what a call and its backward return."""
    if "inplace_grad" in options:
        own_logits(inputs)
    result = CALLS[name](kernel, inputs, **options)
    tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    grads = [None] * len(inputs.wanted)
    if name not in ALIGN:
        grads = torch.autograd.grad(tensors[0].sum(), inputs.wanted, allow_unused=True)
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in (*tensors, *grads)], {
        x.device.type for x in (*tensors, *grads) if x is not None
    }


@every_call
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("where", ["meta", "meta, labels on the host", "fake", "fake cuda"])
def test_tensors_without_numbers(kernel, name, options, where):
    """The shapes of a real call, as cross_entropy has them."""
    if not set(options) <= set(options_of(kernel, name)):
        pytest.skip("no such option")
    if where == "fake cuda" and not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA")
    expected, _ = described(kernel, name, Inputs(), options)
    if where.startswith("fake"):
        with FakeTensorMode():
            actual, devices = described(kernel, name, Inputs("cuda" if "cuda" in where else "cpu", "cpu"), options)
    else:
        actual, devices = described(kernel, name, Inputs("meta", "cpu" if "host" in where else "meta"), options)
    assert actual == expected
    assert devices == {"cuda" if "cuda" in where else "cpu" if where == "fake" else "meta"}


@every_call
def test_fake_logits_and_real_labels(kernel, name):
    """A model that is traced with the labels at hand."""
    expected, _ = described(kernel, name, Inputs(), {})
    real = Inputs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = Inputs()
        inputs.labels = real.labels
        actual, _ = described(kernel, name, inputs, {})
    assert actual == expected


IMPORT = """
import torch
from kernels import get_kernel
from torch._subclasses import FakeTensorMode

with {mode}:
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
logits = torch.zeros(1, 3, 2, 4 + 3, requires_grad=True)
joint = logits * 1
rest = torch.tensor([[0]]), torch.tensor([3]), torch.tensor([1]), 3, [0, 1, 2]
kernel.tdt_loss(joint[..., :4], joint[..., 4:], *rest, sigma=0.05).backward()
assert abs(logits.grad[0, 0, 0, 0] + 0.64962804) < 1e-6
"""


@pytest.mark.parametrize(
    "mode", ["torch.inference_mode()", "torch.no_grad()", "FakeTensorMode()", "torch.device('meta')"]
)
def test_imported_in_any_mode(mode):
    result = subprocess.run(
        [sys.executable, "-c", IMPORT.format(mode=mode)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
