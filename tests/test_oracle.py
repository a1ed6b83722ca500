"""The oracle is right: against brute force, finite differences, closed forms and the published check values."""

from decimal import Decimal, localcontext
from math import comb, inf

import numpy as np
import pytest
import torch
from support import oracle
from support.batches import LABEL_LP, make_batch
from support.calls import transformers_rnnt_loss
from support.known_values import (
    DURATIONS_0_1,
    PUBLISHED_GRADIENT,
    PUBLISHED_LOSS,
    RNNT_GRADIENT,
    loss_of_durations_0_1,
    loss_of_durations_1,
    loss_of_rnnt,
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
    (1, 0, ()),  # RNN-T from here on
    (1, 3, ()),
    (4, 0, ()),
    (4, 3, ()),
    (3, 5, ()),
]


@pytest.mark.parametrize("T, U, durations", TINY)
def test_lattice_equals_the_sum_over_all_alignments(T, U, durations):
    batch = make_batch(T=T, U=U, V=4, durations=durations, sigma=0.1, dtype=torch.float64)
    lp = oracle.log_probs(batch.token_logits[0], batch.duration_logits[0], batch.targets[0], batch.blank, batch.sigma)
    ll, blank_occ, label_occ = oracle.brute_force(lp, durations)
    (term,) = oracle.terms(lp, durations)
    assert term.weight == 1 and term.is_rnnt == (durations == ())
    assert term.nodes.ll == ll == -inf or term.nodes.ll == pytest.approx(ll, abs=1e-12)
    np.testing.assert_allclose(term.blank_occ, blank_occ, atol=1e-12)
    np.testing.assert_allclose(term.label_occ, label_occ, atol=1e-12)
    if durations:  # the same tokens without their durations, as omega mixes them in
        _, mixed_in = oracle.terms(lp, durations, omega=0.25)
        ll, blank_occ, label_occ = oracle.brute_force(lp, ())
        assert mixed_in.weight == 0.25 and mixed_in.nodes.ll == pytest.approx(ll, abs=1e-12)
        np.testing.assert_allclose(mixed_in.blank_occ, blank_occ, atol=1e-12)
        np.testing.assert_allclose(mixed_in.label_occ, label_occ, atol=1e-12)


def exact_log_softmax(row):
    """Of one row, in 400 digits."""
    with localcontext() as context:
        context.prec = 400
        logits = [Decimal(x) for x in row]
        top = max(logits)
        below = [x - top for x in logits]
        log_sum = sum(x.exp() for x in below).ln()
        return [float(x - log_sum) for x in below]


ROWS = {
    "plain": [0.5, -1.0, 2.0, 0.25],
    "equal": [3.0] * 5,
    "two at the top": [7.0, 7.0, 1.0],
    **{f"shifted to {top:g}": [top, top - 2.0, top - 4.0, top - 40.0] for top in (1e12, 1e15, 4e15, 1e16, -1e16)},
    **{f"one wins by {height}": [0.25, height, -0.5, 0.0] for height in (5.0, 36.0, 40.0, 60.0, 700.0)},
    "shifted, and one wins": [1e13, 1e13 + 38.0, 1e13 - 1.0],
    "masked by the lowest float32": [torch.finfo(torch.float32).min, 1.0, 1.5],
    "masked by the lowest float64": [torch.finfo(torch.float64).min, -1e300, -1e300],
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_log_probs_are_exact_for_shifted_and_sharp_rows(row):
    """Not rounded to the size of the logits, and where one entry wins, not to 1 minus the rest."""
    x, target = torch.tensor(row, dtype=torch.float64).expand(1, 2, -1), torch.tensor([1])
    lp = oracle.log_probs(x, x, target, blank=0)
    expected = exact_log_softmax(row)
    close = {"rtol": 1e-14, "atol": 0}
    np.testing.assert_allclose(lp.dur, np.broadcast_to(expected, lp.dur.shape), **close)
    np.testing.assert_allclose(lp.blank, [[expected[0]] * 2], **close)
    np.testing.assert_allclose(lp.label, [[expected[1], -inf]], **close)


def test_log_probs_of_masked_and_malformed_rows():
    x = torch.tensor([[0.0, -inf, 0.0], [-inf, -inf, -inf], [0.0, inf, 0.0], [0.0, torch.nan, 0.0]]).double()
    lp = oracle.log_probs(x[None], x[None, :, :0], torch.zeros(3, dtype=torch.int64), blank=1)
    np.testing.assert_allclose(lp.label, [[-np.log(2), np.nan, np.nan, -inf]], rtol=1e-15)
    np.testing.assert_array_equal(lp.blank, [[-inf, np.nan, np.nan, np.nan]])
    assert lp.dur.shape == (1, 4, 0)


def test_a_loss_far_below_the_last_place_of_1():
    """What all alignments but one are worth together, 1e-18: logsumexp over arcs keeps it."""
    batch = make_batch(T=3, U=1, V=3, durations=(), blank=0, scale=0.0, dtype=torch.float64)
    batch.targets.fill_(1)
    height = 42.0
    batch.token_logits[0, 0, 0, 0] = height  # a blank at frame 0,
    batch.token_logits[0, 1:, 0, 1] = height  # then the label,
    batch.token_logits[0, :, 1, 0] = height  # then blanks
    # Each of the four nodes loses exp(-height) to each of two other tokens; the label at frame 0 or 2 brings one back.
    assert batch.expected.losses.item() == pytest.approx((4 * 2 - 2) * np.exp(-height), rel=1e-12, abs=0)


def test_condition_of_a_single_alignment():
    """Of 4 blanks of log-probability -log 3 and a penalty of 0.1 each: 4 independent errors of 1 + log 3 + 0.1 nats."""
    batch = make_batch(T=4, U=0, V=3, durations=(), sigma=0.1, scale=0.0, dtype=torch.float64)
    nats = 1 + (np.log(3) + 0.1) + 0.1
    assert batch.expected.condition.item() == pytest.approx(2 * nats)
    mixed = make_batch(T=4, U=0, V=3, durations=(1,), omega=0.25, sigma=0.1, scale=0.0, dtype=torch.float64)
    assert mixed.expected.condition.item() == pytest.approx(2 * nats)
    assert make_batch(T=3, U=3, durations=(1,), dtype=torch.float64).expected.condition.item() == 0  # no alignment


def test_number_of_alignments():
    # Durations [0, 1]: where k of the U labels take no frame, there are T + k arcs; the last is the final blank, U of the others are labels.
    for T, U in [(4, 2), (3, 1), (1, 3), (4, 0)]:
        count = sum(comb(T + k - 1, U) * comb(U, k) for k in range(U + 1) if T + k - 1 >= U)
        assert len(list(oracle.enumerate_alignments(T, U, (0, 1)))) == count
        # RNN-T: U labels anywhere before the last of T blanks.
        assert len(list(oracle.enumerate_alignments(T, U, ()))) == comb(T - 1 + U, U)


@pytest.mark.parametrize("T, U, durations", [(4, 2, (0, 1, 2)), (5, 2, (1, 2)), (3, 2, (0, 1, 1)), (4, 2, ())])
def test_alpha_and_beta_give_the_likelihood_at_every_frame(T, U, durations):
    batch = make_batch(T=T, U=U, durations=durations, dtype=torch.float64)
    ll, (alpha, beta) = batch.expected.ll[0], batch.expected.alpha_beta[0]
    assert beta[0, 0, 0] == ll
    occupancy = (alpha + beta - ll).exp()  # P(an alignment visits (t, u))
    assert (occupancy <= 1 + 1e-12).all()
    assert occupancy[0, 0, 0].item() == pytest.approx(1.0)


def numeric_gradient(batch, logits, step=1e-6):
    """The derivative of the summed losses with respect to `logits`, one of the batch's tensors, by central differences."""
    flat, numeric = logits.view(-1), torch.zeros(logits.numel(), dtype=torch.float64)
    for j in range(flat.numel()):
        original = flat[j].item()
        flat[j] = original + step
        up = oracle.tdt_loss(*batch.args, **batch.options).losses.sum()
        flat[j] = original - step
        down = oracle.tdt_loss(*batch.args, **batch.options).losses.sum()
        flat[j] = original
        numeric[j] = (up - down) / (2 * step)
    return numeric.view_as(logits)


DIFFERENTIATED = {
    "durations": ({"durations": (0, 1, 2)}, None),
    "no zero": ({"durations": (1, 2)}, None),
    "duplicates": ({"durations": (0, 1, 1)}, None),
    "a label that is the blank": ({"durations": (0, 1)}, 0),
    "RNN-T": ({"durations": ()}, None),
    "RNN-T, a label that is the blank": ({"durations": ()}, 0),
    "RNN-T, delay penalty": ({"durations": (), "delay_penalty": 0.3}, None),
    "delay penalty": ({"delay_penalty": -0.4}, None),
    "omega": ({"omega": 0.3}, None),
    "omega 1": ({"omega": 1.0}, None),
    "both": ({"durations": (2, 0, 1), "omega": 0.6, "delay_penalty": 0.2}, None),
}


@pytest.mark.parametrize("arguments, target", DIFFERENTIATED.values(), ids=DIFFERENTIATED.keys())
def test_gradients_equal_finite_differences(arguments, target):
    batch = make_batch(T=4, U=2, V=3, sigma=0.05, dtype=torch.float64, **arguments)
    if target is not None:
        batch = batch.replace(targets=torch.full_like(batch.targets, target))
    for logits, grad in [
        (batch.token_logits, batch.expected.grad_tokens),
        (batch.duration_logits, batch.expected.grad_durations),
    ]:
        torch.testing.assert_close(grad, numeric_gradient(batch, logits), rtol=0, atol=1e-8)


@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_occupancy_is_the_derivative_of_the_likelihood(durations):
    # LL grows with label_lp by the occupancy of the label arcs, and the delay penalty is the one that changes label_lp alone.
    batch = make_batch(T=5, U=3, durations=durations, delay_penalty=0.1, dtype=torch.float64)
    step = 1e-5
    up, down = (batch.replace(options={"delay_penalty": 0.1 + way}).expected.losses for way in (step, -step))
    occ = batch.expected.label_occ if durations == () else batch.expected.label_occ.sum(-1)
    earliness = 2.0 - torch.arange(5, dtype=torch.float64)  # (T - 1) / 2 - t
    torch.testing.assert_close(
        (down - up) / (2 * step), (occ[0] * earliness[:, None]).sum()[None], rtol=1e-8, atol=1e-8
    )


def test_delay_penalty_counts_from_the_middle_of_each_sample():
    lengths = {"logit_lengths": [5, 2], "target_lengths": [2, 1]}
    batch = make_batch(B=2, T=5, U=2, dtype=torch.float64, **lengths)
    label_lp, penalized = (
        x.expected_node_lp[..., LABEL_LP] for x in (batch, batch.replace(options={"delay_penalty": 0.5}))
    )
    for b, (T, U, earliness) in enumerate([(5, 2, [2.0, 1.0, 0.0, -1.0, -2.0]), (2, 1, [0.5, -0.5])]):
        added = (penalized - label_lp)[b, :T, :U]
        torch.testing.assert_close(added, 0.5 * torch.tensor(earliness).double()[:, None].expand(T, U))


def test_omega_weighs_two_losses():
    batch = make_batch(B=2, T=5, U=3, sigma=0.1, target_lengths=[3, 1], dtype=torch.float64)
    tdt, rnnt = batch.expected, batch.without_durations().expected
    for omega in (0.0, 0.25, 1.0):
        mixed = batch.replace(options={"omega": omega}).expected
        torch.testing.assert_close(mixed.losses, (1 - omega) * tdt.losses + omega * rnnt.losses)
        torch.testing.assert_close(mixed.grad_tokens, (1 - omega) * tdt.grad_tokens + omega * rnnt.grad_tokens)
        torch.testing.assert_close(mixed.grad_durations, (1 - omega) * tdt.grad_durations)
        assert torch.equal(mixed.label_occ, tdt.label_occ)


def test_a_lattice_of_weight_0_does_not_count():
    batch = make_batch(T=3, U=3, durations=(1,), dtype=torch.float64)  # only RNN-T has an alignment
    for omega, feasible in [(0.0, False), (0.5, False), (1.0, True)]:
        expected = batch.replace(options={"omega": omega}).expected
        assert expected.losses.isfinite().item() == feasible
        assert (expected.grad_tokens != 0).any().item() == feasible


@pytest.mark.parametrize("durations, omega", [((0, 1, 2), 0.0), ((0, 1, 2), 0.3), ((), 0.0)])
def test_fastemit_adds_the_gradient_of_the_label_arcs_again(durations, omega):
    # What lambda adds is the derivative of -label_occ.log_softmax at fixed occupancies, here by autograd.
    options = {"omega": omega} if durations else {}
    batch = make_batch(T=4, U=2, V=5, durations=durations, dtype=torch.float64, **options)
    x, z = batch.leaves()
    token_lp, dur_lp = x.log_softmax(-1)[0], z.log_softmax(-1)[0]
    rnnt_occ = batch.without_durations().expected.label_occ[0]
    added = 0.0
    for u in range(2):
        label_lp = token_lp[:, u, batch.targets[0, u]]
        if not durations:
            added = added - (rnnt_occ[:, u] * label_lp).sum()
            continue
        occ = batch.expected.label_occ[0, :, u]
        added = added - (1 - omega) * (occ * (label_lp[:, None] + dur_lp[:, u])).sum()
        added = added - omega * (rnnt_occ[:, u] * label_lp).sum()
    added.backward()
    with_lambda = batch.replace(options={**options, "fastemit_lambda": 0.7}).expected
    torch.testing.assert_close(with_lambda.losses, batch.expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(with_lambda.grad_tokens, batch.expected.grad_tokens + 0.7 * x.grad)
    if durations:
        torch.testing.assert_close(with_lambda.grad_durations, batch.expected.grad_durations + 0.7 * z.grad)


def test_clamp_comes_after_omega_and_fastemit():
    options = {"omega": 0.4, "fastemit_lambda": 0.5}
    batch = make_batch(B=2, T=4, U=2, dtype=torch.float64, **options)
    for clamp in (0.1, -0.1):
        clamped = batch.replace(options={**options, "clamp": clamp}).expected
        for name in ("grad_tokens", "grad_durations"):
            plain = getattr(batch.expected, name)
            expected = plain.clamp(-clamp, clamp) if clamp > 0 else plain
            assert torch.equal(getattr(clamped, name), expected) and (plain.abs() > 0.1).any()


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


@pytest.mark.parametrize(
    "T, U, V, sigma", [(1, 0, 3, 0.0), (5, 0, 4, 0.1), (1, 6, 3, 0.0), (5, 3, 7, 0.05), (4, 9, 5, 0.0)]
)
def test_closed_form_of_rnnt(T, U, V, sigma):
    batch = make_batch(T=T, U=U, V=V, durations=(), sigma=sigma, scale=0.0, dtype=torch.float64)
    assert batch.expected.losses.item() == pytest.approx(loss_of_rnnt(T, U, V, sigma), rel=1e-13)


def test_exact_gradient_of_rnnt():
    # T, U = 2, 1 and equal logits: two alignments, label first or blank first, each of probability 1/2.
    batch = make_batch(T=2, U=1, V=4, durations=(), scale=0.0, dtype=torch.float64)
    batch = batch.replace(targets=torch.ones_like(batch.targets))
    expected = torch.tensor(RNNT_GRADIENT, dtype=torch.float64)
    torch.testing.assert_close(batch.expected.grad_tokens[0], expected, rtol=0, atol=1e-14)


def test_agrees_with_torchaudio():
    rnnt_loss = transformers_rnnt_loss()
    batch = make_batch(B=3, T=7, U=4, V=6, durations=(), logit_lengths=[7, 5, 1], target_lengths=[4, 2, 3])
    logits, _ = batch.leaves()
    losses = rnnt_loss(logits, *batch.rnnt_args[1:], reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(losses.double(), batch.expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=2e-6)


def test_agrees_with_autograd_of_transformers():
    transformers_loss = pytest.importorskip("transformers.loss.loss_tdt").tdt_loss
    batch = make_batch(B=3, T=7, U=4, V=6, logit_lengths=[7, 5, 6], target_lengths=[4, 2, 3], sigma=0.05)
    token_logits, duration_logits = batch.leaves()
    losses = transformers_loss(token_logits, duration_logits, *batch.rest, reduction="none")
    losses.sum().backward()
    torch.testing.assert_close(losses.double(), batch.expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(token_logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=2e-6)
    torch.testing.assert_close(duration_logits.grad.double(), batch.expected.grad_durations, rtol=0, atol=2e-6)
