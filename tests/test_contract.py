"""What a sample may do to itself and never to its neighbours: bad lengths and labels, NaN, padding, determinism."""

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads, through_the_ops
from support.comparisons import same_bits


def assert_sample_keeps_its_bits(outcome, reference, samples):
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name)[samples], getattr(reference, name)[samples]), name


REDUCTIONS = ("none", "sum", "mean_batch", "mean", "mean_volume")  # as the ops count them
BAD_VALUES = [
    ("logit_lengths", -1),
    ("logit_lengths", 7),
    ("logit_lengths", 2**31 - 1),
    ("logit_lengths", -(2**62)),
    ("target_lengths", -1),
    ("target_lengths", 4),
    ("target_lengths", 2**33),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name, value", BAD_VALUES)
def test_length_outside_the_tensor(kernel, device, api, name, value):
    batch = make_batch(B=3, T=6, U=3, logit_lengths=[6, 5, 4], device=device)
    good = through_the_ops(kernel, batch, api)
    getattr(batch, name)[1] = value
    outcome = through_the_ops(kernel, batch, api)
    assert outcome.losses[1].isnan()
    assert (outcome.grad_tokens[1] == 0).all() and (outcome.grad_durations[1] == 0).all()
    assert_sample_keeps_its_bits(outcome, good, [0, 2])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("label", [-1, 7, 2**31 - 1, -(2**31), 2**40])
def test_label_outside_the_vocabulary(kernel, device, api, label):
    batch = make_batch(B=3, T=6, U=3, device=device)
    good = through_the_ops(kernel, batch, api)
    batch.targets[1, 2] = label
    outcome = through_the_ops(kernel, batch, api)
    assert outcome.losses[1].isnan()
    assert (outcome.grad_tokens[1] == 0).all() and (outcome.grad_durations[1] == 0).all()
    assert_sample_keeps_its_bits(outcome, good, [0, 2])


@pytest.mark.parametrize("name, value", [*BAD_VALUES, ("targets", -1)])
def test_the_target_length_of_a_malformed_sample_does_not_count(kernel, device, api, name, value):
    """Where the reduction divides by the sum of them: the gradients of the others are those of the batch without it."""
    batch = make_batch(B=3, T=6, U=3, logit_lengths=[6, 5, 4], target_lengths=[3, 2, 1], device=device)
    mean_volume = REDUCTIONS.index("mean_volume")
    *_, good_weights = kernel.loss.ops.loss(*batch.loss_op_args(api, reduction=mean_volume))
    assert good_weights.tolist() == pytest.approx([1 / 6] * 3)
    getattr(batch, name)[1] = value
    loss, *_, weights = kernel.loss.ops.loss(*batch.loss_op_args(api, reduction=mean_volume))
    assert loss.isnan() and weights[[0, 2]].tolist() == pytest.approx([1 / 4] * 2)


def test_bad_label_of_a_sample_that_has_no_alignment(kernel, device):
    batch = make_batch(B=2, T=3, U=3, durations=(1,), device=device)
    batch.targets[1, 0] = -5
    outcome = through_the_ops(kernel, batch)
    assert outcome.losses[0] == torch.inf and outcome.losses[1].isnan()
    assert (outcome.grad_tokens == 0).all()


def test_malformed_samples_stay_nan_with_zero_infinity(kernel, device):
    batch = make_batch(B=3, T=3, U=3, durations=(1,), device=device)
    batch.logit_lengths[1] = 9
    batch.token_logits[2, 0, 0, 1] = torch.nan
    losses = through_the_ops(kernel, batch, zero_infinity=True).losses
    assert losses[0] == 0 and losses[1:].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["token_logits", "duration_logits"])
def test_nan_or_infinity_at_a_valid_node(kernel, device, api, which, bad):
    lengths = {"logit_lengths": [6, 4, 5], "target_lengths": [3, 2, 1]}
    batch = make_batch(B=3, T=6, U=3, device=device, **lengths)
    good = loss_and_grads(kernel, batch, api)
    getattr(batch, which)[1, 2, 1, 2] = bad
    batch = batch.replace()
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses[1].isnan()
    for grad in (outcome.grad_tokens, outcome.grad_durations):
        assert grad[1][batch.valid[1]].isnan().all() and (grad[1][~batch.valid[1]] == 0).all()
    assert_sample_keeps_its_bits(outcome, good, [0, 2])


@pytest.mark.parametrize("durations, T, U", [((0, 1, 2), 4, 2), ((1, 2), 4, 2), ((0, 4), 8, 1), ((1,), 3, 3)])
@pytest.mark.parametrize("which", ["token_logits", "duration_logits"])
def test_nan_at_any_valid_node_reachable_or_not(kernel, device, which, durations, T, U):
    # One sample per node: sample b has its NaN at node b.
    batch = make_batch(B=T * (U + 1), T=T, U=U, durations=durations, device=device)
    for b in range(T * (U + 1)):
        getattr(batch, which)[b, b // (U + 1), b % (U + 1), 0] = torch.nan
    outcome = loss_and_grads(kernel, batch)
    assert outcome.losses.isnan().all() and outcome.grad_tokens.isnan().all() and outcome.grad_durations.isnan().all()
    assert kernel.tdt_loss(*batch.args, reduction="none").isnan().all()  # without gradient


@pytest.mark.parametrize("which", ["token_logits", "duration_logits"])
def test_a_node_masked_entirely_is_nan(kernel, device, which):
    batch = make_batch(B=2, T=4, U=2, device=device)
    good = loss_and_grads(kernel, batch)
    getattr(batch, which)[1, 1, 1] = -torch.inf
    outcome = loss_and_grads(kernel, batch.replace())
    assert outcome.losses[1].isnan()
    assert_sample_keeps_its_bits(outcome, good, [0])


def test_a_mean_over_a_nan_is_nan(kernel, device):
    batch = make_batch(B=2, device=device)
    batch.token_logits[0, 0, 0, 0] = torch.nan
    assert kernel.tdt_loss(*batch.args).isnan()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_is_never_read(kernel, device, api, garbage):
    lengths = {"logit_lengths": [6, 3, 0], "target_lengths": [1, 3, 2]}
    batch = make_batch(B=3, T=6, U=3, device=device, **lengths)
    clean = loss_and_grads(kernel, batch, api)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = garbage
    outcome = loss_and_grads(kernel, batch.replace(), api)
    assert_sample_keeps_its_bits(outcome, clean, [0, 1, 2])
    assert (outcome.grad_tokens[~batch.valid] == 0).all() and (outcome.grad_durations[~batch.valid] == 0).all()


@pytest.mark.parametrize("garbage", [-100, -1, 7, 14, 2**31 - 1, 2**40])
def test_labels_beyond_the_target_length_are_never_read(kernel, device, garbage):
    batch = make_batch(B=2, T=6, U=3, target_lengths=[1, 2], device=device)
    clean = loss_and_grads(kernel, batch)
    batch.targets[0, 1:] = garbage
    batch.targets[1, 2:] = garbage
    wider = torch.cat([batch.targets, torch.full((2, 5), garbage, device=device)], dim=1)
    for targets in (batch.targets, wider):
        assert_sample_keeps_its_bits(loss_and_grads(kernel, batch.replace(targets=targets)), clean, [0, 1])


def test_no_alignment_has_an_exactly_zero_gradient(kernel, device, api):
    lengths = {"logit_lengths": [3, 6], "target_lengths": [3, 3]}
    batch = make_batch(B=2, T=6, U=3, durations=(1,), device=device, **lengths)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses[0] == torch.inf and outcome.losses[1].isfinite()
    assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()
    assert (outcome.grad_tokens[1] != 0).any()


def test_an_infinite_upstream_gradient_leaves_an_infeasible_sample_at_zero(kernel, device):
    lengths = {"logit_lengths": [3, 6], "target_lengths": [3, 3]}
    batch = make_batch(B=2, T=6, U=3, durations=(1,), device=device, **lengths)
    outcome = loss_and_grads(kernel, batch, upstream=torch.tensor([torch.inf, 1.0], device=device))
    assert (outcome.grad_tokens[0] == 0).all()


@pytest.mark.kernels_ci
def test_same_call_same_bits(kernel, device, api):
    batch = make_batch(B=4, T=40, U=20, V=65, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device=device)
    first = loss_and_grads(kernel, batch, api)
    for _ in range(3):
        assert_sample_keeps_its_bits(loss_and_grads(kernel, batch, api), first, slice(None))


@pytest.mark.parametrize("omega", [0.0, 0.5])
def test_number_of_cpu_threads_does_not_matter(kernel, omega):
    batch = make_batch(B=4, T=40, U=20, V=65, durations=(0, 1, 2, 3, 4), omega=omega)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = loss_and_grads(kernel, batch)
        torch.set_num_threads(4)
        assert_sample_keeps_its_bits(loss_and_grads(kernel, batch), alone, slice(None))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, {"omega": 0.5, "clamp": 0.1, "delay_penalty": 0.2}, {"durations": ()}])
def test_values_of_other_samples_do_not_matter(kernel, device, api, options):
    lengths = {"logit_lengths": [20, 33, 40], "target_lengths": [20, 11, 5]}
    batch = make_batch(B=3, T=40, U=20, V=65, device=device, **lengths, **options)
    other = make_batch(B=3, T=40, U=20, V=65, device=device, seed=1, scale=50.0, **lengths, **options)
    for name in ("token_logits", "duration_logits", "targets"):
        getattr(other, name)[1] = getattr(batch, name)[1]
    other = other.replace(logit_lengths=torch.tensor([40, 33, 1]), target_lengths=torch.tensor([0, 11, 20]))
    assert_sample_keeps_its_bits(loss_and_grads(kernel, other, api), loss_and_grads(kernel, batch, api), [1])
