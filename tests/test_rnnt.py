"""`rnnt_loss`: values and gradients, shapes, layouts, reductions, and the contract."""

import pytest
import torch
from support.calls import loss_and_grads, reduced, through_the_ops
from support.comparisons import assert_grads_match, assert_matches, assert_same_bits, same_bits
from support.known_values import RNNT_GRADIENT, loss_of_rnnt
from support.memory import peak_extra_bytes
from support.rnnt import RAGGED, rnnt_batch
from support.tolerances import DTYPES, TOLERANCE


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients(kernel, device, dtype):
    batch = rnnt_batch(V=33, sigma=0.05, dtype=dtype, device=device, **RAGGED)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "T, U, V, sigma", [(1, 0, 3, 0.0), (5, 0, 4, 0.1), (1, 6, 3, 0.0), (5, 3, 7, 0.05), (4, 9, 5, 0.0)]
)
def test_exact_values(kernel, device, T, U, V, sigma):
    losses = loss_and_grads(kernel, rnnt_batch(T=T, U=U, V=V, sigma=sigma, scale=0.0, device=device)).losses
    assert losses.item() == pytest.approx(loss_of_rnnt(T, U, V, sigma), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_gradient(kernel, device, dtype):
    batch = rnnt_batch(T=2, U=1, V=4, scale=0.0, dtype=dtype, device=device)
    outcome = loss_and_grads(kernel, batch.replace(targets=torch.ones_like(batch.targets)))
    expected = torch.tensor(RNNT_GRADIENT, dtype=torch.float64)
    torch.testing.assert_close(outcome.grad_tokens[0].double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype].grad)


SHAPES = {
    "one node": (1, 0),
    "no labels": (40, 0),
    "one frame": (1, 40),
    "a strip and a column": (9, 33),
    "two strips": (40, 64),
    "as many labels as frames": (70, 70),
    "ten strips": (6, 300),
    "many strips": (3, 1100),
    "many strips, one frame": (1, 1100),
    "long": (300, 3),
}


@pytest.mark.parametrize("T, U", SHAPES.values(), ids=SHAPES.keys())
def test_every_kind_of_shape(kernel, device, T, U):
    lengths = {"logit_lengths": [T, max(T - 2, 1)], "target_lengths": [U, max(U - 1, 0)]}
    batch = rnnt_batch(B=2, T=T, U=U, V=5, device=device, **lengths)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.parametrize("V", [1, 2, 31, 1025, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_vocabulary_size(kernel, device, V, dtype):
    batch = rnnt_batch(B=2, T=4, U=2, V=V, blank=V - 1, dtype=dtype, device=device)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.parametrize("blank", [0, 3, 6, -1, -7])
def test_blank_anywhere_and_counted_from_the_end(kernel, device, blank):
    batch = rnnt_batch(B=2, T=6, U=3, V=7, blank=blank, device=device)
    assert_matches(loss_and_grads(kernel, batch), batch)


def test_label_equal_to_blank_adds_both_terms(kernel, device):
    batch = rnnt_batch(B=2, T=6, U=3, V=5, blank=2, device=device)
    batch.targets[0, 1] = 2
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_huge_logits(kernel, device, scale):
    batch = rnnt_batch(B=2, T=20, U=35, V=6, scale=scale, device=device)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.parametrize("options", [{"fastemit_lambda": 0.5}, {"clamp": 0.05}, {"delay_penalty": 0.3}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_options(kernel, device, options, dtype):
    batch = rnnt_batch(V=33, sigma=0.05, dtype=dtype, device=device, **RAGGED, **options)
    plain = batch.replace(options={})
    assert not torch.allclose(batch.expected.grad_tokens, plain.expected.grad_tokens, atol=1e-3)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.parametrize(
    "name, value", [("fastemit_lambda", 1e-30), ("delay_penalty", 1e-30), ("clamp", 1e30), ("clamp", -0.01)]
)
def test_options_too_weak_to_matter_change_no_bit(kernel, device, name, value):
    batch = rnnt_batch(V=33, device=device, **RAGGED)
    assert_same_bits(loss_and_grads(kernel, batch, **{name: value}), loss_and_grads(kernel, batch))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int16, torch.uint8])
def test_integer_dtypes_of_targets_and_lengths(kernel, device, index_dtype):
    batch = rnnt_batch(index_dtype=index_dtype, device=device, **RAGGED)
    assert_matches(loss_and_grads(kernel, batch), batch)


# Reductions


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "mean_batch", "mean_volume"])
def test_reductions(kernel, device, reduction):
    batch = rnnt_batch(sigma=0.05, device=device, **RAGGED)
    per_sample = batch.expected.losses.clone().requires_grad_()
    expected = reduced(reduction, per_sample, batch.target_lengths)
    (weights,) = torch.autograd.grad(expected.sum(), per_sample)
    outcome = loss_and_grads(kernel, batch, reduction=reduction)
    assert outcome.losses.shape == expected.shape and outcome.losses.dtype == torch.float32
    torch.testing.assert_close(outcome.losses.double(), expected.detach(), rtol=1e-6, atol=0)
    assert_grads_match(outcome, batch, weights)


def test_mean_volume_is_the_default(kernel, device):
    batch = rnnt_batch(device=device, **RAGGED)
    expected = kernel.rnnt_loss(*batch.rnnt_args, "mean_volume")
    assert same_bits(kernel.rnnt_loss(*batch.rnnt_args), expected)
    assert same_bits(kernel.layers.RNNTLoss()(*batch.rnnt_args), expected)
    assert not same_bits(kernel.rnnt_loss(*batch.rnnt_args, "mean"), expected)


def test_a_batch_of_silence_has_a_finite_mean(kernel, device):
    batch = rnnt_batch(T=4, U=0, device=device)
    for reduction in ("mean", "mean_volume"):
        loss = kernel.rnnt_loss(*batch.rnnt_args, reduction)
        assert loss.item() == pytest.approx(batch.expected.losses[0].item(), rel=1e-6)


def test_empty_batch(kernel, device):
    batch = rnnt_batch(B=0, T=4, U=2, device=device)
    outcome = loss_and_grads(kernel, batch)
    assert outcome.losses.shape == (0,) and outcome.grad_tokens.shape == (0, 4, 3, 7)
    assert loss_and_grads(kernel, batch, reduction="sum").losses.item() == 0


# Layouts


def spread(logits):
    """Every second frame of a tensor that holds NaN between them."""
    B, T, U1, V = logits.shape
    return torch.full((B, 2 * T, U1, V), torch.nan, dtype=logits.dtype, device=logits.device)[:, ::2].copy_(logits)


LAYOUTS = {
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "labels first": lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "every second frame": spread,
    "last dimension not contiguous": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(kernel, device, change, dtype):
    batch = rnnt_batch(V=13, dtype=dtype, device=device, **RAGGED)
    changed = batch.replace(token_logits=change(batch.token_logits))
    assert changed.token_logits.stride() != batch.token_logits.stride()
    assert_matches(loss_and_grads(kernel, changed), batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_offset(kernel, device, dtype):
    batch = rnnt_batch(B=2, T=3, U=2, V=41, dtype=dtype, device=device)
    size = batch.token_logits.numel()
    for offset in range(9):
        storage = torch.full((offset + size + 8,), torch.nan, dtype=dtype, device=device)
        logits = storage[offset : offset + size].view_as(batch.token_logits).copy_(batch.token_logits)
        assert_matches(loss_and_grads(kernel, batch.replace(token_logits=logits)), batch)


def test_no_hidden_copy_of_strided_logits(kernel, device):
    batch = rnnt_batch(B=2, T=24, U=7, V=2048, device=device)
    for change in (LAYOUTS["time first"], spread):
        changed = batch.replace(token_logits=change(batch.token_logits))
        extra = peak_extra_bytes(lambda changed=changed: kernel.rnnt_loss(*changed.rnnt_args), device)
        assert extra <= 64 * batch.valid.numel() + 8192


# The contract


def test_zero_frames(kernel, device):
    batch = rnnt_batch(B=3, T=4, U=2, device=device)
    unhurt = loss_and_grads(kernel, batch)
    short = batch.replace(logit_lengths=torch.tensor([4, 0, 4], device=device))
    outcome = loss_and_grads(kernel, short)
    assert outcome.losses[1] == torch.inf and (outcome.grad_tokens[1] == 0).all()
    assert_same_bits(outcome, unhurt, samples=[0, 2])
    with_zero = loss_and_grads(kernel, short, zero_infinity=True)
    assert with_zero.losses[1] == 0
    assert_same_bits(with_zero, unhurt, samples=[0, 2])
    none_at_all = loss_and_grads(kernel, rnnt_batch(B=2, T=0, U=2, device=device))
    assert (none_at_all.losses == torch.inf).all() and none_at_all.grad_tokens.shape == (2, 0, 3, 7)


def test_a_label_that_may_not_be_emitted(kernel, device):
    batch = rnnt_batch(B=2, T=6, U=3, V=9, device=device)
    batch.targets.fill_(3)
    batch.token_logits[..., 6:] = -torch.inf
    batch.token_logits[1, :, 1, 3] = -torch.inf
    outcome = loss_and_grads(kernel, batch)
    assert outcome.losses[0].isfinite() and outcome.losses[1] == torch.inf
    assert (outcome.grad_tokens[1] == 0).all() and (outcome.grad_tokens[..., 6:] == 0).all()
    assert_matches(outcome, batch)


def test_an_infinite_upstream_gradient_leaves_an_infeasible_sample_at_zero(kernel, device):
    batch = rnnt_batch(B=2, T=4, U=2, logit_lengths=[0, 4], device=device)
    outcome = loss_and_grads(kernel, batch, upstream=torch.tensor([torch.inf, 1.0], device=device))
    assert (outcome.grad_tokens[0] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_or_infinity_at_a_valid_node(kernel, device, bad):
    batch = rnnt_batch(B=3, T=6, U=3, logit_lengths=[6, 4, 5], target_lengths=[3, 2, 1], device=device)
    good = loss_and_grads(kernel, batch)
    batch.token_logits[1, 2, 1, 2] = bad
    outcome = loss_and_grads(kernel, batch.replace())
    assert outcome.losses[1].isnan()
    assert outcome.grad_tokens[1][batch.valid[1]].isnan().all() and (outcome.grad_tokens[1][~batch.valid[1]] == 0).all()
    assert_same_bits(outcome, good, samples=[0, 2])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_padding_is_never_read(kernel, device, garbage):
    lengths = {"logit_lengths": [6, 3, 0], "target_lengths": [1, 3, 2]}
    batch = rnnt_batch(B=3, T=6, U=3, device=device, **lengths)
    clean = loss_and_grads(kernel, batch)
    batch.token_logits[~batch.valid] = garbage
    for b, U in enumerate(lengths["target_lengths"]):
        batch.targets[b, U:] = -100
    outcome = loss_and_grads(kernel, batch.replace())
    assert_same_bits(outcome, clean)
    assert (outcome.grad_tokens[~batch.valid] == 0).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "name, value", [("logit_lengths", 7), ("logit_lengths", -1), ("target_lengths", 4), ("targets", 9)]
)
def test_malformed_samples(kernel, device, name, value):
    batch = rnnt_batch(B=3, T=6, U=3, device=device)
    good = through_the_ops(kernel, batch)
    getattr(batch, name)[1] = value
    outcome = through_the_ops(kernel, batch)
    assert outcome.losses[1].isnan() and (outcome.grad_tokens[1] == 0).all()
    assert_same_bits(outcome, good, samples=[0, 2])


@pytest.mark.kernels_ci
def test_same_call_same_bits(kernel, device):
    batch = rnnt_batch(B=4, T=40, U=40, V=65, dtype=torch.bfloat16, device=device)
    first = loss_and_grads(kernel, batch)
    for _ in range(3):
        assert_same_bits(loss_and_grads(kernel, batch), first)
