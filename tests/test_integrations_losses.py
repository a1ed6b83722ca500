"""The losses with the arguments of torchaudio, SpeechBrain and ESPnet, against the oracle and the conventions of each."""

import inspect
import sys

import pytest
import torch
from support.batches import make_batch


@pytest.fixture
def batch(device):
    """RNN-T, blank first, lengths that fill the tensor in one sample only."""
    return make_batch(3, 9, 4, 8, (), logit_lengths=[9, 7, 5], target_lengths=[4, 2, 3], blank=0, device=device)


def value_and_gradient(loss, batch, *args, **kwargs):
    logits = batch.token_logits.clone().requires_grad_()
    value = loss(logits, *args, **kwargs)
    value.sum().backward()
    return value.detach(), logits.grad


def sum_gradient(kernel, batch, **options):
    return value_and_gradient(kernel.rnnt_loss, batch, *batch.lengths, 0, "sum", **options)[1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("as_module", [False, True])
def test_torchaudio(kernel, batch, reduction, as_module):
    ours = kernel.integrations.torchaudio
    expected = batch.expected.losses
    expected = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
    if as_module:
        value, gradient = value_and_gradient(ours.RNNTLoss(blank=0, reduction=reduction), batch, *batch.lengths)
    else:
        value, gradient = value_and_gradient(ours.rnnt_loss, batch, *batch.lengths, 0, -1, reduction)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    scale = 3 if reduction == "mean" else 1
    torch.testing.assert_close(gradient * scale, sum_gradient(kernel, batch), rtol=1e-5, atol=1e-7)


def test_torchaudio_defaults_clamp_and_log_probabilities(kernel, batch):
    loss = kernel.integrations.torchaudio.rnnt_loss
    names = ["logits", "targets", "logit_lengths", "target_lengths", "blank", "clamp", "reduction", "fused_log_softmax"]
    assert list(inspect.signature(loss).parameters) == names
    assert [p.default for p in inspect.signature(loss).parameters.values()][4:] == [-1, -1, "mean", True]
    clamped = value_and_gradient(loss, batch, *batch.lengths, 0, 0.02, "sum")[1]
    assert clamped.abs().max() <= 0.02 * (1 + 1e-6)
    torch.testing.assert_close(clamped, sum_gradient(kernel, batch, clamp=0.02), rtol=0, atol=0)

    def of_log_probs(logits, *args):
        return loss(logits.log_softmax(-1), *args, fused_log_softmax=False)

    ours, theirs = (value_and_gradient(f, batch, *batch.lengths, 0, -1, "sum") for f in (of_log_probs, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="clamp=0.1 needs fused_log_softmax"):
        loss(batch.token_logits, *batch.lengths, 0, 0.1, fused_log_softmax=False)
    with pytest.raises(ValueError, match="reduction should be one of .* 'mean_volume'"):
        loss(batch.token_logits, *batch.lengths, reduction="mean_volume")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_speechbrain(kernel, batch, reduction):
    """The value divides by frames, the gradient by nothing: what SpeechBrain's recipes are tuned for."""
    targets, frames, labels = batch.lengths
    fractions = (frames / 9, labels / 4)
    losses = batch.expected.losses / frames.to(batch.expected.losses.device)
    expected = {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[reduction]
    loss = kernel.integrations.speechbrain.transducer_loss
    value, gradient = value_and_gradient(loss, batch, targets, *fractions, 0, reduction)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, sum_gradient(kernel, batch), rtol=1e-6, atol=1e-7)


def test_speechbrain_without_an_alignment_and_errors(kernel):
    loss = kernel.integrations.speechbrain.transducer_loss
    logits = torch.zeros(1, 2, 2, 4, requires_grad=True)
    value = loss(logits, torch.tensor([[1]]), torch.tensor([0.0]), torch.tensor([1.0]), 0)
    value.backward()
    assert value == float("inf") and not logits.grad.any()
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'batchmean'"):
        loss(logits, torch.tensor([[1]]), torch.tensor([1.0]), torch.tensor([1.0]), 0, "batchmean")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_espnet(kernel, batch, reduction):
    kernel.integrations.espnet.install()
    try:
        kernel.integrations.espnet.install()  # twice is once
        from warprnnt_pytorch import RNNTLoss
    finally:
        kernel.integrations.espnet.uninstall()
    assert "warprnnt_pytorch" not in sys.modules
    kernel.integrations.espnet.uninstall()
    expected = batch.expected.losses
    expected = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
    value, gradient = value_and_gradient(RNNTLoss(reduction=reduction), batch, *batch.lengths)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    scale = 3 if reduction == "mean" else 1
    torch.testing.assert_close(gradient * scale, sum_gradient(kernel, batch), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="got 'max'"):
        RNNTLoss(reduction="max")


def test_espnet_does_not_hide_the_real_package(kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "warprnnt_pytorch", type(sys)("warprnnt_pytorch"))
    with pytest.raises(RuntimeError, match="imported already"):
        kernel.integrations.espnet.install()
    kernel.integrations.espnet.uninstall()
    assert "warprnnt_pytorch" in sys.modules
