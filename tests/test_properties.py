"""Invariants of the loss, over drawn batches."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import assert_close, assert_grads_match, assert_losses_match, assert_matches, same_bits
from support.tolerances import TOLERANCE, grad_limit, loss_limit


@st.composite
def batches(draw, dtypes=(torch.float32,), min_samples=1, options=False):
    """Arguments of make_batch: small ragged batches with any durations, feasible or not; with options, RNN-T too."""
    B = draw(st.integers(min_samples, 3))
    T, U, V = draw(st.integers(1, 12)), draw(st.integers(0, 8)), draw(st.integers(2, 20))
    durations = draw(st.lists(st.integers(0, 6), min_size=0 if options else 1, max_size=6))
    assume(any(durations) or not durations)
    values = {"fastemit_lambda": [0.0, 0.01, 1.0], "clamp": [0.0, 0.01, 0.3], "delay_penalty": [0.0, 0.01, -1.0]}
    if durations:
        values["omega"] = [0.0, 0.3, 1.0]
    return {
        **({name: draw(st.sampled_from(some)) for name, some in values.items()} if options else {}),
        "B": B,
        "T": T,
        "U": U,
        "V": V,
        "durations": durations,
        "logit_lengths": draw(st.lists(st.integers(0, T), min_size=B, max_size=B)),
        "target_lengths": draw(st.lists(st.integers(0, U), min_size=B, max_size=B)),
        "blank": draw(st.integers(-V, V - 1)),
        "sigma": draw(st.sampled_from([0.0, 0.05])),
        "scale": draw(st.sampled_from([0.0, 1.0, 10.0])),
        "dtype": draw(st.sampled_from(dtypes)),
        "seed": draw(st.integers(0, 2**16)),
    }


@given(arguments=batches(dtypes=tuple(TOLERANCE)), api=st.sampled_from(["separate", "joint"]))
def test_loss_and_gradients_equal_the_oracle(kernel, device, arguments, api):
    batch = make_batch(device=device, **arguments)
    outcome = loss_and_grads(kernel, batch, api)
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch)


@given(arguments=batches(dtypes=tuple(TOLERANCE), options=True), api=st.sampled_from(["separate", "joint"]))
@settings(max_examples=60)
def test_options_and_rnnt_equal_the_oracle(kernel, device, arguments, api):
    batch = make_batch(device=device, **arguments)
    outcome = loss_and_grads(kernel, batch, api)
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch)


@pytest.mark.kernels_ci
@given(arguments=batches())
def test_gradients_sum_to_zero_at_every_node(kernel, device, arguments):
    batch = make_batch(device=device, **arguments)
    outcome = loss_and_grads(kernel, batch)
    # Whatever the occupancies, and however wrong: their sum times (a softmax that sums to 1, minus 1).
    assert outcome.grad_tokens.double().sum(-1).abs().max() <= 1e-6
    assert outcome.grad_durations.double().sum(-1).abs().max() <= 1e-6


SHIFTS = [1.0, 1e3, 1e6, 1e12]


@given(arguments=batches(dtypes=(torch.float64,)), seed=st.integers(0, 99), size=st.sampled_from(SHIFTS))
def test_a_constant_added_to_a_node_changes_nothing(kernel, device, arguments, seed, size):
    batch = make_batch(device=device, **arguments)
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(*batch.token_logits.shape[:3], 2, generator=generator, dtype=torch.float64).to(device) * size
    shifted = batch.replace(
        token_logits=batch.token_logits + shift[..., :1], duration_logits=batch.duration_logits + shift[..., 1:]
    )
    first, second = loss_and_grads(kernel, batch), loss_and_grads(kernel, shifted)
    assert_matches(second, shifted)  # to the last places, of what the addition has left of the logits
    for name in ("losses", "grad_tokens", "grad_durations"):
        torch.testing.assert_close(getattr(second, name), getattr(first, name), rtol=1e-12 * size, atol=1e-14 * size)


@given(arguments=batches(dtypes=tuple(TOLERANCE)), seed=st.integers(0, 99), share=st.sampled_from([0.01, 0.5]))
def test_constants_as_large_as_the_dtype_holds(kernel, device, arguments, seed, share):
    """The constant rounds the logits; the loss is that of the rounded ones, as exactly as without."""
    batch = make_batch(device=device, **arguments)
    generator = torch.Generator().manual_seed(seed)
    shift = torch.rand(*batch.token_logits.shape[:3], 2, generator=generator, dtype=torch.float64).to(device) * 2 - 1
    shift *= share * torch.finfo(batch.token_logits.dtype).max
    tokens, durations = batch.token_logits + shift[..., :1], batch.duration_logits + shift[..., 1:]
    dtype = batch.token_logits.dtype
    shifted = batch.replace(token_logits=tokens.to(dtype), duration_logits=durations.to(dtype))
    assert_matches(loss_and_grads(kernel, shifted), shifted)


@given(arguments=batches(), data=st.data())
def test_permuting_durations_permutes_the_gradient(kernel, device, arguments, data):
    batch = make_batch(device=device, **arguments)
    order = data.draw(st.permutations(range(len(batch.durations))))
    permuted = batch.replace(
        duration_logits=batch.duration_logits[..., order].contiguous(),
        durations=tuple(batch.durations[i] for i in order),
    )
    first, second = loss_and_grads(kernel, batch), loss_and_grads(kernel, permuted)
    limit = grad_limit(batch).view(-1, 1, 1, 1)
    assert_close("loss", second.losses, first.losses, loss_limit(batch))
    assert_close("tokens", second.grad_tokens, first.grad_tokens, limit)
    assert_close("durations", second.grad_durations, first.grad_durations[..., order], limit)


@given(arguments=batches(min_samples=2))
def test_a_sample_in_a_batch_equals_itself_alone(kernel, device, arguments):
    batch = make_batch(device=device, **arguments)
    together = loss_and_grads(kernel, batch)
    for b, (T, U) in enumerate(zip(arguments["logit_lengths"], arguments["target_lengths"])):
        alone = batch.replace(
            token_logits=batch.token_logits[b : b + 1, :T, : U + 1].contiguous(),
            duration_logits=batch.duration_logits[b : b + 1, :T, : U + 1].contiguous(),
            targets=batch.targets[b : b + 1, :U],
            logit_lengths=batch.logit_lengths[b : b + 1],
            target_lengths=batch.target_lengths[b : b + 1],
        )
        cropped = loss_and_grads(kernel, alone)
        assert_close("loss", together.losses[b : b + 1], cropped.losses, loss_limit(alone))
        own, limit = (slice(b, b + 1), slice(T), slice(U + 1)), grad_limit(alone)
        assert_close("tokens", together.grad_tokens[own], cropped.grad_tokens, limit)
        assert_close("durations", together.grad_durations[own], cropped.grad_durations, limit)


@given(arguments=batches(dtypes=(torch.float32, torch.float16)), scale=st.sampled_from([0.5, 2.0, -4.0]))
def test_a_power_of_two_upstream_scales_the_gradient_exactly(kernel, device, arguments, scale):
    batch = make_batch(device=device, **arguments)
    plain = loss_and_grads(kernel, batch)
    scaled = loss_and_grads(kernel, batch, upstream=torch.full((len(batch.targets),), scale, device=device))
    exact = plain.grad_tokens.abs() >= 4 * torch.finfo(batch.token_logits.dtype).tiny  # no subnormal on either side
    assert same_bits(scaled.grad_tokens[exact], plain.grad_tokens[exact] * scale)


@given(arguments=batches())
def test_a_smaller_sigma_makes_the_loss_smaller_by_the_number_of_tokens(kernel, device, arguments):
    # Every alignment emits at least U + 1 tokens, and at most T + U: U labels, and blanks of at least one frame each.
    batch = make_batch(device=device, **arguments)
    low, high = (loss_and_grads(kernel, batch.replace(sigma=sigma)).losses.double() for sigma in (0.0, 0.1))
    feasible = low.isfinite()
    growth = (high - low)[feasible]
    T, U = batch.logit_lengths.double()[feasible], batch.target_lengths.double()[feasible]
    assert (growth >= 0.1 * (U + 1) - 1e-4 - 1e-6 * high[feasible]).all()
    assert (growth <= 0.1 * (T + U) + 1e-4 + 1e-6 * high[feasible]).all()
