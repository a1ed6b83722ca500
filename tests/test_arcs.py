"""Which arcs a node has: where they land, the final blank, durations beyond the end. The loss, the occupancies and the best alignment each ask the
same rule, and each is held against the enumeration of every alignment. Beside it, the size of a node's record, which Python and C++ both count."""

import oracle
import pytest
import torch
from conftest import make_batch

DURATIONS = [(), (1,), (0, 1), (0, 1, 2), (2,), (3, 1), (1, 1, 0), (0, 4), (5, 1), (1, 2**40)]
SIZES = [(T, U) for T in (1, 2, 3, 4) for U in (0, 1, 2)]


def log_probs_of(batch):
    x, z = batch.token_logits[0], batch.duration_logits[0]
    return oracle.log_probs(x, z, batch.targets[0], batch.blank, batch.sigma)


def score(lp, durations, path):
    arcs = (
        (lp.label if is_label else lp.blank)[t, u] + (lp.dur[t, u, i] if durations else 0) for t, u, is_label, i in path
    )
    return sum(arcs)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_arcs_are_those_of_all_alignments(kernel, device, durations):
    for seed, (T, U) in enumerate(SIZES):
        batch = make_batch(T=T, U=U, durations=durations, sigma=0.05, dtype=torch.float64, device=device, seed=seed)
        paths = list(oracle.enumerate_alignments(T, U, durations))
        used = torch.zeros(2, T, U + 1, max(len(durations), 1), dtype=torch.bool)
        for path in paths:
            for t, u, is_label, i in path:
                used[int(is_label), t, u, i] = True
        if durations:
            loss, occupancy = kernel.tdt_loss(*batch.args, reduction="none", return_occupancy=True)
            alignment = kernel.tdt_align(*batch.args)
        else:
            loss, occupancy = kernel.rnnt_loss(*batch.rnnt_args, "none", sigma=batch.sigma, return_occupancy=True)
            alignment = kernel.rnnt_align(*batch.rnnt_args, sigma=batch.sigma)
        actual = torch.stack([occ.cpu().view(used.shape[1:]) for occ in occupancy])
        assert torch.equal(actual > 0, used), (T, U)

        lp = log_probs_of(batch)
        ll, *expected = oracle.brute_force(lp, durations)
        best = max((score(lp, durations, path) for path in paths), default=-float("inf"))
        assert loss.item() == pytest.approx(-ll, rel=1e-12), (T, U)
        assert alignment.score.item() == pytest.approx(best, rel=1e-12), (T, U)
        for own, exact in zip(actual, expected):
            torch.testing.assert_close(own, torch.from_numpy(exact), rtol=1e-11, atol=1e-13)


@pytest.mark.kernels_ci
def test_python_and_the_ops_agree_on_the_size_of_a_record(kernel):
    for D in range(65):
        batch = make_batch(T=1, U=0, durations=tuple(range(D)))
        node_lp, _ = kernel.loss.ops.log_probs(*batch.op_logits(), *batch.lengths, 0, D, 0.0, 0.0)
        assert kernel.fakes.record_size(D) == node_lp.shape[-1], D
