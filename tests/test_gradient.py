"""The ops `gradient` and `gradient_` (eqs. 7-9), fed with the oracle's alpha, beta and LL."""

import pytest
import torch
from support.batches import make_batch
from support.calls import Outcome
from support.comparisons import assert_grads_match, same_bits
from support.tolerances import DTYPES


def saved_tensors(batch):
    """(node_lp, row_max, ll, alpha_beta) as forward would save them; what the second and the last hold in the padding is nobody's business."""
    scalar = torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32
    padding = ~batch.valid.expand_as(batch.expected.alpha_beta)
    alpha_beta = batch.expected.alpha_beta.masked_fill(padding, torch.nan)
    return batch.expected_node_lp.to(scalar), batch.expected_row_max.to(scalar), batch.expected.ll, alpha_beta


def run(kernel, batch, grad_loss=None, api="separate", saved=None, weights=None):
    saved = saved or saved_tensors(batch)
    V, number = batch.token_logits.shape[-1], {"dtype": saved[0].dtype, "device": saved[0].device}
    grad_loss = torch.ones(len(batch.targets), **number) if grad_loss is None else grad_loss
    weights = torch.empty(0, **number) if weights is None else weights
    grad, grad_durations = kernel.loss.ops.gradient(*batch.gradient_op_args(api, grad_loss, weights, *saved))
    if grad.shape[-1] > V or not batch.durations:
        grad, grad_durations = grad[..., :V], grad[..., V:]
    return Outcome(-saved[2], grad, grad_durations)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_8_and_9(kernel, device, api, dtype):
    lengths = {"logit_lengths": [9, 6, 4], "target_lengths": [4, 2, 0]}
    batch = make_batch(
        B=3, T=9, U=4, V=37, durations=(0, 1, 2, 3, 4), sigma=0.05, dtype=dtype, device=device, **lengths
    )
    assert_grads_match(run(kernel, batch, api=api), batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_equation_8_of_rnnt(kernel, device, dtype):
    lengths = {"logit_lengths": [9, 6, 4], "target_lengths": [4, 2, 0]}
    batch = make_batch(B=3, T=9, U=4, V=37, durations=(), sigma=0.05, dtype=dtype, device=device, **lengths)
    assert_grads_match(run(kernel, batch), batch)


OPTIONS = {
    "omega": {"omega": 0.3},
    "omega 1": {"omega": 1.0},
    "fastemit": {"fastemit_lambda": 0.5},
    "clamp": {"clamp": 0.05},
    "delay penalty": {"delay_penalty": 0.2},
    "all": {"omega": 0.3, "fastemit_lambda": 0.5, "clamp": 0.1, "delay_penalty": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_options(kernel, device, api, options, dtype):
    lengths = {"logit_lengths": [9, 6, 4], "target_lengths": [4, 2, 0]}
    batch = make_batch(B=3, T=9, U=4, V=37, durations=(0, 1, 2), sigma=0.05, dtype=dtype, device=device, **lengths)
    batch = batch.replace(options=options)
    assert_grads_match(run(kernel, batch, api=api), batch)


@pytest.mark.parametrize("V", [1, 2, 31, 1025, 8193])
@pytest.mark.parametrize("durations", [(2, 0, 1), ()])
def test_every_vocabulary_size(kernel, device, api, durations, V):
    batch = make_batch(B=2, T=4, U=2, V=V, durations=durations, blank=V - 1, dtype=torch.bfloat16, device=device)
    assert_grads_match(run(kernel, batch, api=api), batch)


def test_upstream_gradient_and_weights_are_multiplied(kernel, device, api):
    batch = make_batch(B=3, T=5, U=2, V=9, clamp=0.1, device=device)
    weights, upstream = torch.tensor([0.5, -2.0, 3.0], device=device), torch.tensor([1.0, 0.25, 4.0], device=device)
    assert_grads_match(run(kernel, batch, upstream, api, weights=weights), batch, upstream * weights)
    for scalar in (torch.tensor(-3.0, device=device), upstream[2]):
        assert_grads_match(run(kernel, batch, scalar, api, weights=weights), batch, scalar * weights)


@pytest.mark.parametrize("durations", [(1,), (2, 4), (0, 1, 1), (0, 1, 9, 17, 2**40), tuple(range(64))])
def test_every_kind_of_durations(kernel, device, api, durations):
    batch = make_batch(B=2, T=20, U=3, V=6, durations=durations, device=device)
    assert_grads_match(run(kernel, batch, api=api), batch)


def test_label_equal_to_blank_gets_both_terms(kernel, device, api):
    batch = make_batch(T=6, U=3, V=5, blank=2, dtype=torch.float64, device=device)
    batch.targets[0, 1] = 2
    assert_grads_match(run(kernel, batch, api=api), batch)


def test_upstream_multiplies_before_rounding(kernel, device):
    # Most entries are below the smallest float16; only in float32 do they survive to be scaled.
    batch = make_batch(B=2, T=4, U=2, V=513, scale=4.0, dtype=torch.float16, device=device)
    weights = torch.tensor([4096.0, -0.25], device=device)
    lost = batch.expected.grad_tokens[0].half() == 0
    outcome = run(kernel, batch, weights)
    assert (outcome.grad_tokens[0][lost] != 0).sum() > 100
    assert_grads_match(outcome, batch, weights)


def test_masked_entries_get_exactly_zero(kernel, device, api):
    batch = make_batch(T=6, U=3, V=9, device=device)
    batch.targets.fill_(3)
    batch.token_logits[..., 6:] = -torch.inf
    batch.duration_logits[:, 1:3, :, 0] = -torch.inf
    outcome = run(kernel, batch, api=api)
    assert_grads_match(outcome, batch)
    assert (outcome.grad_tokens[..., 6:] == 0).all() and (outcome.grad_durations[:, 1:3, :, 0] == 0).all()


@pytest.mark.parametrize("ll", [-torch.inf, torch.inf])
def test_no_alignment_and_malformed_samples_get_exactly_zero(kernel, device, api, ll):
    batch = make_batch(B=2, T=5, U=2, device=device)
    for options in ({}, {"omega": 0.5}):
        batch = batch.replace(options=options)
        node_lp, row_max, good_ll, alpha_beta = saved_tensors(batch)
        bad_ll = good_ll.clone()
        bad_ll[-1, 0] = ll
        good = run(kernel, batch, api=api)
        outcome = run(kernel, batch, api=api, saved=(node_lp, row_max, bad_ll, alpha_beta))
        assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()
        assert same_bits(outcome.grad_tokens[1], good.grad_tokens[1])


def test_nan_likelihood_makes_valid_nodes_nan(kernel, device, api):
    batch = make_batch(B=2, T=5, U=2, logit_lengths=[5, 3], device=device)
    node_lp, row_max, ll, alpha_beta = saved_tensors(batch)
    ll[:, 1] = torch.nan
    outcome = run(kernel, batch, api=api, saved=(node_lp, row_max, ll, alpha_beta))
    for grad in (outcome.grad_tokens, outcome.grad_durations):
        assert grad[1, :3].isnan().all() and (grad[1, 3:] == 0).all() and not grad[0].isnan().any()


def test_padding_is_not_read(kernel, device, api):
    batch = make_batch(B=2, T=5, U=3, logit_lengths=[5, 2], target_lengths=[1, 3], device=device)
    saved = saved_tensors(batch)
    clean = run(kernel, batch, api=api, saved=saved)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = torch.nan
    outcome = run(kernel, batch.replace(), api=api, saved=saved)
    assert same_bits(outcome.grad_tokens, clean.grad_tokens) and same_bits(outcome.grad_durations, clean.grad_durations)


@pytest.mark.parametrize("V", [3, 37, 1025, 8193])
def test_padding_becomes_zero(kernel, device, V):
    # Of every shape: beside the frames, behind them, a whole sample; of more samples than a warp has lanes.
    B, T, U = 35, 6, 4
    lengths = {
        "logit_lengths": [1 + b * 5 % T for b in range(B)],
        "target_lengths": [b * 3 % (U + 1) for b in range(B)],
    }
    batch = make_batch(B=B, T=T, U=U, V=V, durations=(0, 1, 2), dtype=torch.bfloat16, device=device, **lengths)
    saved = saved_tensors(batch)
    batch.logit_lengths[[4, 33]] = torch.tensor([0, T + 1], device=device)  # without a frame, and malformed
    expected = run(kernel, batch, api="joint", saved=saved)
    expected = torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1)
    valid = batch.valid.clone()
    valid[[4, 33]] = False
    assert expected[valid].any() and (expected[~valid] == 0).all()
    logits = batch.joint.masked_fill(~valid[..., None], torch.nan)
    weights = torch.ones(B, device=device)
    grad_loss, no_weights, _, _, *rest = batch.gradient_op_args("joint", weights, weights[:0], *saved)
    kernel.loss.ops.gradient_(grad_loss, no_weights, logits, *rest)
    assert same_bits(logits, expected)


def test_gradient_has_the_strides_of_the_logits(kernel, device):
    batch = make_batch(B=3, T=4, U=2, V=11, device=device)
    permuted = batch.replace(token_logits=batch.token_logits.transpose(0, 1).contiguous().transpose(0, 1))
    outcome = run(kernel, permuted)
    assert outcome.grad_tokens.stride() == permuted.token_logits.stride()
    assert_grads_match(outcome, batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_in_place_has_the_same_bits(kernel, device, dtype):
    batch = make_batch(B=2, T=6, U=3, V=37, logit_lengths=[6, 4], sigma=0.05, dtype=dtype, device=device)
    saved = saved_tensors(batch)
    weights = torch.tensor([2.0, -1.5], dtype=saved[0].dtype, device=device)
    expected = run(kernel, batch, weights, api="joint")
    grad_loss, no_weights, _, _, *rest = batch.gradient_op_args("joint", weights, weights[:0], *saved)
    logits = batch.joint.clone()
    returned = kernel.loss.ops.gradient_(grad_loss, no_weights, logits, *rest)
    assert returned is None
    assert same_bits(logits, torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1))


def test_row_max_of_other_logits_are_refused(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, device=device)
    node_lp, row_max, ll, alpha_beta = saved_tensors(batch)
    for wrong in (row_max[:1], row_max[..., :0], row_max.double(), row_max.transpose(0, 1), node_lp):
        with pytest.raises(RuntimeError, match="row_max does not belong to these logits"):
            run(kernel, batch, api=api, saved=(node_lp, wrong, ll, alpha_beta))
