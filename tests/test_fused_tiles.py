"""Tiles of the fused losses: whatever their size, the same loss and gradients; rows without occupancy are left out of backward."""

import pytest
import torch
from support.comparisons import same_bits
from support.fused import (
    NAMES,
    RAGGED,
    Outcome,
    assert_matches,
    assert_same_bits,
    errors,
    expected,
    fused,
    logits_of,
    make_problem,
)
from support.memory import peak_extra_bytes


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_many_tiles_equal_one(kernel, device, rows, dropout):
    problem = make_problem(U=6, T=12, dtype=torch.float64, activation="tanh", device=device)

    def run(**options):
        torch.manual_seed(3)
        return fused(kernel, problem, dropout=dropout, **options)

    tiled, whole = run(max_tile_bytes=rows * problem.tile_bytes), run()
    assert_matches(tiled, Outcome(whole.loss.cpu(), {name: grad.cpu() for name, grad in whole.grads.items()}), problem)
    assert_same_bits(tiled, run(max_tile_bytes=rows * problem.tile_bytes))


def test_nodes_are_listed_in_pieces(kernel, device, monkeypatch):
    problem = make_problem(device=device, **RAGGED)
    monkeypatch.setattr(kernel.tiles, "_LISTED", 10)
    assert_matches(fused(kernel, problem, max_tile_bytes=7 * problem.tile_bytes), expected(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_call_same_bits(kernel, device, dtype):
    problem = make_problem(B=3, T=60, U=20, V=50, H=64, dtype=dtype, device=device)
    first = fused(kernel, problem, max_tile_bytes=1 << 16)
    for _ in range(3):
        assert_same_bits(fused(kernel, problem, max_tile_bytes=1 << 16), first)


def test_a_tile_holds_at_least_a_row(kernel, device):
    problem = make_problem(B=1, T=3, U=1, device=device)
    assert_matches(fused(kernel, problem, max_tile_bytes=1), expected(problem), problem)


# Live rows


def sharp_problem(**rest):
    """Logits that follow the encoder, which says blank, but for frame 3, where it says the one label."""
    problem = make_problem(B=1, T=40, U=1, V=6, H=8, durations=(1,), dtype=torch.float64, **rest)
    problem.targets.fill_(2)
    encoder, weight = torch.zeros_like(problem.encoder), torch.zeros_like(problem.weight)
    encoder[:, :, 0], encoder[:, 3, 0], encoder[:, 3, 1] = 1.0, 0.0, 1.0
    weight[5, 0], weight[2, 1] = 1.0, 1.0
    return problem.replace(encoder=encoder * 30, decoder=problem.decoder * 0.1, weight=weight * 30, bias=None)


def test_rows_without_occupancy_are_skipped_exactly(kernel, device):
    problem = sharp_problem(device=device)
    single = problem.to(torch.float32)
    outcome = fused(kernel, single)
    assert outcome.stats.live_rows < outcome.stats.valid_rows == 80
    assert outcome.stats.dropped_mass == 0
    assert_matches(outcome, expected(problem), single)


def test_occupancy_threshold(kernel, device):
    problem = make_problem(T=20, dtype=torch.float64, device=device)
    exact = fused(kernel, problem)
    assert exact.stats.live_rows == exact.stats.valid_rows
    previous = exact.stats.live_rows
    for threshold in (1e-3, 1e-2, 0.1):
        outcome = fused(kernel, problem, occupancy_threshold=threshold)
        assert 0 < outcome.stats.live_rows < previous
        previous = outcome.stats.live_rows
        assert same_bits(outcome.loss, exact.loss)
        # The bias' gradient is the sum of the gradients of the logits: what it lacks is part of the dropped mass.
        missing = (outcome.grads["bias"] - exact.grads["bias"]).abs().split([problem.vocab, len(problem.durations)])
        assert 0 < outcome.stats.dropped_mass < 2 * threshold * outcome.stats.valid_rows
        assert all(part.sum() <= outcome.stats.dropped_mass for part in missing)


def test_node_occupancy(kernel, device):
    problem = make_problem(
        dtype=torch.float64, device=device, options={"omega": 0.25, "fastemit_lambda": 0.5}, **RAGGED
    )
    ops = kernel.loss.ops
    logits = logits_of(problem.operands, "relu")
    durations = list(problem.durations)
    node_lp, _ = ops.log_probs(logits, None, *problem.labels, problem.blank, len(durations), 0.0, 0.0)
    occupancy = 0
    for share, arcs, omega in ((0.75, durations, 0.0), (0.25, [], 0.0)):
        alone = node_lp if arcs else node_lp[..., :4].contiguous()
        saved = ops.lattice(alone, *problem.labels, arcs, problem.vocab, omega, True)
        blank, label = ops.occupancy(alone, *saved, *problem.labels, arcs, problem.vocab)
        total = blank + 1.5 * label
        occupancy = occupancy + share * (total.sum(-1) if arcs else total)
    saved = ops.lattice(node_lp, *problem.labels, durations, problem.vocab, 0.25, True)
    actual = ops.node_occupancy(node_lp, *saved, *problem.labels, durations, problem.vocab, 0.25, 0.5)
    torch.testing.assert_close(actual, occupancy, rtol=1e-12, atol=1e-14)


def test_stats_before_backward(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    call = (*problem.operands, *problem.labels, problem.blank, list(problem.durations))
    loss, stats = kernel.tdt_loss_fused_joint(*call, return_stats=True)
    assert (stats.valid_rows, stats.live_rows, stats.dropped_mass) == (problem.nodes, None, None)
    assert same_bits(loss, kernel.tdt_loss_fused_joint(*call))


def test_sums_over_many_tiles_do_not_lose_precision(kernel, device):
    problem = make_problem(B=2, T=60, U=12, V=30, H=32, dtype=torch.bfloat16, device=device)
    reference = expected(problem)
    whole, tiled = (
        errors(fused(kernel, problem, max_tile_bytes=n), reference) for n in (1 << 28, problem.tile_bytes * 8)
    )
    assert all(tiled[name] <= 1.05 * whole[name] + 1e-5 for name in NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_a_tile_and_a_few_numbers_per_node(kernel, device, dtype):
    problem = make_problem(B=4, T=100, U=30, V=507, H=64, durations=(0, 1, 2, 3, 4), dtype=dtype, device=device)
    nodes, tile = problem.nodes, 1 << 20
    leaves = [x.requires_grad_() for x in problem.operands]

    def step():
        kernel.tdt_loss_fused_joint(
            *leaves, *problem.labels, problem.blank, [0, 1, 2, 3, 4], max_tile_bytes=tile
        ).backward()

    step()
    parameters = 4 * sum(x.numel() for x in leaves)
    assert peak_extra_bytes(step, device) < tile + 100 * nodes + 5 * parameters
    assert tile + 100 * nodes + 5 * parameters < 0.2 * nodes * 512 * 4
