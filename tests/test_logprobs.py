"""The op `log_probs` (eqs. 1-3): RNN-T, delay penalty, dtypes, strides, alignments, joint and separate logits, what is masked and what is not read."""

import pytest
import torch
from support.batches import BLANK_LP, DUR_LP, LABEL_LP, ROW_SUM, make_batch
from support.comparisons import assert_close, assert_log_probs_match, assert_row_max_match, same_bits
from support.tolerances import DTYPES


def run_both(kernel, batch, api="separate"):
    """node_lp (B, max_T, max_U1, R): sum of exp(x - max), blank_lp, label_lp, then dur_lp; row_max (B, max_T, max_U1): max."""
    blank, durations = batch.op_arcs
    options = (batch.sigma, batch.option("delay_penalty"))
    return kernel.loss.ops.log_probs(*batch.op_logits(api), *batch.lengths, blank, len(durations), *options)


def run(kernel, batch, api="separate"):
    return run_both(kernel, batch, api)[0]


def assert_all_match(results, batch):
    assert_log_probs_match(results[0], batch)
    assert_row_max_match(results[1], batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_1_to_3(kernel, device, api, dtype):
    batch = make_batch(B=3, T=6, U=4, V=37, durations=(0, 1, 2, 3, 4), sigma=0.05, dtype=dtype, device=device)
    assert_all_match(run_both(kernel, batch, api), batch)


@pytest.mark.parametrize("V", [1, 2, 3, 31, 33, 128, 1025, 8193])
def test_every_vocabulary_size(kernel, device, api, V):
    batch = make_batch(B=2, T=3, U=2, V=V, durations=(1, 0), blank=V - 1, dtype=torch.bfloat16, device=device)
    assert_all_match(run_both(kernel, batch, api), batch)


@pytest.mark.parametrize("D", [1, 2, 5, 6, 33, 64])
def test_every_number_of_durations(kernel, device, api, D):
    batch = make_batch(B=2, T=3, U=2, V=9, durations=range(1, D + 1), device=device)
    assert_all_match(run_both(kernel, batch, api), batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 37, 1025])
def test_rnnt_has_no_duration_log_probs(kernel, device, dtype, V):
    lengths = {"logit_lengths": [6, 2, 0], "target_lengths": [1, 4, 3]}
    batch = make_batch(B=3, T=6, U=4, V=V, durations=(), sigma=0.05, dtype=dtype, device=device, **lengths)
    results = run_both(kernel, batch)
    assert results[0].shape[-1] == 4
    assert_all_match(results, batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_delay_penalty(kernel, device, api, durations, dtype):
    lengths = {"logit_lengths": [6, 3, 1], "target_lengths": [4, 2, 1]}
    batch = make_batch(B=3, T=6, U=4, durations=durations, sigma=0.05, dtype=dtype, device=device, **lengths)
    penalized = batch.replace(options={"delay_penalty": -0.3})
    node_lp, row_max = run_both(kernel, penalized, api)
    assert_log_probs_match(node_lp, penalized)
    plain, plain_max = run_both(kernel, batch, api)
    untouched = [k for k in range(node_lp.shape[-1]) if k != LABEL_LP]
    assert same_bits(node_lp[..., untouched], plain[..., untouched])  # neither blanks nor durations
    assert same_bits(row_max[batch.valid], plain_max[batch.valid])
    assert same_bits(node_lp[2], plain[2])  # one frame: the middle is all there is


def test_padding_is_zero_and_not_read(kernel, device, api):
    batch = make_batch(B=3, T=6, U=4, logit_lengths=[6, 2, 0], target_lengths=[1, 4, 3], device=device)
    clean, clean_max = run_both(kernel, batch, api)
    assert_all_match((clean, clean_max), batch)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = torch.nan
    batch = batch.replace()  # forget the cached joint tensor
    node_lp, row_max = run_both(kernel, batch, api)
    assert same_bits(node_lp, clean) and same_bits(row_max[batch.valid], clean_max[batch.valid])


def test_label_lp_is_minus_infinity_at_the_last_row(kernel, device):
    batch = make_batch(B=2, T=4, U=3, target_lengths=[3, 1], device=device)
    node_lp = run(kernel, batch)
    assert (node_lp[0, :, 3, LABEL_LP] == -torch.inf).all()
    assert (node_lp[1, :, 1, LABEL_LP] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_offset(kernel, device, dtype):
    batch = make_batch(
        B=2, T=3, U=2, V=38, durations=(0, 1, 2), dtype=dtype, device=device
    )  # 41 columns: rows at every offset
    for offset in range(9):
        storage = torch.full((offset + batch.joint.numel() + 8,), torch.nan, dtype=dtype, device=device)
        logits = storage[offset : offset + batch.joint.numel()].view_as(batch.joint).copy_(batch.joint)
        shifted = batch.replace(token_logits=logits[..., :38], duration_logits=logits[..., 38:])
        assert_all_match(run_both(kernel, shifted), batch)


def test_any_strides_of_the_first_three_dimensions(kernel, device):
    batch = make_batch(B=3, T=4, U=2, V=11, device=device)
    permuted = batch.token_logits.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    sliced = torch.full((3, 8, 6, 11), torch.nan, device=device)[:, ::2, ::2].copy_(batch.token_logits)
    for logits in (permuted, sliced):
        assert not logits.is_contiguous()
        assert_all_match(run_both(kernel, batch.replace(token_logits=logits)), batch)
    expanded = batch.replace(token_logits=batch.token_logits[:1].expand(3, -1, -1, -1))
    assert_all_match(run_both(kernel, expanded), expanded)


def test_duration_log_probs_have_no_sigma(kernel, device):
    batch = make_batch(sigma=0.0, device=device)
    plain, with_sigma = run(kernel, batch), run(kernel, batch.replace(sigma=0.5))
    assert same_bits(plain[..., DUR_LP:], with_sigma[..., DUR_LP:])
    torch.testing.assert_close(with_sigma[..., BLANK_LP], plain[..., BLANK_LP] - 0.5)


@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
def test_small_and_huge_logits(kernel, device, scale):
    batch = make_batch(B=2, T=4, U=3, V=129, scale=scale, device=device)
    assert_all_match(run_both(kernel, batch), batch)


# A constant that added to all logits of a row rounds none of them, as large as that goes.
SHIFTS = {torch.float64: 2.0**40, torch.float32: 2.0**17, torch.bfloat16: 2.0**3, torch.float16: 2.0**6}


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_in_a_row_changes_no_bit(kernel, device, api, dtype, way):
    batch = make_batch(B=2, T=4, U=3, V=37, durations=(0, 1, 2), dtype=dtype, device=device)
    coarse = torch.finfo(dtype).eps * SHIFTS[dtype]
    tokens, durations = ((x.double() / coarse).round() * coarse for x in (batch.token_logits, batch.duration_logits))
    shift = way * SHIFTS[dtype] * 1.5
    plain = batch.replace(token_logits=tokens.to(dtype), duration_logits=durations.to(dtype))
    shifted = batch.replace(token_logits=(tokens + shift).to(dtype), duration_logits=(durations - shift).to(dtype))
    assert torch.equal(shifted.token_logits.double() - shift, tokens)
    (node_lp, row_max), (plain_lp, _) = run_both(kernel, shifted, api), run_both(kernel, plain, api)
    assert same_bits(node_lp, plain_lp)
    assert_all_match((node_lp, row_max), shifted)


@pytest.mark.parametrize("height", [5.0, 16.0, 20.0, 40.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_one_column_wins(kernel, device, api, dtype, height):
    """Its log-probability is that of everything else, to all digits."""
    batch = make_batch(T=4, U=3, V=1030, durations=(0, 1, 2), dtype=dtype, device=device)
    batch.token_logits[..., batch.blank] += height
    batch.duration_logits[..., 1] += height
    node_lp, row_max = run_both(kernel, batch, api)
    assert_all_match((node_lp, row_max), batch)
    digits = {"rtol": height * torch.finfo(dtype).eps, "atol": 0}
    for column in (BLANK_LP, DUR_LP + 1):
        expected = batch.expected_node_lp[..., column]
        assert (expected < 0).all()
        torch.testing.assert_close(node_lp[..., column].double(), expected, **digits)


def test_finite_logits_at_the_end_of_the_range(kernel, device):
    batch = make_batch(T=2, U=1, V=5, scale=0.0, device=device)
    top = torch.finfo(torch.float32).max
    batch.token_logits[0, 0, 0] = torch.tensor([top, -top, 0.0, top, -top])
    batch.token_logits[0, 0, 1] = -top  # all of them, as a mask may leave them
    batch.token_logits[0, 1, 0, 1:] = -top
    node_lp, row_max = run_both(kernel, batch)
    assert_close("blanks", node_lp[0, :, :, BLANK_LP], -torch.tensor([[2.0, 5.0], [1.0, 5.0]]).log(), 1e-6)
    assert row_max[0].tolist() == [[top, -top], [0.0, 0.0]]
    assert node_lp[0, :, :, ROW_SUM].tolist() == [[2.0, 5.0], [1.0, 5.0]]


def test_masked_tokens_and_durations(kernel, device, api):
    batch = make_batch(B=2, T=4, U=3, V=9, device=device)
    batch.token_logits[:, :, :, 5:] = -torch.inf
    batch.targets.fill_(2)
    batch.targets[0, 1] = 6  # a label that may not be emitted
    batch.duration_logits[..., 0] = -torch.inf
    node_lp, row_max = run_both(kernel, batch, api)
    assert_all_match((node_lp, row_max), batch)
    assert (node_lp[0, :, 1, LABEL_LP] == -torch.inf).all() and (node_lp[..., DUR_LP] == -torch.inf).all()


def test_a_node_without_any_token_is_nan(kernel, device, api):
    batch = make_batch(T=3, U=1, device=device)
    batch.token_logits[0, 1, 0] = -torch.inf
    batch.duration_logits[0, 2, 1] = -torch.inf
    node_lp = run(kernel, batch, api)
    assert node_lp[0, 1, 0, BLANK_LP].isnan() and node_lp[0, 2, 1, DUR_LP : DUR_LP + 3].isnan().all()
    assert not node_lp[0, 0].isnan().any()


def test_label_equal_to_blank(kernel, device):
    batch = make_batch(T=3, U=2, blank=4, device=device)
    batch.targets.fill_(4)
    node_lp = run(kernel, batch)
    assert same_bits(node_lp[:, :, :2, BLANK_LP], node_lp[:, :, :2, LABEL_LP])


@pytest.mark.parametrize("V, scale", [(37, 1.0), (1025, 1.0), (8193, 4.0)])
def test_error_is_no_larger_than_plain_torch(kernel, device, V, scale):
    batch = make_batch(B=2, T=8, U=3, V=V, scale=scale, device=device)
    reference = torch.log_softmax(batch.token_logits.double(), dim=-1)[..., 0]
    plain = (torch.log_softmax(batch.token_logits, dim=-1)[..., 0] - reference).abs().max()
    ours = (run(kernel, batch)[..., BLANK_LP] - reference).abs().max()
    assert ours <= 2 * plain + torch.finfo(torch.float32).eps
