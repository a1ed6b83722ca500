"""The op `lattice` (eqs. 4-6) from given log-probabilities: LL, alpha and beta at every node."""

import oracle
import pytest
import torch
from conftest import TOLERANCE, make_batch, same_bits


def make_node_lp(batch):
    """node_lp in the dtype of the logits, and what the oracle makes of those rounded numbers, sample by sample."""
    node_lp = batch.expected_node_lp.to(batch.token_logits.dtype)
    nodes = []
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        rounded = node_lp[b, :T, : U + 1].double().cpu().numpy()
        dur_lp = rounded[..., 3 : 3 + len(batch.durations)]
        nodes.append(
            oracle.tdt_lattice(oracle.LogProbs(*rounded[..., :3].transpose(2, 0, 1), dur_lp), batch.durations)[0]
        )
    return node_lp, nodes


def run(kernel, batch, node_lp, zero_infinity=False, need_grad=True):
    """(losses, ll, alpha_beta)"""
    V = batch.token_logits.shape[-1]
    return kernel.loss.ops.lattice(node_lp, *batch.lengths, list(batch.durations), V, zero_infinity, need_grad)


def assert_lattice_matches(kernel, batch):
    node_lp, nodes = make_node_lp(batch)
    losses, ll, alpha_beta = run(kernel, batch, node_lp)
    tolerance = TOLERANCE[node_lp.dtype].lattice
    assert losses.dtype == node_lp.dtype and ll.dtype == alpha_beta.dtype == torch.float64
    assert alpha_beta.shape == (2, *node_lp.shape[:3])
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        alpha, beta = alpha_beta[:, b, :T, : U + 1].cpu()
        torch.testing.assert_close(alpha, torch.from_numpy(nodes[b].alpha), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(beta, torch.from_numpy(nodes[b].beta), rtol=tolerance, atol=tolerance)
        assert ll[b].item() == pytest.approx(nodes[b].ll, rel=tolerance, abs=tolerance)
        assert losses[b].item() == pytest.approx(-nodes[b].ll, rel=2 * TOLERANCE[node_lp.dtype].loss)
    assert (alpha_beta[:, ~batch.valid] == 0).all()
    return losses, ll


DURATIONS = {
    "one frame": (1,),
    "zero and one": (0, 1),
    "parakeet": (0, 1, 2, 3, 4),
    "no zero": (1, 2),
    "even only": (2, 4),
    "a gap": (0, 4),
    "descending": (4, 3, 2, 1, 0),
    "shuffled": (2, 0, 3, 1),
    "duplicates": (0, 1, 1),
    "duplicated zero": (0, 0, 1),
    "long": (0, 1, 9, 17),
    "beyond every frame": (0, 1, 1000, 2**31 - 1, 2**40),
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("durations", DURATIONS.values(), ids=DURATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_durations(kernel, device, durations, dtype):
    lengths = {"logit_lengths": [24, 17, 8], "target_lengths": [3, 1, 5]}
    batch = make_batch(B=3, T=24, U=5, V=6, durations=durations, sigma=0.05, dtype=dtype, device=device, **lengths)
    assert_lattice_matches(kernel, batch)


def test_64_durations(kernel, device):
    assert_lattice_matches(kernel, make_batch(T=70, U=4, V=5, durations=range(64), device=device))


SHAPES = {
    "one node": (1, 0),
    "no labels": (9, 0),
    "one frame": (1, 5),
    "two frames": (2, 3),
    "wide": (7, 100),
    "long": (150, 2),
    "long and wide": (90, 150),
    **{f"U = {U}": (5, U) for U in (30, 31, 32, 33, 63, 64, 65, 127, 128, 1023, 1024, 1025)},
}


@pytest.mark.parametrize("T, U", SHAPES.values(), ids=SHAPES.keys())
def test_every_kind_of_shape(kernel, device, T, U):
    assert_lattice_matches(kernel, make_batch(T=T, U=U, V=4, durations=(0, 1, 2), device=device))


@pytest.mark.parametrize("U", [31, 32, 33, 64])
def test_durations_that_skip_frames_across_many_columns(kernel, device, U):
    assert_lattice_matches(
        kernel, make_batch(B=2, T=80, U=U, durations=(0, 3, 7), target_lengths=[U, U - 9], device=device)
    )


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_probabilities_beyond_every_float_range(kernel, device, scale):
    batch = make_batch(B=2, T=40, U=35, V=6, durations=(0, 1, 2, 3, 4), scale=scale, device=device)
    losses, _ = assert_lattice_matches(kernel, batch)
    assert losses.isfinite().all() and (losses > 745).all()  # exp(-745) is 0 in float64


def test_paths_of_very_different_probability_are_all_kept(kernel, device):
    # The best alignment by far is worth exp(-2000); a float64 exponent alone would lose it beside nodes near 1.
    batch = make_batch(T=20, U=10, V=4, durations=(0, 1), scale=0.0, dtype=torch.float64, device=device)
    batch.token_logits[:, 10:, :, 0] = -200.0
    assert_lattice_matches(kernel, batch)


def test_masked_arcs(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=5, durations=(0, 1, 2), device=device)
    batch.targets.fill_(3)
    batch.duration_logits[0, 2:4, :, 0] = -torch.inf
    batch.token_logits[0, 1, :, 0] = -torch.inf  # no blank at frame 1
    batch.token_logits[1, :, 1, 3] = -torch.inf  # the second label of sample 1 cannot be emitted
    losses, ll = assert_lattice_matches(kernel, batch)
    assert losses[0].isfinite() and losses[1] == torch.inf and ll[1] == -torch.inf


def test_no_alignment(kernel, device):
    lengths = {"logit_lengths": [3, 4, 0], "target_lengths": [3, 3, 0]}
    batch = make_batch(B=3, T=4, U=3, durations=(1,), device=device, **lengths)
    losses, ll = assert_lattice_matches(kernel, batch)
    assert losses.isinf().tolist() == [True, False, True]
    node_lp, _ = make_node_lp(batch)
    with_zero, ll, _ = run(kernel, batch, node_lp, zero_infinity=True)
    assert with_zero[0] == 0 and with_zero[2] == 0 and with_zero[1] == losses[1]
    assert ll[0] == -torch.inf


def test_without_gradient_there_is_no_beta(kernel, device):
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], device=device)
    node_lp, _ = make_node_lp(batch)
    losses, ll, _ = run(kernel, batch, node_lp)
    losses_only, ll_only, alpha_beta = run(kernel, batch, node_lp, need_grad=False)
    assert alpha_beta.shape == (0,)
    assert same_bits(losses_only, losses) and same_bits(ll_only, ll)


@pytest.mark.parametrize(
    "name, value", [("logit_lengths", -1), ("logit_lengths", 7), ("target_lengths", -1), ("target_lengths", 4)]
)
def test_malformed_length_marks_only_its_sample(kernel, device, name, value):
    batch = make_batch(B=3, T=6, U=3, device=device)
    node_lp, _ = make_node_lp(batch)
    good, good_ll, _ = run(kernel, batch, node_lp)
    getattr(batch, name)[1] = value
    losses, ll, _ = run(kernel, batch, node_lp)
    assert losses[1].isnan() and ll[1] == torch.inf
    assert same_bits(losses[[0, 2]], good[[0, 2]]) and same_bits(ll[[0, 2]], good_ll[[0, 2]])


def test_nan_log_prob_reaches_only_its_sample(kernel, device):
    batch = make_batch(B=2, T=6, U=3, device=device)
    node_lp, _ = make_node_lp(batch)
    good, _, _ = run(kernel, batch, node_lp)
    node_lp[1, 2, 1, 1] = torch.nan
    losses, ll, _ = run(kernel, batch, node_lp)
    assert losses[1].isnan() and ll[1].isnan()
    assert same_bits(losses[0], good[0])
