"""Autograd: gradcheck, repeated and double backward, gradients in place, what is saved and what is not."""

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import assert_grads_match, same_bits
from support.memory import peak_extra_bytes
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_gradcheck(kernel, device, reduction):
    lengths = {"logit_lengths": [4, 3], "target_lengths": [2, 1]}
    batch = make_batch(B=2, T=4, U=2, V=3, sigma=0.05, dtype=torch.float64, device=device, **lengths)
    inputs = (batch.token_logits.requires_grad_(), batch.duration_logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, z: kernel.tdt_loss(x, z, *batch.rest, reduction), inputs)


def test_gradcheck_of_joint_logits(kernel, device):
    lengths = {"logit_lengths": [4, 3], "target_lengths": [2, 1]}
    batch = make_batch(B=2, T=4, U=2, V=3, sigma=0.05, dtype=torch.float64, device=device, **lengths)
    logits = batch.joint.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kernel.tdt_loss_joint(x, *batch.rest, "none"), (logits,))


@pytest.mark.kernels_ci
def test_backward_twice(kernel, device):
    batch = make_batch(B=2, T=6, U=3, device=device)
    token_logits, duration_logits = batch.leaves()
    loss = kernel.tdt_loss(token_logits, duration_logits, *batch.rest)
    first = torch.autograd.grad(loss, (token_logits, duration_logits), retain_graph=True)
    second = torch.autograd.grad(loss, (token_logits, duration_logits))
    assert all(same_bits(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_a_clear_error(kernel, device, api):
    batch = make_batch(B=2, T=4, U=2, dtype=torch.float64, device=device)
    if api == "joint":
        logits = batch.joint.requires_grad_()
        loss = kernel.tdt_loss_joint(logits, *batch.rest)
    else:
        logits = batch.token_logits.requires_grad_()
        loss = kernel.tdt_loss(logits, batch.duration_logits, *batch.rest)
    with pytest.raises(RuntimeError, match="double backward"):
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
        grad.square().sum().backward()


@pytest.mark.parametrize("which", [0, 1])
def test_only_one_of_the_logits_requires_grad(kernel, device, which):
    batch = make_batch(B=2, T=6, U=3, device=device)
    logits = [batch.token_logits.clone(), batch.duration_logits.clone()]
    logits[which].requires_grad_()
    kernel.tdt_loss(*logits, *batch.rest, "sum").backward()
    expected = (batch.expected.grad_tokens, batch.expected.grad_durations)[which]
    torch.testing.assert_close(logits[which].grad.double(), expected, rtol=0, atol=1e-5)
    assert logits[1 - which].grad is None


@pytest.mark.kernels_ci
def test_weights_per_sample(kernel, device, api):
    batch = make_batch(B=3, T=6, U=3, device=device)
    weights = torch.tensor([0.5, -2.0, 0.0], device=device)
    outcome = loss_and_grads(kernel, batch, api, upstream=weights)
    assert_grads_match(outcome, batch, weights)
    assert (outcome.grad_tokens[2] == 0).all()


def test_upstream_gradients_of_any_strides(kernel, device, api):
    batch = make_batch(B=3, T=6, U=3, device=device)
    expanded = torch.tensor(1.5, device=device).expand(3)
    spread = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0]], device=device)[:, 0]
    for weights in (expanded, spread):
        assert weights.stride() in ((0,), (2,))
        assert_grads_match(loss_and_grads(kernel, batch, api, upstream=weights), batch, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_loss_with_half_logits(kernel, device, api, dtype):
    # The scale multiplies in float32: entries that are 0 in float16 without it survive.
    batch = make_batch(B=2, T=6, U=3, V=257, scale=3.0, dtype=dtype, device=device)
    outcome = loss_and_grads(kernel, batch, api, upstream=torch.full((2,), 65536.0 / 64, device=device))
    assert_grads_match(outcome, batch, torch.full((2,), 65536.0 / 64))
    if dtype == torch.float16:
        lost = batch.expected.grad_tokens.half() == 0
        assert (outcome.grad_tokens[lost] != 0).any()


def test_frozen_logits_make_a_loss_without_graph(kernel, device):
    batch = make_batch(B=2, device=device)
    assert not kernel.tdt_loss(*batch.args).requires_grad
    with torch.no_grad():
        assert not kernel.tdt_loss(batch.token_logits.requires_grad_(), *batch.args[1:]).requires_grad


def saved_bytes(function):
    """Bytes of everything that autograd saves in `function`, by storage."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storages.values())


def test_saves_the_logits_and_a_few_numbers_per_node(kernel, device):
    batch = make_batch(B=2, T=20, U=10, V=301, durations=(0, 1, 2, 3, 4), device=device)
    logits = batch.joint.requires_grad_()
    nodes = batch.valid.numel()
    saved = saved_bytes(lambda: kernel.tdt_loss_joint(logits, *batch.rest))
    assert logits.untyped_storage().nbytes() < saved <= logits.untyped_storage().nbytes() + 60 * nodes + 4096


def test_saves_nothing_under_no_grad(kernel, device):
    batch = make_batch(B=2, T=20, U=10, V=301, device=device)
    with torch.no_grad():
        assert saved_bytes(lambda: kernel.tdt_loss(batch.token_logits.requires_grad_(), *batch.args[1:])) == 0


class RecordLoss(TorchDispatchMode):
    """Keeps what the op `loss` returned."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.name().endswith("::loss"):
            _, _, _, _, self.alpha_beta, _ = result
        return result


def test_no_beta_unless_a_gradient_is_wanted(kernel, device, api):
    batch = make_batch(B=2, device=device)
    function, args = (kernel.tdt_loss, batch.args) if api == "separate" else (kernel.tdt_loss_joint, batch.joint_args)
    with RecordLoss() as frozen:
        function(*args)
    args[0].requires_grad_()
    with RecordLoss() as trained:
        function(*args)
    with RecordLoss() as evaluated, torch.no_grad():
        function(*args)
    assert trained.alpha_beta.shape == (1, 2, *batch.valid.shape)
    assert frozen.alpha_beta.numel() == evaluated.alpha_beta.numel() == 0


@pytest.mark.kernels_ci
def test_forward_alone_needs_a_few_numbers_per_node(kernel, device):
    batch = make_batch(B=2, T=30, U=10, V=1021, durations=(0, 1, 2, 3, 4), device=device)
    logits = batch.joint.requires_grad_()
    with torch.no_grad():
        peak = peak_extra_bytes(lambda: kernel.tdt_loss_joint(logits, *batch.rest), device)
    assert peak <= 60 * batch.valid.numel() + 8192


# In place: the gradient goes where the logits were.


def backward_in_place(kernel, batch, **options):
    """(logits, gradient as it arrives at the logits, loss), where logits = 2 * a leaf, as a model makes them."""
    leaf = (batch.joint / 2).requires_grad_()
    logits = leaf * 2
    seen = []
    logits.register_hook(seen.append)
    losses = kernel.tdt_loss_joint(logits, *batch.rest, "none", inplace_grad=True, **options)
    return leaf, logits, losses, seen


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inplace_gradient(kernel, device, dtype):
    lengths = {"logit_lengths": [6, 4], "target_lengths": [2, 3]}
    batch = make_batch(B=2, T=6, U=3, V=37, dtype=dtype, device=device, **lengths)
    leaf, logits, losses, seen = backward_in_place(kernel, batch)
    unharmed, version = logits.detach().clone(), logits._version
    assert torch.equal(unharmed, batch.joint)
    losses.sum().backward()
    assert seen[0].data_ptr() == logits.data_ptr()
    assert logits._version > version
    expected = loss_and_grads(kernel, batch, "joint")
    assert same_bits(losses.detach(), expected.losses)
    assert same_bits(seen[0], torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1))
    assert same_bits(leaf.grad, seen[0] * 2)


def test_inplace_gradient_of_strided_logits(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=9, device=device)
    base = torch.full((2, 12, 4, 12), 7.0, device=device)
    base[:, ::2] = batch.joint
    logits = base[:, ::2].requires_grad_()
    (grad,) = torch.autograd.grad(kernel.tdt_loss_joint(logits, *batch.rest, "sum", inplace_grad=True), logits)
    torch.testing.assert_close(grad[..., :9].double(), batch.expected.grad_tokens, rtol=0, atol=1e-5)
    assert (base[:, 1::2] == 7.0).all()


def test_second_backward_in_place_raises_torchs_own_error(kernel, device):
    _, _, losses, _ = backward_in_place(kernel, make_batch(B=2, device=device))
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_who_else_saved_the_logits_hears_of_it(kernel, device):
    batch = make_batch(B=2, device=device)
    leaf = batch.joint.clone().requires_grad_()
    logits = leaf * 1
    loss = kernel.tdt_loss_joint(logits, *batch.rest, inplace_grad=True)
    penalty = logits.square().sum()  # its backward needs the logits
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_inplace_without_backward_modifies_nothing(kernel, device):
    batch = make_batch(B=2, device=device)
    logits, version = batch.joint.clone(), batch.joint._version
    kernel.tdt_loss_joint(batch.joint, *batch.rest, inplace_grad=True)
    with torch.no_grad():
        kernel.tdt_loss_joint(batch.joint.requires_grad_(), *batch.rest, inplace_grad=True)
    assert torch.equal(batch.joint, logits) and batch.joint._version == version


HOOKS = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "on the CPU": save_on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS.keys())
def test_in_place_has_no_effect_under_saved_tensor_hooks(kernel, device, hooks):
    """torch would not notice that what it saved has changed."""
    batch = make_batch(B=2, T=6, U=3, V=37, logit_lengths=[6, 4], device=device)
    leaf = batch.joint.clone().requires_grad_()
    with hooks():
        logits = leaf * 1
        losses = kernel.tdt_loss_joint(logits, *batch.rest, "none", inplace_grad=True)
        penalty = logits.square().sum()
    version = logits._version
    first, second = (torch.autograd.grad(losses.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    expected = loss_and_grads(kernel, batch, "joint")
    assert same_bits(first, torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1))
    assert same_bits(second, first)
    assert torch.equal(logits, batch.joint) and logits._version == version
    assert torch.equal(torch.autograd.grad(penalty, leaf)[0], 2 * batch.joint)
    expanded = batch.joint[:1].expand(2, -1, -1, -1)  # could not be overwritten, and need not be
    with hooks():
        assert kernel.tdt_loss_joint(expanded, *batch.rest, inplace_grad=True).isfinite()


def test_in_place_has_no_effect_under_a_checkpoint(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=37, logit_lengths=[6, 4], device=device)
    leaf, seen = batch.joint.clone().requires_grad_(), []

    def loss(leaf):
        logits = leaf * 1
        seen.append(logits)
        return kernel.tdt_loss_joint(logits, *batch.rest, "sum", inplace_grad=True)

    checkpoint(loss, leaf, use_reentrant=False).backward()
    expected = loss_and_grads(kernel, batch, "joint")
    assert same_bits(leaf.grad, torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1))
    assert len(seen) == 2 and all(torch.equal(logits, batch.joint) for logits in seen)


def test_double_backward_in_place_is_a_clear_error(kernel, device):
    leaf, _, losses, _ = backward_in_place(kernel, make_batch(B=2, device=device))
    with pytest.raises(RuntimeError, match="double backward"):
        (grad,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
        grad.square().sum().backward()


def test_inputs_are_not_modified_unless_asked(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], device=device)
    tensors = [batch.joint, batch.token_logits, batch.duration_logits, *batch.lengths]
    copies, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    loss_and_grads(kernel, batch, api)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies))
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("inplace_grad, logits_beyond", [(True, 0), (False, 1)])
def test_peak_memory_of_a_training_step(kernel, device, inplace_grad, logits_beyond):
    batch = make_batch(B=2, T=30, U=10, V=1019, durations=(0, 1, 2, 3, 4), device=device)
    logits = batch.joint.requires_grad_()

    def step():
        torch.autograd.grad(kernel.tdt_loss_joint(logits, *batch.rest, inplace_grad=inplace_grad), logits)

    limit = logits_beyond * logits.numel() * logits.element_size() + 60 * batch.valid.numel() + 8192
    assert peak_extra_bytes(step, device) <= limit
