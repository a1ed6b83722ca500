"""The op `lattice` (eqs. 4 and 5) from given log-probabilities: LL, alpha and beta at every node, of TDT, of RNN-T and of both."""

import pytest
import torch
from support import oracle
from support.batches import BLANK_LP, DUR_LP, DURATIONS, LABEL_LP, make_batch
from support.comparisons import same_bits
from support.tolerances import TOLERANCE


def make_node_lp(batch):
    """node_lp in the dtype of the logits, and what the oracle makes of those rounded numbers: the lattices of every sample."""
    node_lp = batch.expected_node_lp.to(batch.token_logits.dtype)
    nodes = []
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        rounded = node_lp[b, :T, : U + 1].double().cpu().numpy()
        dur_lp = rounded[..., DUR_LP : DUR_LP + len(batch.durations)]
        lp = oracle.LogProbs(rounded[..., BLANK_LP], rounded[..., LABEL_LP], dur_lp)
        nodes.append([term.nodes for term in oracle.terms(lp, batch.durations, batch.option("omega"))])
    return node_lp, nodes


def run(kernel, batch, node_lp, need_grad=True):
    """ll (L, B) and alpha_beta (L, 2, B, max_T, max_U1)"""
    V, omega = batch.token_logits.shape[-1], batch.option("omega")
    return kernel.loss.ops.lattice(node_lp, *batch.lengths, list(batch.durations), V, omega, need_grad)


def assert_lattice_matches(kernel, batch):
    node_lp, nodes = make_node_lp(batch)
    ll, alpha_beta = run(kernel, batch, node_lp)
    tolerance = TOLERANCE[node_lp.dtype].lattice
    lattices = 2 if batch.durations and batch.option("omega") > 0 else 1
    assert ll.dtype == alpha_beta.dtype == torch.float64
    assert ll.shape == (lattices, len(nodes)) and alpha_beta.shape == (lattices, 2, *node_lp.shape[:3])
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        assert len(nodes[b]) == lattices
        for k, expected in enumerate(nodes[b]):
            alpha, beta = alpha_beta[k, :, b, :T, : U + 1].cpu()
            torch.testing.assert_close(alpha, torch.from_numpy(expected.alpha), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(beta, torch.from_numpy(expected.beta), rtol=tolerance, atol=tolerance)
            assert ll[k, b].item() == pytest.approx(expected.ll, rel=tolerance, abs=tolerance)
    return ll


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


@pytest.mark.parametrize("T, U", SHAPES.values(), ids=SHAPES.keys())
def test_every_kind_of_shape_of_rnnt(kernel, device, T, U):
    assert_lattice_matches(kernel, make_batch(T=T, U=U, V=4, durations=(), device=device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (1,), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_lattices(kernel, device, durations, dtype):
    lengths = {"logit_lengths": [24, 17, 8, 3], "target_lengths": [3, 1, 5, 5]}
    batch = make_batch(B=4, T=24, U=40, V=6, durations=durations, omega=0.3, dtype=dtype, device=device, **lengths)
    ll = assert_lattice_matches(kernel, batch)
    node_lp, _ = make_node_lp(batch)
    alone, _ = run(kernel, batch.replace(options={}), node_lp)
    assert same_bits(ll[:1], alone)  # the TDT lattice does not notice the other
    assert ll[1].isfinite().all()
    with_other_weight, _ = run(kernel, batch.replace(options={"omega": 1.0}), node_lp)
    assert same_bits(with_other_weight, ll)


@pytest.mark.parametrize("T, U", [(9, 33), (70, 64), (2, 100)])
def test_ragged_rnnt_across_many_columns(kernel, device, T, U):
    lengths = {"logit_lengths": [T, T - 1, 1], "target_lengths": [U - 1, U, 32]}
    assert_lattice_matches(kernel, make_batch(B=3, T=T, U=U, durations=(), device=device, **lengths))


@pytest.mark.parametrize("U", [31, 32, 33, 64])
def test_durations_that_skip_frames_across_many_columns(kernel, device, U):
    assert_lattice_matches(
        kernel, make_batch(B=2, T=80, U=U, durations=(0, 3, 7), target_lengths=[U, U - 9], device=device)
    )


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_probabilities_beyond_every_float_range(kernel, device, scale):
    batch = make_batch(B=2, T=40, U=35, V=6, durations=(0, 1, 2, 3, 4), scale=scale, omega=0.5, device=device)
    ll = assert_lattice_matches(kernel, batch)
    assert ll.isfinite().all() and (ll < -745).all()  # exp(-745) is 0 in float64


def test_paths_of_very_different_probability_are_all_kept(kernel, device):
    # The best alignment by far is worth exp(-2000); a float64 exponent alone would lose it beside nodes near 1.
    batch = make_batch(T=20, U=10, V=4, durations=(0, 1), scale=0.0, dtype=torch.float64, device=device)
    batch.token_logits[:, 10:, :, 0] = -200.0
    assert_lattice_matches(kernel, batch)


def test_masked_arcs(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=5, durations=(0, 1, 2), device=device)
    batch.targets.fill_(3)
    batch.duration_logits[0, 2:4, :, 0] = -torch.inf
    batch.token_logits[0, 1, :2, 0] = -torch.inf  # at frame 1 no blank before the second label
    batch.token_logits[1, :, 1, 3] = -torch.inf  # the second label of sample 1 cannot be emitted
    for arcs in (batch, batch.without_durations()):
        ll = assert_lattice_matches(kernel, arcs)
        assert ll[0, 0].isfinite() and ll[0, 1] == -torch.inf


def test_no_alignment(kernel, device):
    lengths = {"logit_lengths": [3, 4, 0], "target_lengths": [3, 3, 0]}
    batch = make_batch(B=3, T=4, U=3, durations=(1,), omega=0.5, device=device, **lengths)
    ll = assert_lattice_matches(kernel, batch)
    assert ll.isneginf().tolist() == [[True, False, True], [False, False, True]]


def test_without_gradient_there_is_no_beta(kernel, device):
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], device=device)
    node_lp, _ = make_node_lp(batch)
    for options in ({}, {"omega": 0.5}):
        batch = batch.replace(options=options)
        ll, _ = run(kernel, batch, node_lp)
        ll_only, alpha_beta = run(kernel, batch, node_lp, need_grad=False)
        assert alpha_beta.shape == (0,)
        assert same_bits(ll_only, ll)


@pytest.mark.parametrize(
    "name, value", [("logit_lengths", -1), ("logit_lengths", 7), ("target_lengths", -1), ("target_lengths", 4)]
)
def test_malformed_length_marks_only_its_sample(kernel, device, name, value):
    batch = make_batch(B=3, T=6, U=3, omega=0.5, device=device)
    node_lp, _ = make_node_lp(batch)
    good, _ = run(kernel, batch, node_lp)
    getattr(batch, name)[1] = value
    ll, _ = run(kernel, batch, node_lp)
    assert (ll[:, 1] == torch.inf).all()
    assert same_bits(ll[:, [0, 2]], good[:, [0, 2]])


def test_nan_log_prob_reaches_only_its_sample(kernel, device):
    batch = make_batch(B=2, T=6, U=3, omega=0.5, device=device)
    node_lp, _ = make_node_lp(batch)
    good, _ = run(kernel, batch, node_lp)
    node_lp[1, 2, 1, BLANK_LP] = torch.nan
    ll, _ = run(kernel, batch, node_lp)
    assert ll[:, 1].isnan().all()
    assert same_bits(ll[:, 0], good[:, 0])
