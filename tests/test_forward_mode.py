"""Forward-mode AD; options, dtypes and layouts under both kinds of transforms."""

import pytest
import torch
import torch.autograd.forward_ad as fw
from support.batches import make_batch
from support.transformed import (
    CLOSE,
    NO_SECOND_DERIVATIVE,
    batch_for,
    every_loss,
    expected_grad,
    rnnt_loss,
    tangent_of,
    tdt_loss,
    tdt_loss_joint,
    tdt_loss_of_slices,
)
from torch.func import (
    grad,
    jvp,
    vmap,
)


@every_loss
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_numbers(kernel, device, loss, requires_grad):
    batch = batch_for(loss, device)
    tangent = tangent_of(batch.joint)
    x = batch.joint.clone().requires_grad_(requires_grad)
    with fw.dual_level():
        losses, actual = fw.unpack_dual(loss(kernel, batch, fw.make_dual(x, tangent), "none"))
        torch.testing.assert_close(losses, batch.expected.losses, **CLOSE)
        torch.testing.assert_close(actual, (expected_grad(batch) * tangent).sum((1, 2, 3)), **CLOSE)
        assert losses.requires_grad == requires_grad
        if requires_grad:  # here backward has a tangent of its own
            with pytest.raises(RuntimeError, match=NO_SECOND_DERIVATIVE):
                torch.autograd.grad(losses.sum(), x, retain_graph=True)
    if requires_grad:
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)


def test_a_tangent_of_one_of_the_two(kernel, device):
    batch = batch_for(tdt_loss, device)
    tangents = tangent_of(batch.token_logits), tangent_of(batch.duration_logits)
    grads = batch.expected.grad_tokens, batch.expected.grad_durations
    for which in (0, 1):
        logits = [batch.token_logits, batch.duration_logits]
        with fw.dual_level():
            logits[which] = fw.make_dual(logits[which], tangents[which])
            actual = fw.unpack_dual(kernel.tdt_loss(*logits, *batch.rest, "none")).tangent
        torch.testing.assert_close(actual, (grads[which] * tangents[which]).sum((1, 2, 3)), **CLOSE)


@every_loss
def test_a_dual_level_without_dual_numbers(kernel, device, loss):
    batch = batch_for(loss, device)
    x = batch.joint.clone().requires_grad_()
    with fw.dual_level():
        losses = loss(kernel, batch, x, "none")
        assert fw.unpack_dual(losses).tangent is None
        losses.sum().backward()
    torch.testing.assert_close(x.grad, expected_grad(batch), **CLOSE)


# Options, dtypes


OPTIONS = {
    "omega": {"omega": 0.3},
    "fastemit": {"fastemit_lambda": 0.5},
    "clamp": {"clamp": 0.1},
    "delay_penalty": {"delay_penalty": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(kernel, device, options):
    """fastemit_lambda and clamp change gradients and not losses; forward mode has the gradients' changes."""
    batch = batch_for(tdt_loss_joint, device, **options)
    tangent = tangent_of(batch.joint)

    def losses(x):
        return kernel.tdt_loss_joint(x, *batch.rest, "none", **options)

    torch.testing.assert_close(grad(lambda x: losses(x).sum())(batch.joint), expected_grad(batch), **CLOSE)
    actual = jvp(losses, (batch.joint,), (tangent,))[1]
    torch.testing.assert_close(actual, (expected_grad(batch) * tangent).sum((1, 2, 3)), **CLOSE)


def test_samples_without_an_alignment(kernel, device):
    batch = make_batch(
        B=2, T=3, U=3, durations=(1,), logit_lengths=[3, 3], target_lengths=[3, 1], dtype=torch.float64, device=device
    )
    tangent = tangent_of(batch.joint)
    for zero_infinity, none in ((False, torch.inf), (True, 0.0)):

        def losses(x, zero_infinity=zero_infinity):
            return kernel.tdt_loss_joint(x, *batch.rest, "none", zero_infinity=zero_infinity)

        values, actual = jvp(losses, (batch.joint,), (tangent,))
        assert values[0] == none and actual[0] == 0 and values[1].isfinite()
        gradient = grad(lambda x, f=losses: f(x)[1])(batch.joint)
        torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)


def test_occupancies(kernel, device):
    """Beside a loss that is transformed; they have no derivative."""
    batch = batch_for(tdt_loss_joint, device)

    def loss(x):
        value, occupancy = kernel.tdt_loss_joint(x, *batch.rest, "sum", return_occupancy=True)
        return value, tuple(occupancy)

    gradient, occupancy = grad(loss, has_aux=True)(batch.joint)
    torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)
    for actual, expected in zip(occupancy, (batch.expected.blank_occ, batch.expected.label_occ)):
        torch.testing.assert_close(actual, expected, **CLOSE)
    _, occupancies = vmap(loss)(torch.stack([batch.joint, batch.joint]))
    torch.testing.assert_close(occupancies[0][1], batch.expected.blank_occ, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(kernel, device, dtype):
    batch = batch_for(tdt_loss_joint, device, dtype)
    tangent = tangent_of(batch.joint)
    for loss in (tdt_loss_of_slices, tdt_loss_joint, rnnt_loss):
        own = batch if "rnnt" not in loss.__name__ else batch_for(loss, device, dtype)
        x, tangent = own.joint, tangent_of(own.joint)
        losses, actual = jvp(lambda x, f=loss, own=own: f(kernel, own, x, "none"), (x,), (tangent,))
        assert losses.dtype == actual.dtype == torch.float32
        expected = (expected_grad(own) * tangent.double()).sum((1, 2, 3))
        eps = 0.05 if dtype == torch.bfloat16 else 0.01 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)
        gradient = grad(lambda x, f=loss, own=own: f(kernel, own, x, "sum"))(x)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected_grad(own), rtol=eps, atol=eps * 0.1)


def test_logits_whose_last_dimension_is_not_contiguous(kernel, device):
    batch = batch_for(tdt_loss_joint, device)
    x = batch.joint.mT.contiguous().mT
    gradient = grad(lambda x: kernel.tdt_loss_joint(x, *batch.rest, "sum"))(x)
    torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)
