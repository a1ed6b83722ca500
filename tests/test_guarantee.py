"""The guarantee of the fused losses, tested as what it is: bounds. Exact is the oracle, in float64, on lattices of every kind.

Operands are float64 here, so that rounding is next to nothing: what a bound may be missed by is `ULPS` of the numbers in it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.batches import BLANK_LP, DUR_LP, LABEL_LP
from support.lattices import (
    KINDS,
    SMALL_BAND,
    band_constants,
    expected,
    fused,
    inputs_of,
    make_lattice,
    trained_lattice,
)

ULPS = 1e-12
TOLERANCES = [1e-8, 1e-6, 1e-4, 1e-2, 1e-1]


@st.composite
def problems(draw, **fixed):
    """Small ragged batches of every kind, feasible or not, with the options that a bound must hold with."""
    T, U, V = draw(st.integers(1, 14)), draw(st.integers(0, 6)), draw(st.integers(48, 90))
    B = draw(st.integers(1, 3))
    durations = draw(st.sampled_from([(0, 1, 2, 3, 4), (), (1,), (0, 1), (0, 50), (2, 0, 3), (1, 1, 0)]))
    options = {"delay_penalty": draw(st.sampled_from([0.0, 0.0, 0.3, -1.0]))}
    if durations:
        options["omega"] = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    arguments = {
        "kind": draw(st.sampled_from(list(KINDS))),
        "labels": draw(st.sampled_from(["random", "random", "same", "blank"])),
        "B": B,
        "T": T,
        "U": U,
        "V": V,
        "durations": durations,
        "logit_lengths": draw(st.lists(st.integers(0, T), min_size=B, max_size=B)),
        "target_lengths": draw(st.lists(st.integers(0, U), min_size=B, max_size=B)),
        "bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(["relu", "tanh"])),
        "sigma": draw(st.sampled_from([0.0, 0.05, -0.05])),
        "seed": draw(st.integers(0, 2**16)),
        "options": options,
    }
    return make_lattice(**{**arguments, **fixed})


def exact_of(problem):
    """The oracle's result for the logits of all nodes, and those logits in float64, of hidden units in the dtype of theirs."""
    encoder, decoder, weight, bias = (None if x is None else x.double().cpu() for x in problem.operands)
    hidden = getattr(torch, problem.activation)(encoder[:, :, None] + decoder[:, None])
    if problem.encoder.dtype.itemsize == 2:
        hidden = hidden.to(problem.encoder.dtype).double()
    logits = torch.nn.functional.linear(hidden, weight, bias)
    x, z = logits.split([problem.vocab, len(problem.durations)], dim=-1)
    labels = [label.cpu() for label in problem.labels]
    result = oracle.tdt_loss(x, z, *labels, problem.blank, problem.durations, problem.sigma, **problem.options)
    return result, logits


def records_of(problem, logits):
    """(B, T, U1, record size) eq. 1 to 3 of all nodes by the oracle, -inf at those of the padding."""
    D = len(problem.durations)
    records = torch.full((*logits.shape[:3], (3 + D + 3) // 4 * 4), -torch.inf, dtype=torch.float64)
    for b, (T, U) in enumerate(zip(problem.logit_lengths.tolist(), problem.target_lengths.tolist())):
        x, z = logits[b, :T, : U + 1].split([problem.vocab, D], dim=-1)
        delay = problem.options.get("delay_penalty", 0.0)
        lp = oracle.log_probs(x, z, problem.targets[b, :U].cpu(), problem.blank, problem.sigma, delay)
        record = records[b, :T, : U + 1]
        record[..., BLANK_LP], record[..., LABEL_LP] = torch.from_numpy(lp.blank), torch.from_numpy(lp.label)
        record[..., DUR_LP : DUR_LP + D] = torch.from_numpy(lp.dur)
    return records


def upper_records(kernel, problem):
    """Upper bounds of the same numbers, by narrow rows; None where no row is valid."""
    inputs, p = inputs_of(kernel, problem, tolerance=1e-6)
    joint = kernel.tiles.Joint(inputs, p)
    extents = kernel.tiles.extents_of(inputs)
    rows = kernel.tiles.ValidRows(inputs, extents, kernel.band.BLOCK)
    if rows.valid == 0:
        return None
    bounds = kernel.band.make_bounds(joint, rows, inputs, p)
    D, shape = len(problem.durations), (*problem.encoder.shape[:2], problem.decoder.shape[1])
    node_lp = torch.full((*shape, (3 + D + 3) // 4 * 4), -torch.inf, dtype=joint.wide, device=problem.encoder.device)
    kernel.band.add_bounds(joint, bounds, rows, inputs, p, node_lp)
    return node_lp


def assert_at_most(name, lower, upper, slack):
    """Elementwise lower <= upper + slack; -inf is below everything."""
    lower, upper = (torch.as_tensor(x).detach().double().cpu() for x in (lower, upper))
    wrong = ~((lower <= upper + slack) | torch.isneginf(lower))
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()}, by up to {(lower - upper)[wrong].max().item():.3g}"
    )


def check_upper_bounds(kernel, problem, unit):
    """Every record by narrow rows is at least the exact one. `unit`: of rounding, relative to the size of the logits."""
    upper = upper_records(kernel, problem)
    if upper is None:
        return
    _, logits = exact_of(problem)
    exact, upper = records_of(problem, logits), upper.double().cpu()
    for name, field in {"blank": BLANK_LP, "label": LABEL_LP, "durations": slice(DUR_LP, None)}.items():
        assert_at_most(name, exact[..., field], upper[..., field], unit)


@pytest.mark.kernels_ci
@given(problem=problems(), pilots=st.sampled_from([1024, 3, 1]))
@settings(max_examples=60)
def test_narrow_rows_are_upper_bounds_of_every_arc(kernel, device, problem, pilots):
    with band_constants(kernel, _PILOTS=pilots, **SMALL_BAND):
        check_upper_bounds(kernel, problem.to(device), ULPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_rows_are_upper_bounds_with_rounding(kernel, device, dtype, kind):
    # Products are covered by the margin of the row. The entropies of the groups, sums of float32, are not.
    with band_constants(kernel, **SMALL_BAND):
        for seed in range(6):
            problem = make_lattice(
                kind, seed=seed, dtype=dtype, device=device, T=20, activation=("relu", "tanh")[seed % 2]
            )
            if all(x is None or x.isfinite().all() or x is problem.bias for x in problem.operands):
                check_upper_bounds(kernel, problem, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_narrow_rows_are_upper_bounds_of_a_trained_lattice(kernel, device, dtype):
    check_upper_bounds(kernel, trained_lattice(dtype, device), ULPS if dtype == torch.float64 else 2e-6)


@given(problem=problems(), share=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_any_set_of_exact_nodes_brackets_the_likelihood(kernel, device, problem, share, seed):
    """LL_lo <= LL <= LL_hi; the gap and the occupancies are below what the bounds say (B2), whatever the set."""
    problem = problem.to(device)
    upper = upper_records(kernel, problem)
    if upper is None:
        return
    result, logits = exact_of(problem)
    exact = records_of(problem, logits).to(device)
    inside = torch.rand(exact.shape[:3], generator=torch.Generator().manual_seed(seed)) < share
    inside = inside.to(device)
    inputs, p = inputs_of(kernel, problem, tolerance=1e-6)
    hi = torch.where(inside[..., None], exact, upper)
    lo = exact.masked_fill(~inside[..., None], -torch.inf)
    for records in (hi, lo):
        records[..., 0] = 1.0
    ll_hi, alpha_beta_hi = kernel.band._lattice(hi, inputs.labels, p)
    ll_lo, _ = kernel.band._lattice(lo, inputs.labels, p)
    slack = ULPS * (1 + result.ll.abs().nan_to_num(posinf=0.0))
    assert_at_most("LL_lo <= LL", ll_lo, result.ll, slack)
    assert_at_most("LL <= LL_hi", result.ll, ll_hi, slack)

    mass = kernel.band._mass(hi, alpha_beta_hi, ll_lo, inputs, p).double().cpu()
    feasible = result.losses.isfinite()
    exact_mass = mixed_occupancy(problem, logits)
    inside = inside.cpu()
    assert_at_most("occupancy", exact_mass[~inside], mass[~inside] * (1 + 1e-9), 1e-12)
    outside = mass.masked_fill(inside, 0.0).sum((1, 2))
    mixed = [1.0] if len(result.ll) == 1 else [1 - p.omega, p.omega]
    gap = sum(w * (true.cpu() - low.cpu()) for w, true, low in zip(mixed, result.ll, ll_lo) if w > 0)
    assert_at_most("gap", gap[feasible], torch.log1p(outside)[feasible], 1e-9 + slack.max())


def mixed_occupancy(problem, logits):
    """(B, T, U1) the occupancy of every node in the lattices of the loss, by the oracle."""
    D, labels = len(problem.durations), [label.cpu() for label in problem.labels]
    occupancy = torch.zeros(logits.shape[:3], dtype=torch.float64)
    for b, (T, U) in enumerate(zip(*(x.tolist() for x in labels[1:]))):
        x, z = logits[b, :T, : U + 1].split([problem.vocab, D], dim=-1)
        delay = problem.options.get("delay_penalty", 0.0)
        lp = oracle.log_probs(x, z, labels[0][b, :U], problem.blank, problem.sigma, delay)
        for term in oracle.terms(lp, problem.durations, problem.options.get("omega", 0.0)):
            if term.weight > 0:
                total = (term.blank_occ + term.label_occ).sum(-1)
                occupancy[b, :T, : U + 1] += term.weight * torch.from_numpy(total)
    return occupancy


@given(
    seed=st.integers(0, 2**16),
    tolerance=st.sampled_from([1e-8, 1e-4, 0.3]),
    loss=st.sampled_from([1e-9, 1e-3, 0.5, 40.0, torch.inf]),
    spread=st.sampled_from([0.5, 5.0, 30.0]),
)
def test_what_is_left_out_fits_the_budget(kernel, device, seed, tolerance, loss, spread):
    generator = torch.Generator().manual_seed(seed)
    mass = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64).mul(spread).exp() * tolerance / 30
    mass[mass > 1e6] = torch.inf
    mass[0, 0, 0], mass[1, 2, :3], mass[2, 6, 4] = torch.nan, 0.0, 1.0
    known = torch.rand(3, 7, 5, generator=generator) < 0.3
    ll = torch.tensor([[-loss, -loss, -100.0]], dtype=torch.float64)
    labels = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([7, 7, 7]), torch.tensor([4, 4, 4])
    given_known = known.to(torch.uint8).to(device)
    nodes, row_of_node, count, dropped = kernel.loss.ops.select_nodes_(
        given_known, mass.to(device), ll.to(device), *(x.to(device) for x in labels), 0.0, tolerance
    )
    nodes = nodes[: count.item()].cpu().long()
    kept = torch.zeros(mass.numel(), dtype=torch.bool)
    kept[nodes] = True
    kept = kept.view(mass.shape)
    assert torch.equal(nodes, nodes.sort().values)
    assert torch.equal(row_of_node.cpu().flatten()[nodes], torch.arange(len(nodes), dtype=torch.int32))
    assert torch.equal(given_known.cpu().bool(), known | kept) and not (kept & known).any()
    budget = tolerance * torch.tensor([min(1.0, max(loss, 1e-6))] * 2 + [1.0], dtype=torch.float64)
    left = mass.masked_fill(kept | known, 0.0)
    assert_at_most("mass left out", left.sum((1, 2)), dropped, 0.0)
    assert_at_most("dropped", dropped, budget, 0.0)
    assert (kept[mass.isnan() & ~known]).all()
    # What is kept weighs no less than what is left out, but for the width of a bin, 1/32 of an octave.
    for b in range(3):
        if (kept[b] & ~mass[b].isnan()).any() and left[b].max() > 2**-20 * budget[b]:
            assert mass[b][kept[b] & ~mass[b].isnan()].min() >= left[b].max() * 2 ** (-1 / 32) * (1 - 1e-6)


def check_loss_and_gap(problem, outcome, exact, tolerance, unit):
    """exact - rounding <= loss <= exact + gap + rounding; and a gap that keeps to the tolerance, of small losses too."""
    gap, stats = outcome.stats.gap.cpu(), outcome.stats
    finite = exact.isfinite()
    loss = outcome.loss.double().cpu()
    assert torch.equal(loss.isposinf(), exact.isposinf())
    rounding = unit * (1 + exact.abs().nan_to_num(posinf=0.0))
    assert_at_most("exact <= loss", exact[finite], loss[finite], rounding[finite])
    assert_at_most("loss <= exact + gap", loss[finite], (exact + gap)[finite], rounding[finite])
    allowed = torch.log1p(tolerance * exact.clamp(1e-6, 1.0).nan_to_num(posinf=1.0))
    assert_at_most("gap", gap, allowed, unit * tolerance)
    assert gap.dtype == torch.float64 and (gap >= 0).all()
    assert 0 <= stats.forward_rows <= stats.valid_rows == problem.nodes
    assert stats.live_rows <= stats.forward_rows


@pytest.mark.kernels_ci
@given(problem=problems(), tolerance=st.sampled_from(TOLERANCES))
@settings(max_examples=80)
def test_the_loss_is_that_of_all_rows_within_its_gap(kernel, device, problem, tolerance):
    with band_constants(kernel, **SMALL_BAND):
        outcome = fused(kernel, problem.to(device), tolerance=tolerance)
    check_loss_and_gap(problem, outcome, exact_of(problem)[0].losses, tolerance, ULPS)


@pytest.mark.parametrize("tolerance", [1e-8, 1e-6, 1e-3, 1e-1])
def test_the_loss_of_a_trained_lattice(kernel, device, tolerance):
    problem = trained_lattice(device=device)
    with band_constants(kernel, LEAST_OPERATIONS=0):
        outcome = fused(kernel, problem, tolerance=tolerance)
        check_left_out(kernel, problem, tolerance)
    check_loss_and_gap(problem, outcome, exact_of(problem)[0].losses, tolerance, ULPS)
    assert outcome.stats.forward_rows < 0.4 * outcome.stats.valid_rows


def check_left_out(kernel, problem, tolerance):
    """The occupancy of the nodes that forward has not computed adds up to no more than it says."""
    inputs, p = inputs_of(kernel, problem, tolerance)
    forward = kernel.fused_passes.fused_forward(inputs, p, True)
    node_lp = forward.outputs[1].double().cpu()
    computed = node_lp[..., BLANK_LP] > -torch.inf
    result, logits = exact_of(problem)
    occupancy = mixed_occupancy(problem, logits)
    left_out = occupancy.masked_fill(computed, 0.0).sum((1, 2))
    assert_at_most("occupancy left out", left_out, forward.dropped * (1 + 1e-9), 1e-12)
    assert_at_most("dropped", forward.dropped, tolerance * result.losses.clamp(1e-6, 1.0).nan_to_num(posinf=1.0), 1e-15)
    return forward


@pytest.mark.parametrize("tolerance", [1e-8, 1e-4, 1e-1])
@pytest.mark.parametrize("kind", ["peaked", "broad", "two ways", "hidden", "random"])
def test_the_occupancy_left_out(kernel, device, kind, tolerance):
    problem = make_lattice(kind, T=24, seed=3, device=device, options={"omega": 0.25})
    with band_constants(kernel, **SMALL_BAND):
        check_left_out(kernel, problem, tolerance)


def exposed(problem):
    """The same, but for a head that is the identity: the gradient of the encoder is that of the logits, summed over u."""
    N = len(problem.weight)
    generator = torch.Generator().manual_seed(5)
    size = {"generator": generator, "dtype": torch.float64}
    B, U1 = problem.decoder.shape[:2]
    hidden = torch.nn.functional.linear(problem.encoder, problem.weight) + 60.0
    decoder = 0.2 * torch.randn(B, U1, N, **size)
    return problem.replace(encoder=hidden, decoder=decoder, weight=torch.eye(N, dtype=torch.float64), bias=None)


@pytest.mark.parametrize("tolerance", [1e-8, 1e-6, 1e-4, 1e-2, 1e-1])
@pytest.mark.parametrize("kind", ["peaked", "broad", "two ways", "random"])
def test_the_gradient_of_the_logits_within_its_bound(kernel, device, kind, tolerance):
    """L1: at most 4 (T + U) rho, rho = 1 - exp(-gap), for the rows of forward; at most 2 dropped_mass for those of backward."""
    problem = exposed(make_lattice(kind, T=20, V=50, seed=1, B=3)).to(device)
    with band_constants(kernel, **SMALL_BAND):
        outcome = fused(kernel, problem, tolerance=tolerance)
    reference = expected(problem)
    rho = -torch.expm1(-outcome.stats.gap.cpu())
    steps = (problem.logit_lengths + problem.target_lengths).cpu()
    allowed = (4 * steps * rho).sum() + 2 * outcome.stats.dropped_mass.item()
    for name in ("encoder", "decoder"):
        error = (outcome.grads[name].cpu() - reference.grads[name]).abs().sum()
        assert error <= allowed + 1e-10, (name, error.item(), allowed.item())
    losses = reference.loss.clamp(max=1.0)
    assert outcome.stats.dropped_mass.item() <= 4 * tolerance * losses.sum().item() * (1 + 1e-6) + 1e-15


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", KINDS)
def test_tolerance_0_computes_every_valid_row(kernel, device, kind):
    problem = make_lattice(kind, device=device, logit_lengths=[12, 7], target_lengths=[5, 3])
    outcome = fused(kernel, problem, tolerance=0)
    assert outcome.stats.forward_rows == outcome.stats.valid_rows == problem.nodes
    assert (outcome.stats.gap == 0).all()
    assert outcome.stats.dropped_mass == 0
    check_loss_and_gap(problem, outcome, exact_of(problem)[0].losses, 0.0, ULPS)
