"""Agreement with the `tdt_loss` of the installed transformers, reduction by reduction.

Where ours differs on purpose: a target length of 0 counts as 1 in "mean" (theirs divides by 0), padded labels may be any number (theirs gathers with
them and needs a token), a node that no alignment visits has gradient 0 (theirs is NaN where no arc enters it), and float64 logits stay float64.
"""

import pytest
import torch
from support.batches import make_batch
from support.calls import Outcome, loss_and_grads

loss_tdt = pytest.importorskip("transformers.loss.loss_tdt", reason="needs a transformers with the TDT loss")

LENGTHS = {"logit_lengths": [14, 9, 11], "target_lengths": [5, 2, 4]}


def their_outcome(batch, reduction):
    token_logits, duration_logits = batch.leaves()
    loss = loss_tdt.tdt_loss(token_logits, duration_logits, *batch.rest, reduction=reduction)
    loss.backward(torch.ones_like(loss))
    return Outcome(loss.detach(), token_logits.grad, duration_logits.grad)


def assert_agree(ours, theirs, rounding=0.0):
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-6, atol=0)
    for name in ("grad_tokens", "grad_durations"):
        actual, reference = getattr(ours, name), getattr(theirs, name)
        assert (actual[reference.isnan()] == 0).all()
        torch.testing.assert_close(actual, reference.nan_to_num(0.0), rtol=rounding, atol=5e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum", "none"])
def test_loss_and_gradients_of_every_reduction(kernel, device, reduction):
    batch = make_batch(B=3, T=14, U=5, V=21, durations=(0, 1, 2, 3, 4), blank=20, sigma=0.05, device=device, **LENGTHS)
    assert_agree(loss_and_grads(kernel, batch, reduction=reduction), their_outcome(batch, reduction))


@pytest.mark.parametrize("durations", [(1,), (0, 1), (4, 3, 2, 1, 0), (0, 2, 7)])
def test_every_kind_of_durations(kernel, device, durations):
    batch = make_batch(B=3, T=14, U=5, V=9, durations=durations, device=device, **LENGTHS)
    assert_agree(loss_and_grads(kernel, batch), their_outcome(batch, "none"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits(kernel, device, dtype):
    batch = make_batch(B=3, T=14, U=5, V=21, dtype=dtype, device=device, **LENGTHS)
    assert_agree(
        loss_and_grads(kernel, batch, reduction="mean"),
        their_outcome(batch, "mean"),
        rounding=2 * torch.finfo(dtype).eps,
    )


def test_infeasible_samples_agree_in_the_loss(kernel, device):
    batch = make_batch(B=2, T=6, U=4, durations=(1, 2), logit_lengths=[3, 6], device=device)
    loss = loss_tdt.tdt_loss(*batch.args, reduction="none")
    assert loss[0] == torch.inf
    torch.testing.assert_close(kernel.tdt_loss(*batch.args, reduction="none"), loss, rtol=2e-6, atol=0)


def test_an_empty_transcript_counts_as_one_label(kernel, device):
    batch = make_batch(B=2, T=6, U=3, target_lengths=[0, 3], device=device)
    assert loss_tdt.tdt_loss(*batch.args, reduction="mean") == torch.inf
    per_sample = loss_tdt.tdt_loss(*batch.args, reduction="none")
    ours = kernel.tdt_loss(*batch.args, reduction="mean")
    torch.testing.assert_close(ours, (per_sample[0] + per_sample[1] / 3) / 2, rtol=2e-6, atol=0)


def test_it_stands_in_for_the_loss_of_parakeet(kernel, device):
    parakeet_loss = loss_tdt.ParakeetForTDTLoss
    batch = make_batch(B=3, T=14, U=5, V=21, durations=(0, 1, 2, 3, 4), blank=20, device=device, **LENGTHS)
    keywords = {
        "token_logits": batch.token_logits,
        "duration_logits": batch.duration_logits,
        "logit_lengths": batch.logit_lengths,
        "blank_token_id": 20,
        "durations": list(batch.durations),
    }
    theirs = parakeet_loss(labels=batch.targets, label_lengths=batch.target_lengths, **keywords)
    ours = kernel.tdt_loss(targets=batch.targets, target_lengths=batch.target_lengths, **keywords)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
