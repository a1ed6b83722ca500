"""`layers.RNNTLoss`, its signature, and the numbers of the RNN-T losses of transformers and torchaudio."""

import inspect

import pytest
import torch
from support.calls import Outcome, loss_and_grads, transformers_rnnt_loss
from support.comparisons import assert_same_bits
from support.rnnt import RAGGED, rnnt_batch

# transformers


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum", "none"])
def test_agrees_with_transformers(kernel, device, reduction):
    rnnt_loss = transformers_rnnt_loss()
    lengths = {"logit_lengths": [14, 9, 3], "target_lengths": [5, 2, 4]}
    batch = rnnt_batch(B=3, T=14, U=5, V=21, blank=20, device=device, **lengths)
    logits, _ = batch.leaves()
    theirs = rnnt_loss(logits, *batch.rnnt_args[1:], reduction=reduction)
    theirs.backward(torch.ones_like(theirs))
    ours = loss_and_grads(kernel, batch, reduction=reduction)
    torch.testing.assert_close(ours.losses, theirs.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(ours.grad_tokens, logits.grad, rtol=0, atol=2e-5)  # their alpha and beta are float32


def test_clamp_agrees_with_torchaudio(kernel):
    """On the CPU: on an H200, torchaudio 2.11 returned gradients that were not clamped."""
    transformers_rnnt_loss()  # skips without torchaudio
    import torchaudio

    batch = rnnt_batch(B=2, T=9, U=4, V=11, clamp=0.05)
    logits, _ = batch.leaves()
    lengths = [tensor.int() for tensor in batch.lengths]
    losses = torchaudio.functional.rnnt_loss(logits, *lengths, blank=0, clamp=0.05, reduction="none")
    upstream = torch.tensor([1.0, -3.0])
    losses.backward(upstream)
    ours = loss_and_grads(kernel, batch, upstream=upstream)
    torch.testing.assert_close(ours.grad_tokens, logits.grad, rtol=0, atol=5e-6)


# Signatures and the layer


def test_signatures(kernel):
    def names(function):
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        return [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]

    theirs = names(pytest.importorskip("transformers.loss.loss_rnnt").rnnt_loss)
    assert names(kernel.rnnt_loss) == names(kernel.layers.RNNTLoss.forward) == theirs


def test_what_the_kernels_library_asks_of_a_layer(kernel):
    layer = kernel.layers.RNNTLoss
    assert issubclass(layer, torch.nn.Module)
    assert layer.has_backward is True and layer.can_torch_compile is True
    assert "__init__" not in vars(layer)
    module = layer()
    assert not module.state_dict() and not list(module.parameters())


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_layer_gives_the_numbers_of_the_function(kernel, device, reduction):
    batch = rnnt_batch(device=device, **RAGGED)
    logits, durations = batch.leaves()
    losses = kernel.layers.RNNTLoss()(logits, *batch.rnnt_args[1:], reduction=reduction)
    losses.sum().backward()
    outcome = Outcome(losses.detach(), logits.grad, durations)
    assert_same_bits(outcome, loss_and_grads(kernel, batch, reduction=reduction), samples=...)


def test_the_layer_in_a_compiled_model(kernel, device):
    torch._dynamo.reset()

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.loss = torch.nn.Linear(8, 7), kernel.layers.RNNTLoss()

        def forward(self, hidden, *rest):
            return self.loss(self.linear(hidden), *rest)

    batch = rnnt_batch(device=device, **RAGGED)
    torch.manual_seed(0)
    model = Head().to(device)
    hidden = torch.randn(4, 12, 6, 8, device=device)
    eager = model(hidden, *batch.rnnt_args[1:])
    expected = torch.autograd.grad(eager, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(hidden, *batch.rnnt_args[1:])
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    for actual, reference in zip(torch.autograd.grad(compiled, list(model.parameters())), expected):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_errors_come_through(kernel, device):
    batch = rnnt_batch(device=device)
    with pytest.raises(ValueError, match="reduction"):
        kernel.layers.RNNTLoss()(*batch.rnnt_args, reduction="average")
