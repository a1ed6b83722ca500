"""The oracle is right: against brute force, finite differences, closed forms and the published check values."""

from math import comb, inf

import numpy as np
import oracle
import pytest
import torch
from conftest import make_batch
from known_values import (
    DURATIONS_0_1,
    PUBLISHED_GRADIENT,
    PUBLISHED_LOSS,
    loss_of_durations_0_1,
    loss_of_durations_1,
    loss_without_labels,
)

TINY = [
    # T, U, durations
    (1, 0, (1,)),
    (1, 2, (0, 1)),
    (3, 1, (1,)),
    (4, 2, (0, 1, 2)),
    (4, 2, (2, 0, 1)),
    (3, 2, (0, 1, 1)),
    (5, 2, (1, 2)),
    (6, 1, (2, 4)),
    (4, 3, (0, 4)),
    (5, 2, (0, 3, 9)),
    (3, 3, (1,)),  # infeasible
    (3, 1, (0, 4)),  # infeasible
]


@pytest.mark.parametrize("T, U, durations", TINY)
def test_lattice_equals_the_sum_over_all_alignments(T, U, durations):
    batch = make_batch(T=T, U=U, V=4, durations=durations, sigma=0.1, dtype=torch.float64)
    lp = oracle.log_probs(batch.token_logits[0], batch.duration_logits[0], batch.targets[0], batch.blank, batch.sigma)
    nodes, blank_occ, label_occ = oracle.tdt_lattice(lp, durations)
    ll, brute_blank_occ, brute_label_occ = oracle.brute_force(lp, durations)
    assert nodes.ll == ll == -inf or nodes.ll == pytest.approx(ll, abs=1e-12)
    np.testing.assert_allclose(blank_occ, brute_blank_occ, atol=1e-12)
    np.testing.assert_allclose(label_occ, brute_label_occ, atol=1e-12)


def test_number_of_alignments():
    # Durations [0, 1]: where k of the U labels take no frame, there are T + k arcs; the last is the final blank, U of the others are labels.
    for T, U in [(4, 2), (3, 1), (1, 3), (4, 0)]:
        count = sum(comb(T + k - 1, U) * comb(U, k) for k in range(U + 1) if T + k - 1 >= U)
        assert len(list(oracle.enumerate_alignments(T, U, (0, 1)))) == count


@pytest.mark.parametrize("T, U, durations", [(4, 2, (0, 1, 2)), (5, 2, (1, 2)), (3, 2, (0, 1, 1))])
def test_alpha_and_beta_meet_at_every_frame(T, U, durations):
    batch = make_batch(T=T, U=U, durations=durations, dtype=torch.float64)
    ll = batch.expected.ll[0]
    assert batch.expected.beta[0, 0, 0] == ll
    occupancy = (batch.expected.alpha + batch.expected.beta - ll).exp()  # P(an alignment visits (t, u))
    assert (occupancy <= 1 + 1e-12).all()
    assert occupancy[0, 0, 0].item() == pytest.approx(1.0)


@pytest.mark.parametrize("durations, target", [((0, 1, 2), None), ((1, 2), None), ((0, 1, 1), None), ((0, 1), 0)])
def test_gradients_equal_finite_differences(durations, target):
    batch = make_batch(T=4, U=2, V=3, durations=durations, sigma=0.05, dtype=torch.float64)
    if target is not None:
        batch = batch.replace(targets=torch.full_like(batch.targets, target))  # a label that is the blank
    step = 1e-6
    for logits, grad in [
        (batch.token_logits, batch.expected.grad_tokens),
        (batch.duration_logits, batch.expected.grad_durations),
    ]:
        flat, numeric = logits.view(-1), torch.zeros(logits.numel(), dtype=torch.float64)
        for j in range(flat.numel()):
            original = flat[j].item()
            flat[j] = original + step
            up = oracle.tdt_loss(*batch.args).losses.sum()
            flat[j] = original - step
            down = oracle.tdt_loss(*batch.args).losses.sum()
            flat[j] = original
            numeric[j] = (up - down) / (2 * step)
        torch.testing.assert_close(grad.reshape(-1), numeric, rtol=0, atol=1e-8)


def test_published_check_values():
    batch = make_batch(T=3, U=1, V=4, blank=3, sigma=0.05, scale=0.0, dtype=torch.float64)
    batch = batch.replace(targets=torch.zeros_like(batch.targets))
    expected = batch.expected
    assert expected.losses.item() == pytest.approx(PUBLISHED_LOSS, abs=5e-7)
    both = torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1)[0]
    for (t, u), values in PUBLISHED_GRADIENT.items():
        torch.testing.assert_close(both[t, u], torch.tensor(values, dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("T, U, V, sigma", [(5, 2, 7, 0.05), (9, 4, 3, 0.0), (3, 3, 5, 0.0)])
def test_closed_form_of_durations_1(T, U, V, sigma):
    batch = make_batch(T=T, U=U, V=V, durations=(1,), sigma=sigma, scale=0.0, dtype=torch.float64)
    assert batch.expected.losses.item() == pytest.approx(loss_of_durations_1(T, U, V, sigma), rel=1e-14)


@pytest.mark.parametrize("T, U, V, sigma, value", DURATIONS_0_1)
def test_closed_form_of_durations_0_1(T, U, V, sigma, value):
    batch = make_batch(T=T, U=U, V=V, durations=(0, 1), sigma=sigma, scale=0.0, dtype=torch.float64)
    assert batch.expected.losses.item() == pytest.approx(loss_of_durations_0_1(T, U, V, sigma), rel=1e-13)
    assert batch.expected.losses.item() == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_closed_form_without_labels(T):
    batch = make_batch(T=T, U=0, V=5, durations=range(5), scale=0.0, dtype=torch.float64)
    assert batch.expected.losses.item() == pytest.approx(loss_without_labels(T, 5, 5), rel=1e-13)


def test_agrees_with_autograd_of_transformers():
    transformers_loss = pytest.importorskip("transformers.loss.loss_tdt").tdt_loss
    batch = make_batch(B=3, T=7, U=4, V=6, logit_lengths=[7, 5, 6], target_lengths=[4, 2, 3], sigma=0.05)
    token_logits, duration_logits = batch.leaves()
    losses = transformers_loss(token_logits, duration_logits, *batch.rest, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(losses.double(), batch.expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(token_logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=2e-6)
    torch.testing.assert_close(duration_logits.grad.double(), batch.expected.grad_durations, rtol=0, atol=2e-6)
