"""Pinned labels and lengths: a call that has returned does not depend on them, and they cost no wait."""

import copy

import pytest
import torch
from support.public_calls import (
    ALIGN,
    CALLS,
    FUSED,
    Inputs,
    assert_same_outcome,
    outcome,
)

COMPILED = ("tdt_loss", "rnnt_loss", "tdt_loss_fused_joint", "tdt_align")


@pytest.mark.cuda
@pytest.mark.parametrize("which", [0, 1, 2], ids=["targets", "logit_lengths", "target_lengths"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pinned_memory_may_be_changed_after_the_call(kernel, which, compiled):
    """The stream has other work first, so a copy that it makes later finds the new numbers."""
    for name in COMPILED if compiled else CALLS:
        expected = outcome(kernel, name, Inputs("cuda"))
        inputs = Inputs("cuda", "cpu", pin=True)
        call = with_labels(kernel, name, inputs)
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager")
            call(*Inputs("cuda", "cpu", pin=True).labels)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # 0.1 s
        result = call(*inputs.labels)
        inputs.labels[which].fill_(1)
        if name not in ALIGN:
            grads = torch.autograd.grad(result[0].sum(), inputs.wanted, allow_unused=True)
            result = [result[0].detach(), *grads]
        torch.cuda.synchronize()
        assert_same_outcome(list(result), expected)


def with_labels(kernel, name, inputs):
    """The call as a function of the labels, which a compiler then takes for arguments."""

    def call(*labels):
        own = copy.copy(inputs)
        own.labels = labels
        result = CALLS[name](kernel, own)
        return tuple(result) if name in ALIGN else (result,)

    return call


def test_calls_with_compiled_labels(kernel, device):
    """What the test above compiles gives what eager mode gives."""
    for name in COMPILED:
        inputs = Inputs(device)
        torch._dynamo.reset()
        compiled = torch.compile(with_labels(kernel, name, inputs), backend="aot_eager")
        for ours, theirs in zip(compiled(*inputs.labels), with_labels(kernel, name, inputs)(*inputs.labels)):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.cuda
def test_a_staging_buffer_used_again(kernel):
    """One pinned buffer for the labels of every step, as a prefetcher has it."""
    first, second = Inputs("cuda"), Inputs("cuda")
    second.labels[0] = torch.tensor([[2, 1], [4, 3], [1, 5]]).cuda()
    expected = [CALLS["tdt_loss"](kernel, inputs).item() for inputs in (first, second)]
    assert expected[0] != expected[1]
    buffer = torch.empty(3, 2, dtype=torch.int64, device="cpu").pin_memory()
    losses = []
    torch.cuda._sleep(200_000_000)
    for inputs in (first, second) * 3:
        buffer.copy_(
            torch.tensor([[1, 2], [3, -100], [5, 1]]) if inputs is first else torch.tensor([[2, 1], [4, 3], [1, 5]])
        )
        inputs.labels[0] = buffer
        losses.append(CALLS["tdt_loss"](kernel, inputs))
    assert [loss.item() for loss in losses] == expected * 3


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in CALLS if name not in FUSED])
def test_pinned_memory_costs_no_wait(kernel, name):
    inputs = Inputs("cuda", "cpu", pin=True)
    outcome(kernel, name, inputs)  # memory that the caching allocators keep
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[name](kernel, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
