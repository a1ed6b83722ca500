"""`rnnt_loss` within autograd and torch.compile: gradcheck, second backward, gradients in place, memory."""

import pytest
import torch
from support.calls import loss_and_grads
from support.comparisons import same_bits
from support.memory import peak_extra_bytes
from support.rnnt import RAGGED, rnnt_batch


def test_gradcheck(kernel, device):
    lengths = {"logit_lengths": [4, 3], "target_lengths": [2, 1]}
    batch = rnnt_batch(B=2, T=4, U=2, V=3, dtype=torch.float64, device=device, **lengths)
    logits = batch.token_logits.requires_grad_()
    for options in ({}, {"sigma": 0.1, "delay_penalty": 0.2}):
        assert torch.autograd.gradcheck(
            lambda x, options=options: kernel.rnnt_loss(x, *batch.rnnt_args[1:], "none", **options), (logits,)
        )


def test_backward_twice(kernel, device):
    batch = rnnt_batch(B=2, T=6, U=3, device=device)
    logits, _ = batch.leaves()
    loss = kernel.rnnt_loss(logits, *batch.rnnt_args[1:])
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert same_bits(first, second)


@pytest.mark.parametrize("inplace_grad", [False, True])
def test_double_backward_is_a_clear_error(kernel, device, inplace_grad):
    batch = rnnt_batch(B=2, T=4, U=2, dtype=torch.float64, device=device)
    leaf, _ = batch.leaves()
    loss = kernel.rnnt_loss(leaf * 1, *batch.rnnt_args[1:], inplace_grad=inplace_grad)
    with pytest.raises(RuntimeError, match="double backward"):
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        grad.square().sum().backward()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inplace_gradient(kernel, device, dtype):
    batch = rnnt_batch(V=37, dtype=dtype, fastemit_lambda=0.2, clamp=0.1, device=device, **RAGGED)
    leaf = (batch.token_logits / 2).requires_grad_()
    logits, seen = leaf * 2, []
    logits.register_hook(seen.append)
    losses = kernel.rnnt_loss(logits, *batch.rnnt_args[1:], "none", inplace_grad=True, **batch.options)
    version = logits._version
    assert torch.equal(logits, batch.token_logits)
    losses.sum().backward(retain_graph=True)
    assert seen[0].data_ptr() == logits.data_ptr() and logits._version > version
    expected = loss_and_grads(kernel, batch)
    assert same_bits(losses.detach(), expected.losses)
    assert same_bits(seen[0], expected.grad_tokens) and same_bits(leaf.grad, seen[0] * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_inputs_are_not_modified_unless_asked(kernel, device):
    batch = rnnt_batch(device=device, **RAGGED)
    tensors = [batch.token_logits, *batch.lengths]
    copies, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    loss_and_grads(kernel, batch)
    kernel.rnnt_loss(*batch.rnnt_args, inplace_grad=True)  # nothing to differentiate
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies))
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("inplace_grad, logits_beyond", [(True, 0), (False, 1)])
def test_peak_memory_of_a_training_step(kernel, device, inplace_grad, logits_beyond):
    batch = rnnt_batch(B=2, T=30, U=10, V=1021, device=device)
    logits = batch.token_logits.requires_grad_()

    def step():
        loss = kernel.rnnt_loss(logits, *batch.rnnt_args[1:], inplace_grad=inplace_grad)
        torch.autograd.grad(loss, logits)

    limit = logits_beyond * logits.numel() * logits.element_size() + 60 * batch.valid.numel() + 8192
    assert peak_extra_bytes(step, device) <= limit


def test_no_gradient_wanted_no_graph_and_no_gradient_memory(kernel, device):
    batch = rnnt_batch(B=2, T=30, U=10, V=1021, device=device)
    assert not kernel.rnnt_loss(*batch.rnnt_args).requires_grad
    logits = batch.token_logits.requires_grad_()
    with torch.no_grad():
        assert not kernel.rnnt_loss(logits, *batch.rnnt_args[1:]).requires_grad
        # log-probabilities of 16 bytes a node; alpha and beta would be 16 more
        peak = peak_extra_bytes(lambda: kernel.rnnt_loss(logits, *batch.rnnt_args[1:]), device)
    assert peak <= 26 * batch.valid.numel() + 8192


# torch.compile


@pytest.fixture
def compiled_rnnt_loss(kernel):
    torch._dynamo.reset()

    class Compiled:
        rnnt_loss = staticmethod(torch.compile(kernel.rnnt_loss, fullgraph=True, backend="aot_eager"))

    yield Compiled
    torch._dynamo.reset()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["none", "mean_volume"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fullgraph_equals_eager(kernel, compiled_rnnt_loss, device, dtype, reduction):
    batch = rnnt_batch(dtype=dtype, sigma=0.05, fastemit_lambda=0.1, clamp=0.5, device=device, **RAGGED)
    outcome = loss_and_grads(compiled_rnnt_loss, batch, reduction=reduction)
    expected = loss_and_grads(kernel, batch, reduction=reduction)
    assert same_bits(outcome.grad_tokens, expected.grad_tokens)
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)
