"""The NeMo example: what a NeMo model's loss wrapper does with `model.loss._loss` gives the losses and gradients of the oracle."""

import copy
import pickle

import nemo_loss
import pytest
import torch
from conftest import assert_losses_match, make_batch


@pytest.fixture
def batch(device):
    """As in a NeMo model: vocabulary, blank, durations."""
    return make_batch(
        3, 9, 4, 8, (0, 1, 2, 3), logit_lengths=[9, 7, 5], target_lengths=[4, 2, 3], blank=7, device=device
    )


@pytest.fixture
def rnnt_losses(batch):
    """The oracle's losses of the token logits alone."""
    return batch.replace(duration_logits=batch.duration_logits[..., :0], durations=()).expected.losses


class Wrapper:
    """What NeMo's RNNTLoss does around its `_loss`: integers of 64 bits, no reduction inside, its own mean outside."""

    def __init__(self, loss):
        self._loss = loss

    def __call__(self, log_probs, targets, input_lengths, target_lengths):
        reduction, self._loss.reduction = self._loss.reduction, None
        losses = self._loss(
            acts=log_probs, labels=targets.long(), act_lens=input_lengths.long(), label_lens=target_lengths.long()
        )
        self._loss.reduction = reduction
        return losses


def test_tdt_behind_the_wrapper(kernel, batch):
    loss = nemo_loss.TDTLossNeMo(7, batch.durations, sigma=0.05)
    expected = batch.replace(sigma=0.05)
    losses = Wrapper(loss)(batch.joint, *batch.lengths)
    assert loss.reduction == "mean"
    assert_losses_match(losses, expected)


@pytest.mark.parametrize("reduction", [None, "none", "mean_batch", "mean", "sum", "mean_volume"])
def test_reductions_by_their_nemo_names(kernel, batch, reduction):
    losses, lengths = batch.expected.losses, batch.target_lengths
    expected = {
        "mean_batch": losses.mean(),
        "mean": (losses / lengths).mean(),
        "sum": losses.sum(),
        "mean_volume": losses.sum() / lengths.sum(),
    }.get(reduction, losses)
    actual = nemo_loss.TDTLossNeMo(7, batch.durations, reduction)(batch.joint, *batch.lengths)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_options_reach_the_kernel(kernel, batch):
    options = {"fastemit_lambda": 0.3, "clamp": 0.02, "omega": 0.25}
    logits = batch.joint.clone().requires_grad_()
    nemo_loss.TDTLossNeMo(7, batch.durations, "mean_batch", sigma=0.05, **options)(logits, *batch.lengths).backward()
    expected = batch.joint.clone().requires_grad_()
    kernel.tdt_loss_joint(expected, *batch.replace(sigma=0.05).rest, "mean_batch", **options).backward()
    assert torch.equal(logits.grad, expected.grad)
    assert logits.grad.abs().max() <= 0.02 / 3 * (1 + 1e-6)


@pytest.mark.parametrize("clamp", [-1.0, 0.0])
def test_no_clamp_by_nemos_ways_to_say_so(kernel, batch, clamp):
    gradients = []
    for options in ({}, {"clamp": clamp}):
        logits = (batch.joint * 3).requires_grad_()
        nemo_loss.TDTLossNeMo(7, batch.durations, **options)(logits, *batch.lengths).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


def test_rnnt_behind_the_wrapper(kernel, batch, rnnt_losses):
    losses = Wrapper(nemo_loss.RNNTLossNeMo(7))(batch.token_logits, *batch.lengths)
    torch.testing.assert_close(losses.double(), rnnt_losses, rtol=1e-6, atol=0)


def test_omega_1_is_rnnt(kernel, batch, rnnt_losses):
    losses = nemo_loss.TDTLossNeMo(7, batch.durations, None, omega=1.0)(batch.joint, *batch.lengths)
    torch.testing.assert_close(losses.double(), rnnt_losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))], ids=["copy", "pickle"]
)
def test_copies_work(kernel, batch, copied):
    loss = nemo_loss.TDTLossNeMo(7, batch.durations)
    assert torch.equal(loss(batch.joint, *batch.lengths), copied(loss)(batch.joint, *batch.lengths))


@pytest.mark.parametrize(
    "make", [lambda r: nemo_loss.TDTLossNeMo(7, [0, 1], r), lambda r: nemo_loss.RNNTLossNeMo(7, r)]
)
def test_unknown_reductions_are_refused_at_once(make):
    with pytest.raises(ValueError, match="reduction must be one of .* got 'max'"):
        make("max")


def test_the_script_runs(kernel, capsys):
    nemo_loss.main()
    assert "RNN-T" in capsys.readouterr().out
