"""`inplace_grad` under saved-tensor hooks and within checkpoints."""

import pytest
import torch
from support.public_calls import CALLS, Inputs, own_logits
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SAVED = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "on the CPU": save_on_cpu,
    "on the CPU, pinned": lambda: save_on_cpu(pin_memory=torch.cuda.is_available()),
}
IN_PLACE = ("tdt_loss_joint", "rnnt_loss")


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("hooks", SAVED.values(), ids=SAVED.keys())
def test_inplace_grad_under_saved_tensor_hooks(kernel, device, name, hooks):
    """Twice the same, and what else saved the logits before sees them as they were."""
    inputs = Inputs(device)
    leaf = own_logits(inputs)
    expected = torch.autograd.grad(CALLS[name](kernel, inputs) + inputs.logits.square().mean(), leaf)

    inputs = Inputs(device)
    leaf = own_logits(inputs)
    with hooks():
        penalty = inputs.logits.square().mean()
        loss = CALLS[name](kernel, inputs, inplace_grad=True)
    for retain_graph in (True, False):
        actual = torch.autograd.grad(loss + penalty, leaf, retain_graph=retain_graph)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inplace_grad_within_a_checkpoint(kernel, device, name, use_reentrant):
    results = []
    for inplace_grad in (False, True):
        inputs = Inputs(device)
        leaf = inputs.logits

        def step(leaf, inputs=inputs, inplace_grad=inplace_grad):
            inputs.logits = leaf * 1.5
            return CALLS[name](kernel, inputs, inplace_grad=inplace_grad)

        loss = checkpoint(step, leaf, use_reentrant=use_reentrant)
        loss.backward(retain_graph=True)
        first = leaf.grad.clone()
        loss.backward()
        torch.testing.assert_close(leaf.grad, 2 * first, rtol=0, atol=0)
        results.append(first)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
