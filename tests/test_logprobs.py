"""The op `log_probs` (eqs. 1-3): RNN-T, delay penalty, dtypes, strides, alignments, joint and separate logits, what is masked and what is not read."""

import pytest
import torch
from conftest import DTYPES, TOLERANCE, make_batch, same_bits


def run(kernel, batch, api="separate"):
    """node_lp (B, max_T, max_U1, R): lse, blank_lp, label_lp, then dur_lp."""
    blank, durations = batch.op_arcs
    options = (batch.sigma, batch.option("delay_penalty"))
    return kernel.loss.ops.log_probs(*batch.op_logits(api), *batch.lengths, blank, len(durations), *options)


def assert_log_probs_match(node_lp, batch):
    D = len(batch.durations)
    accumulate = torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32
    assert node_lp.dtype == accumulate
    assert node_lp.shape == (*batch.token_logits.shape[:3], (3 + D + 3) // 4 * 4)
    atol = TOLERANCE[batch.token_logits.dtype].log_prob * batch.magnitude
    torch.testing.assert_close(node_lp.double()[..., : 3 + D], batch.expected_node_lp[..., : 3 + D], rtol=0, atol=atol)
    assert (node_lp[~batch.valid] == 0).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_1_to_3(kernel, device, api, dtype):
    batch = make_batch(B=3, T=6, U=4, V=37, durations=(0, 1, 2, 3, 4), sigma=0.05, dtype=dtype, device=device)
    assert_log_probs_match(run(kernel, batch, api), batch)


@pytest.mark.parametrize("V", [1, 2, 3, 31, 33, 128, 1025, 8193])
def test_every_vocabulary_size(kernel, device, api, V):
    batch = make_batch(B=2, T=3, U=2, V=V, durations=(1, 0), blank=V - 1, dtype=torch.bfloat16, device=device)
    assert_log_probs_match(run(kernel, batch, api), batch)


@pytest.mark.parametrize("D", [1, 2, 5, 6, 33, 64])
def test_every_number_of_durations(kernel, device, api, D):
    batch = make_batch(B=2, T=3, U=2, V=9, durations=range(1, D + 1), device=device)
    assert_log_probs_match(run(kernel, batch, api), batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 37, 1025])
def test_rnnt_has_no_duration_log_probs(kernel, device, dtype, V):
    lengths = {"logit_lengths": [6, 2, 0], "target_lengths": [1, 4, 3]}
    batch = make_batch(B=3, T=6, U=4, V=V, durations=(), sigma=0.05, dtype=dtype, device=device, **lengths)
    node_lp = run(kernel, batch)
    assert node_lp.shape[-1] == 4
    assert_log_probs_match(node_lp, batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_delay_penalty(kernel, device, api, durations, dtype):
    lengths = {"logit_lengths": [6, 3, 1], "target_lengths": [4, 2, 1]}
    batch = make_batch(B=3, T=6, U=4, durations=durations, sigma=0.05, dtype=dtype, device=device, **lengths)
    penalized = batch.replace(options={"delay_penalty": -0.3})
    node_lp = run(kernel, penalized, api)
    assert_log_probs_match(node_lp, penalized)
    plain = run(kernel, batch, api)
    untouched = [k for k in range(node_lp.shape[-1]) if k != 2]
    assert same_bits(node_lp[..., untouched], plain[..., untouched])  # neither lse, nor blanks, nor durations
    assert same_bits(node_lp[2], plain[2])  # one frame: the middle is all there is


def test_padding_is_zero_and_not_read(kernel, device, api):
    batch = make_batch(B=3, T=6, U=4, logit_lengths=[6, 2, 0], target_lengths=[1, 4, 3], device=device)
    clean = run(kernel, batch, api)
    assert_log_probs_match(clean, batch)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = torch.nan
    batch = batch.replace()  # forget the cached joint tensor
    assert same_bits(run(kernel, batch, api), clean)


def test_label_lp_is_minus_infinity_at_the_last_row(kernel, device):
    batch = make_batch(B=2, T=4, U=3, target_lengths=[3, 1], device=device)
    node_lp = run(kernel, batch)
    assert (node_lp[0, :, 3, 2] == -torch.inf).all()
    assert (node_lp[1, :, 1, 2] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_offset(kernel, device, dtype):
    batch = make_batch(
        B=2, T=3, U=2, V=38, durations=(0, 1, 2), dtype=dtype, device=device
    )  # 41 columns: rows at every offset
    for offset in range(9):
        storage = torch.full((offset + batch.joint.numel() + 8,), torch.nan, dtype=dtype, device=device)
        logits = storage[offset : offset + batch.joint.numel()].view_as(batch.joint).copy_(batch.joint)
        shifted = batch.replace(token_logits=logits[..., :38], duration_logits=logits[..., 38:])
        assert_log_probs_match(run(kernel, shifted), batch)


def test_any_strides_of_the_first_three_dimensions(kernel, device):
    batch = make_batch(B=3, T=4, U=2, V=11, device=device)
    permuted = batch.token_logits.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    sliced = torch.full((3, 8, 6, 11), torch.nan, device=device)[:, ::2, ::2].copy_(batch.token_logits)
    for logits in (permuted, sliced):
        assert not logits.is_contiguous()
        assert_log_probs_match(run(kernel, batch.replace(token_logits=logits)), batch)
    expanded = batch.replace(token_logits=batch.token_logits[:1].expand(3, -1, -1, -1))
    assert_log_probs_match(run(kernel, expanded), expanded)


def test_duration_log_probs_have_no_sigma(kernel, device):
    batch = make_batch(sigma=0.0, device=device)
    plain, with_sigma = run(kernel, batch), run(kernel, batch.replace(sigma=0.5))
    assert same_bits(plain[..., 3:], with_sigma[..., 3:])
    torch.testing.assert_close(with_sigma[..., 1], plain[..., 1] - 0.5)


@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
def test_small_and_huge_logits(kernel, device, scale):
    batch = make_batch(B=2, T=4, U=3, V=129, scale=scale, device=device)
    assert_log_probs_match(run(kernel, batch), batch)


def test_finite_logits_at_the_end_of_the_range(kernel, device):
    batch = make_batch(T=2, U=1, V=5, scale=0.0, device=device)
    top = torch.finfo(torch.float32).max
    batch.token_logits[0, 0, 0] = torch.tensor([top, -top, 0.0, top, -top])
    node_lp = run(kernel, batch)
    torch.testing.assert_close(
        node_lp[0, 0, 0, 1].item(),
        torch.log_softmax(batch.token_logits[0, 0, 0], -1)[0].item(),
        rtol=0,
        atol=1e-6 * top,
    )
    assert node_lp[0, 0, 0, 0].isfinite()


def test_masked_tokens_and_durations(kernel, device, api):
    batch = make_batch(B=2, T=4, U=3, V=9, device=device)
    batch.token_logits[:, :, :, 5:] = -torch.inf
    batch.targets.fill_(2)
    batch.targets[0, 1] = 6  # a label that may not be emitted
    batch.duration_logits[..., 0] = -torch.inf
    node_lp = run(kernel, batch, api)
    assert_log_probs_match(node_lp, batch)
    assert (node_lp[0, :, 1, 2] == -torch.inf).all() and (node_lp[..., 3] == -torch.inf).all()


def test_a_node_without_any_token_is_nan(kernel, device, api):
    batch = make_batch(T=3, U=1, device=device)
    batch.token_logits[0, 1, 0] = -torch.inf
    batch.duration_logits[0, 2, 1] = -torch.inf
    node_lp = run(kernel, batch, api)
    assert node_lp[0, 1, 0, 1].isnan() and node_lp[0, 2, 1, 3:6].isnan().all()
    assert not node_lp[0, 0].isnan().any()


def test_label_equal_to_blank(kernel, device):
    batch = make_batch(T=3, U=2, blank=4, device=device)
    batch.targets.fill_(4)
    node_lp = run(kernel, batch)
    assert same_bits(node_lp[:, :, :2, 1], node_lp[:, :, :2, 2])


@pytest.mark.parametrize("V, scale", [(37, 1.0), (1025, 1.0), (8193, 4.0)])
def test_error_is_no_larger_than_plain_torch(kernel, device, V, scale):
    batch = make_batch(B=2, T=8, U=3, V=V, scale=scale, device=device)
    reference = torch.log_softmax(batch.token_logits.double(), dim=-1)[..., 0]
    plain = (torch.log_softmax(batch.token_logits, dim=-1)[..., 0] - reference).abs().max()
    ours = (run(kernel, batch)[..., 1] - reference).abs().max()
    assert ours <= 2 * plain + torch.finfo(torch.float32).eps
