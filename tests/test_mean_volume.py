"""`mean_volume` of a batch with a malformed sample: the others' gradients are divided by their own labels alone."""

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.public_calls import CALLS, FUSED, Inputs

# mean_volume and a malformed sample

MALFORMED = {
    "U = -1": ("target_lengths", -1),
    "U = 10^12": ("target_lengths", 10**12),
    "U = -2^62": ("target_lengths", -(2**62)),
    "T beyond the tensor": ("logit_lengths", 7),
    "T = -1": ("logit_lengths", -1),
    "a label": ("targets", 99),
}
every_malformed = pytest.mark.parametrize("field, value", MALFORMED.values(), ids=MALFORMED.keys())
MEAN_VOLUME = 4  # of the ops
LENGTHS = {"logit_lengths": [6, 5, 4], "target_lengths": [3, 2, 1]}


def with_malformed_sample(durations, device, field, value):
    """A batch whose sample 1 is malformed, and the gradients of mean_volume of the other two, as the oracle has them."""
    good = make_batch(B=3, T=6, U=3, durations=durations, device=device, **LENGTHS)
    expected = torch.cat([good.expected.grad_tokens, good.expected.grad_durations], -1) / (3 + 1)
    expected[1] = 0
    malformed = good.replace(**{field: getattr(good, field).clone()})
    getattr(malformed, field)[1] = value
    return malformed, expected


@pytest.mark.kernels_ci
@every_malformed
def test_mean_volume_counts_no_malformed_sample(kernel, device, api, field, value):
    """Through the ops, as a sample on a GPU gets there: U = -1 made the neighbours' gradients 2.5 times as large."""
    for durations in ((0, 1, 2), ()):
        batch, expected = with_malformed_sample(durations, device, field, value)
        ops = kernel.loss.ops
        loss, *saved, weights = ops.loss(*batch.loss_op_args(api, reduction=MEAN_VOLUME))
        assert loss.isnan()
        grads = ops.gradient(*batch.gradient_op_args(api, torch.ones_like(loss), weights, *saved))
        grad = torch.cat([g for g in grads if g.dim() == 4], -1)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@every_malformed
def test_mean_volume_counts_no_malformed_sample_on_a_gpu(kernel, field, value):
    for durations in ((0, 1, 2), ()):
        batch, expected = with_malformed_sample(durations, "cuda", field, value)
        outcome = loss_and_grads(kernel, batch, "joint", reduction="mean_volume")
        assert outcome.losses.isnan()
        grad = torch.cat([outcome.grad_tokens, outcome.grad_durations], -1)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FUSED)
@every_malformed
def test_mean_volume_of_fused_losses_counts_no_malformed_sample(kernel, name, field, value):
    grads = []
    for is_malformed in (False, True):
        inputs = Inputs("cuda")
        if is_malformed:
            inputs.labels[["targets", "logit_lengths", "target_lengths"].index(field)][1] = value
            reduction = {"reduction": "mean_volume"}
        else:
            reduction = {"reduction": "none"}
        losses = CALLS[name](kernel, inputs, **reduction)
        total = losses if is_malformed else losses[[0, 2]].sum() / 4  # U = 2 each
        assert total.isnan() == is_malformed
        grads.append(torch.autograd.grad(total, (inputs.encoder, inputs.decoder)))
    for good, actual in zip(*grads):
        torch.testing.assert_close(actual[[0, 2]], good[[0, 2]], rtol=1e-4, atol=1e-6)
        assert (actual[1] == 0).all()
