"""Losses and gradients of equal logits: closed forms and numbers, exact."""

import pytest
import torch
from support.batches import zero_batch
from support.calls import loss_and_grads
from support.known_values import DURATIONS_0_1, loss_of_durations_0_1, loss_of_durations_1, loss_without_labels


@pytest.mark.kernels_ci
@pytest.mark.parametrize("T, U, V, sigma", [(5, 2, 7, 0.05), (4, 4, 7, 0.0), (9, 8, 3, 0.0)])
def test_exact_value_of_durations_1(kernel, device, T, U, V, sigma):
    losses = loss_and_grads(kernel, zero_batch(T=T, U=U, V=V, durations=(1,), sigma=sigma, device=device)).losses
    assert losses.item() == pytest.approx(loss_of_durations_1(T, U, V, sigma), rel=1e-6)
    assert (T, U) != (5, 2) or losses.item() == pytest.approx(8.187791, rel=1e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("T, U, V, sigma, value", DURATIONS_0_1)
def test_exact_value_of_durations_0_1(kernel, device, T, U, V, sigma, value):
    losses = loss_and_grads(kernel, zero_batch(T=T, U=U, V=V, sigma=sigma, device=device)).losses
    assert losses.item() == pytest.approx(loss_of_durations_0_1(T, U, V, sigma), rel=1e-6)
    assert losses.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_exact_value_without_labels(kernel, device, T):
    losses = loss_and_grads(kernel, zero_batch(T=T, U=0, durations=range(5), device=device)).losses
    assert losses.item() == pytest.approx(loss_without_labels(T, 5, 5), rel=1e-6)
    assert T != 4 or losses.item() == pytest.approx(3.101214, rel=1e-6)


@pytest.mark.kernels_ci
def test_exact_gradient(kernel, device, api):
    batch = zero_batch(T=2, U=1, V=4, device=device)
    outcome = loss_and_grads(kernel, batch.replace(targets=torch.ones_like(batch.targets)), api)
    assert outcome.losses.item() == pytest.approx(3.935740, rel=1e-6)
    grad_tokens = [
        [[0.15, -0.65, 0.25, 0.25], [-0.075, 0.025, 0.025, 0.025]],
        [[0.025, -0.075, 0.025, 0.025], [-0.75, 0.25, 0.25, 0.25]],
    ]
    grad_durations = [[[0.4, -0.4], [0.05, -0.05]], [[-0.05, 0.05], [0.5, -0.5]]]
    torch.testing.assert_close(outcome.grad_tokens[0].cpu(), torch.tensor(grad_tokens), rtol=0, atol=1e-6)
    torch.testing.assert_close(outcome.grad_durations[0].cpu(), torch.tensor(grad_durations), rtol=0, atol=1e-6)
