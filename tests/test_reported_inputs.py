"""Inputs from people's reports about transducer and CTC losses. Logits are zero unless said."""

from itertools import product
from math import inf

import pytest
import torch
from support.batches import make_batch, zero_batch
from support.calls import Outcome, loss_and_grads
from support.comparisons import assert_grads_match, assert_losses_match, assert_matches, assert_same_bits, same_bits
from support.memory import peak_extra_bytes


@pytest.mark.parametrize("T, U, V, value", [(6, 1100, 8, 3022.096986), (64, 1030, 4, 1901.925856)])
def test_more_labels_than_threads(kernel, device, T, U, V, value):
    batch = zero_batch(T=T, U=U, V=V, device=device)
    outcome = loss_and_grads(kernel, batch)
    assert outcome.losses.item() == pytest.approx(value, rel=1e-6)
    assert_grads_match(outcome, batch)
    assert (outcome.grad_tokens[0, :, 1025:].abs().amax(dim=-1) > 0).any()


@pytest.mark.parametrize("U", [255, 256, 257, 639, 2047, 2049])
def test_labels_around_a_block(kernel, device, U):
    batch = make_batch(T=4, U=U, V=5, durations=(0, 1, 2), device=device)
    assert_matches(loss_and_grads(kernel, batch), batch)


@pytest.mark.cuda
@pytest.mark.parametrize("durations, value", [((1,), 1989.632586), ((0, 1), 2167.068064)])
def test_over_2_to_the_31_elements(kernel, durations, value):
    B, T, U, V = 33, 256, 63, 4096
    logits = torch.zeros(B, T, U + 1, V + len(durations), dtype=torch.float16, device="cuda", requires_grad=True)
    assert logits.numel() > 2**31
    targets = torch.ones(B, U, dtype=torch.int64, device="cuda")
    lengths = torch.full((B,), T, device="cuda"), torch.full((B,), U, device="cuda")
    losses = kernel.tdt_loss_joint(logits, targets, *lengths, 0, list(durations), reduction="none")
    torch.testing.assert_close(losses, torch.full_like(losses, value), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert same_bits(grad[-1], grad[0])
    assert (grad[0, -1, -1] != 0).any()


@pytest.mark.kernels_ci
def test_a_tensor_larger_than_every_sample(kernel, device, api):
    batch = zero_batch(B=2, T=8, U=3, logit_lengths=[4, 3], target_lengths=[2, 1], device=device)
    outcome = loss_and_grads(kernel, batch, api)
    torch.testing.assert_close(outcome.losses.cpu(), torch.tensor([7.751725, 6.074846]), rtol=1e-6, atol=0)
    assert_grads_match(outcome, batch)
    for b, (T, U) in enumerate([(4, 2), (3, 1)]):
        assert (outcome.grad_tokens[b, T:] == 0).all() and (outcome.grad_tokens[b, :, U + 1 :] == 0).all()
        assert (outcome.grad_durations[b, T:] == 0).all() and (outcome.grad_durations[b, :, U + 1 :] == 0).all()


@pytest.mark.parametrize("padded", [-100, -1, 5, 12, 2**31 - 1])
def test_padded_labels(kernel, device, api, padded):
    batch = make_batch(B=2, T=6, U=3, V=5, target_lengths=[1, 2], device=device)
    clean = loss_and_grads(kernel, batch, api)
    batch.targets[0, 1:], batch.targets[1, 2:] = padded, padded
    assert_same_bits(loss_and_grads(kernel, batch, api), clean)


@pytest.mark.parametrize("garbage", [torch.nan, inf, 1e30])
def test_garbage_in_padding_nodes(kernel, device, api, garbage):
    batch = make_batch(B=2, T=8, U=3, logit_lengths=[4, 3], target_lengths=[2, 1], device=device)
    clean = loss_and_grads(kernel, batch, api)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = garbage
    outcome = loss_and_grads(kernel, batch.replace(), api)
    assert_same_bits(outcome, clean)
    assert (outcome.grad_tokens[~batch.valid] == 0).all() and (outcome.grad_durations[~batch.valid] == 0).all()


def test_empty_transcripts(kernel, device, api):
    nothing = zero_batch(B=2, T=4, U=0, device=device)
    assert nothing.targets.shape == (2, 0)
    outcome = loss_and_grads(kernel, nothing, api)
    torch.testing.assert_close(outcome.losses.cpu(), torch.tensor([9.210340, 9.210340]), rtol=1e-6, atol=0)
    assert_grads_match(outcome, nothing)
    batch = zero_batch(B=2, T=4, U=2, target_lengths=[0, 2], device=device)
    outcome = loss_and_grads(kernel, batch, api)
    torch.testing.assert_close(outcome.losses.cpu(), torch.tensor([9.210340, 7.751725]), rtol=1e-6, atol=0)
    assert_grads_match(outcome, batch)


def test_zero_frames(kernel, device, api):
    batch = zero_batch(B=2, T=4, U=2, device=device)
    unhurt = loss_and_grads(kernel, batch, api)
    outcome = loss_and_grads(kernel, batch.replace(logit_lengths=torch.tensor([0, 4], device=device)), api)
    assert outcome.losses[0] == inf
    assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()
    assert_same_bits(outcome, unhurt, samples=[1])
    none_at_all = loss_and_grads(kernel, zero_batch(B=2, T=0, U=2, device=device), api)
    assert (none_at_all.losses == inf).all() and none_at_all.grad_tokens.shape == (2, 0, 3, 5)


@pytest.mark.kernels_ci
def test_too_few_frames(kernel, device, api):
    infeasible = loss_and_grads(kernel, zero_batch(T=3, U=3, durations=(1,), device=device), api)
    assert infeasible.losses.item() == inf
    assert (infeasible.grad_tokens == 0).all() and (infeasible.grad_durations == 0).all()
    twin = zero_batch(T=2, U=1, durations=(1,), device=device)
    outcome = loss_and_grads(kernel, twin, api)
    assert outcome.losses.item() == pytest.approx(3.218876, rel=1e-6)
    assert_grads_match(outcome, twin)


def test_too_few_frames_leave_the_others_in_the_batch_alone(kernel, device, api):
    batch = make_batch(B=3, T=5, U=3, durations=(1,), device=device)
    unhurt = loss_and_grads(kernel, batch, api)
    too_short = batch.replace(logit_lengths=torch.tensor([5, 3, 5], device=device))
    assert_same_bits(loss_and_grads(kernel, too_short, api), unhurt, samples=[0, 2])
    token_logits = too_short.token_logits.clone().requires_grad_()
    losses = kernel.tdt_loss(token_logits, *too_short.args[1:], reduction="none")
    losses[losses.isfinite()].sum().backward()
    assert (
        token_logits.grad.isfinite().all() and (token_logits.grad[1] == 0).all() and (token_logits.grad[0] != 0).any()
    )


def test_durations_without_zero(kernel, device, api):
    batch = zero_batch(T=3, U=1, durations=(1, 2), device=device)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses.item() == pytest.approx(3.816713, rel=1e-6)
    assert_grads_match(outcome, batch)
    assert (outcome.grad_tokens[0, 0, 1] == 0).all() and (outcome.grad_durations[0, 0, 1] == 0).all()  # unreachable


@pytest.mark.parametrize(
    "durations, T, U, V, value",
    [((2, 4), 5, 0, 5, inf), ((2, 4), 6, 1, 4, 3.347953), ((0, 4), 3, 0, 5, inf), ((0, 4), 4, 3, 16, 13.862944)],
)
def test_durations_with_gaps(kernel, device, durations, T, U, V, value):
    batch = zero_batch(T=T, U=U, V=V, durations=durations, device=device)
    outcome = loss_and_grads(kernel, batch)
    assert outcome.losses.item() == pytest.approx(value, rel=1e-6)
    assert_grads_match(outcome, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(kernel, device, api, dtype):
    batch = make_batch(B=3, T=9, U=4, V=65, dtype=dtype, target_lengths=[4, 2, 3], scale=2.0, device=device)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses.dtype == torch.float32 and outcome.grad_tokens.dtype == dtype
    torch.testing.assert_close(outcome.losses.double(), batch.expected.losses, rtol=1e-5, atol=0)
    assert_matches(outcome, batch)


def test_long_and_wide(kernel, device):
    batch = make_batch(T=1500, U=400, V=32, durations=(0, 1, 2, 3, 4), scale=4.0, device=device)
    outcome = loss_and_grads(kernel, batch)
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch, atol=1e-5)


@pytest.mark.parametrize("V", [65, pytest.param(1025, marks=pytest.mark.cuda)])
def test_long_and_wide_in_bfloat16(kernel, device, V):
    if V == 1025 and device == "cpu":
        pytest.skip("250 million logits: on the GPU only")
    batch = make_batch(T=800, U=300, V=V, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device=device)
    outcome = loss_and_grads(kernel, batch)
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch, atol=1e-5)


def test_many_frames_and_no_label(kernel, device):
    losses = loss_and_grads(kernel, zero_batch(T=4000, U=0, V=1000, durations=(1,), device=device)).losses
    assert losses.item() == pytest.approx(27631.0211, rel=1e-6)


def test_layouts(kernel, device):
    batch = make_batch(B=3, T=6, U=3, V=13, device=device)
    expected = loss_and_grads(kernel, batch)

    def apart(x):
        return torch.full((3, 12, 4, x.shape[-1]), torch.nan, device=device)[:, ::2].copy_(x)

    for change in (lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), apart):
        strided = batch.replace(token_logits=change(batch.token_logits), duration_logits=change(batch.duration_logits))
        outcome = loss_and_grads(kernel, strided)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(outcome.grad_tokens, expected.grad_tokens, rtol=0, atol=1e-6)
    leaf = batch.joint.clone().requires_grad_()
    losses = kernel.tdt_loss(leaf[..., :13], leaf[..., 13:], *batch.rest, "none")
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad[..., :13], expected.grad_tokens, rtol=0, atol=1e-6)
    same = batch.replace(token_logits=batch.token_logits[:1].expand(3, -1, -1, -1))
    alike = batch.replace(token_logits=same.token_logits.contiguous())
    torch.testing.assert_close(kernel.tdt_loss(*same.args), kernel.tdt_loss(*alike.args), rtol=1e-6, atol=0)


def test_no_hidden_copy(kernel, device):
    batch = make_batch(B=2, T=24, U=7, V=2048, device=device)
    permuted = batch.token_logits.transpose(0, 1).contiguous().transpose(0, 1)
    halved = torch.zeros(2, 48, 8, 2048, device=device)[:, ::2]
    for logits in (permuted, halved, batch.joint[..., :2048], batch.token_logits[:1].expand(2, -1, -1, -1)):
        strided = batch.replace(token_logits=logits)
        extra = peak_extra_bytes(lambda strided=strided: kernel.tdt_loss(*strided.args), device)
        assert extra < batch.token_logits.numel()  # a quarter of a copy


def test_weights_scales_and_strides_of_the_upstream_gradient(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, device=device)
    for weights in (torch.tensor([0.5, -2.0]), torch.tensor(3.0).expand(2)):
        assert_grads_match(loss_and_grads(kernel, batch, api, upstream=weights.to(device)), batch, weights)
    half = make_batch(B=2, T=6, U=3, V=1025, dtype=torch.float16, target_lengths=[3, 2], device=device)
    logits = half.joint.requires_grad_()
    (kernel.tdt_loss_joint(logits, *half.rest, reduction="mean") * 65536).backward()
    outcome = Outcome(None, logits.grad[..., :1025], logits.grad[..., 1025:])
    weights = 65536 / 2 / half.target_lengths.double()
    finite = half.expected.grad_tokens.abs() * weights.reshape(-1, 1, 1, 1) < 60000  # what float16 can hold
    assert finite.double().mean() > 0.99
    expected = half.expected.grad_tokens * weights.reshape(-1, 1, 1, 1)
    torch.testing.assert_close(outcome.grad_tokens[finite].double(), expected[finite], rtol=2**-10, atol=65536 * 1e-5)


@pytest.mark.parametrize(
    "reduction, value", [("sum", 13.826572), ("mean", 4.975354), ("mean_batch", 6.913286), ("mean_volume", 4.608857)]
)
def test_reductions(kernel, device, api, reduction, value):
    batch = zero_batch(B=2, T=8, U=3, logit_lengths=[4, 3], target_lengths=[2, 1], device=device)
    assert loss_and_grads(kernel, batch, api, reduction=reduction).losses.item() == pytest.approx(value, rel=1e-6)


INTEGERS = list(product([torch.int32, torch.int64], repeat=3))


@pytest.mark.parametrize("dtypes", INTEGERS, ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes))
def test_integer_dtypes(kernel, device, dtypes):
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], target_lengths=[3, 2], device=device)
    names = ("targets", "logit_lengths", "target_lengths")
    mixed = batch.replace(**{name: getattr(batch, name).to(dtype) for name, dtype in zip(names, dtypes)})
    assert_same_bits(loss_and_grads(kernel, mixed), loss_and_grads(kernel, batch))


@pytest.mark.cuda
@pytest.mark.parametrize("devices", list(product(["cpu", "cuda"], repeat=3)), ids="-".join)
def test_lengths_and_targets_on_either_device(kernel, api, devices):
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], target_lengths=[3, 2], device="cuda")
    names = ("targets", "logit_lengths", "target_lengths")
    mixed = batch.replace(**{name: getattr(batch, name).to(where) for name, where in zip(names, devices)})
    assert_same_bits(loss_and_grads(kernel, mixed, api), loss_and_grads(kernel, batch, api))


def test_a_nan_spoils_its_own_sample_alone(kernel, device, api):
    batch = make_batch(B=3, T=6, U=3, device=device)
    clean = loss_and_grads(kernel, batch, api)
    batch.token_logits[1, 3, 2, 4] = torch.nan
    outcome = loss_and_grads(kernel, batch.replace(), api)
    assert outcome.losses[1].isnan()
    assert_same_bits(outcome, clean, samples=[0, 2])


def test_evaluation_and_partial_gradients(kernel, device):
    batch = make_batch(B=2, T=30, U=10, V=1021, durations=(0, 1, 2, 3, 4), device=device)
    token_logits, duration_logits = batch.token_logits.requires_grad_(), batch.duration_logits
    with torch.no_grad():
        extra = peak_extra_bytes(lambda: kernel.tdt_loss(token_logits, duration_logits, *batch.rest), device)
    assert extra <= 60 * batch.valid.numel() + 8192
    kernel.tdt_loss(token_logits, duration_logits, *batch.rest, "sum").backward()
    torch.testing.assert_close(token_logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=1e-5)
    assert duration_logits.grad is None


def test_the_same_call_twenty_times(kernel, device, api):
    # Side stream and second GPU: test_cuda.py.
    batch = make_batch(B=3, T=20, U=9, V=33, durations=(0, 1, 2, 3, 4), target_lengths=[9, 4, 1], device=device)
    first = loss_and_grads(kernel, batch, api)
    for _ in range(19):
        assert_same_bits(loss_and_grads(kernel, batch, api), first)
