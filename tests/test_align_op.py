"""The op `align` from given log-probabilities: every alignment of tiny lattices, larger ones, and what is malformed.

The references of support/alignment.py sum in the same order, so scores are compared bit by bit. No durations: RNN-T.
"""

import pytest
import torch
from support.alignment import best_by_enumeration, best_by_recursion, make_node_lp, records_of
from support.batches import BLANK_LP, DUR_LP, DURATIONS, LABEL_LP, make_batch, record_size
from support.comparisons import same_bits


def run(kernel, batch, node_lp):
    return kernel.align.ops.align(node_lp, *batch.lengths, list(batch.durations), batch.token_logits.shape[-1])


def assert_sample(result, b, expected):
    """Sample b of (frames, durations, score) is `expected`, padded with -1; the score to the last bit."""
    frames, durations, score = result
    padding = [-1] * (frames.shape[1] - len(expected.frames))
    assert frames[b].tolist() == expected.frames + padding
    assert durations[b].tolist() == expected.durations + padding
    assert score[b].item() == torch.tensor(expected.score, dtype=score.dtype).item()


def assert_op_matches(kernel, batch, node_lp, reference=best_by_recursion):
    result = run(kernel, batch, node_lp)
    frames, label_durations, score = result
    assert frames.dtype == label_durations.dtype == torch.int64 and score.dtype == node_lp.dtype
    assert frames.shape == label_durations.shape == batch.targets.shape and score.shape == batch.logit_lengths.shape
    assert all(tensor.device == node_lp.device and tensor.is_contiguous() for tensor in result)
    for b in range(len(score)):
        assert_sample(result, b, reference(records_of(batch, node_lp, b), batch.durations))
    return result


@pytest.mark.kernels_ci
@pytest.mark.parametrize("durations", DURATIONS.values(), ids=DURATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_durations(kernel, device, durations, dtype):
    lengths = {"logit_lengths": [24, 17, 8], "target_lengths": [3, 1, 5]}
    batch = make_batch(durations=durations, B=3, T=24, U=5, V=6, sigma=0.05, device=device, **lengths)
    assert_op_matches(kernel, batch, make_node_lp(batch, dtype))


@pytest.mark.parametrize("T, U", [(1, 0), (1, 2), (2, 1), (3, 3), (5, 0), (5, 2), (6, 3)])
@pytest.mark.parametrize("durations", [(), (0, 1, 2), (1, 2), (2, 0, 1), (0, 1, 1), (1,)])
def test_all_alignments_of_tiny_lattices(kernel, device, durations, T, U):
    batch = make_batch(durations=durations, B=4, T=T, U=U, V=4, device=device)
    node_lp = make_node_lp(batch)
    assert_op_matches(kernel, batch, node_lp, best_by_enumeration)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("durations", [(), (0, 1, 2), (2, 0, 1), (2, 1, 0, 1, 2), (1, 2)])
def test_ties_of_tiny_lattices(kernel, device, durations, seed):
    # Weights from {0, -1/4, -1/2}: sums are exact, and most lattices have several best alignments.
    batch = make_batch(
        durations=durations, B=4, T=5, U=2, logit_lengths=[5, 4, 5, 3], target_lengths=[2, 2, 1, 0], device=device
    )
    shape = (*batch.token_logits.shape[:3], record_size(len(durations)))
    node_lp = -torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).double() / 4
    assert_op_matches(kernel, batch, node_lp.to(device), best_by_enumeration)


SHAPES = [(1, 0), (9, 0), (1, 5), (2, 3), (7, 100), (150, 2), (60, 70), *((5, U) for U in (31, 32, 33, 1025))]


@pytest.mark.parametrize("T, U", SHAPES)
@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_every_kind_of_shape(kernel, device, durations, T, U):
    batch = make_batch(durations=durations, T=T, U=U, V=4, device=device)
    assert_op_matches(kernel, batch, make_node_lp(batch))


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
def test_ragged_batch(kernel, device, durations):
    lengths = {"logit_lengths": [12, 1, 9, 5, 12], "target_lengths": [4, 0, 6, 6, 0]}
    batch = make_batch(durations=durations, B=5, T=12, U=6, device=device, **lengths)
    node_lp = make_node_lp(batch)
    frames, label_durations, score = assert_op_matches(kernel, batch, node_lp)
    node_lp[~batch.valid] = torch.nan  # padding is not read
    again = run(kernel, batch, node_lp)
    assert torch.equal(again[0], frames) and torch.equal(again[1], label_durations) and same_bits(again[2], score)


def test_no_alignment(kernel, device):
    lengths = {"logit_lengths": [3, 4, 0, 0], "target_lengths": [3, 3, 0, 2]}
    batch = make_batch(B=4, T=4, U=3, durations=(1,), device=device, **lengths)
    _, _, score = assert_op_matches(kernel, batch, make_node_lp(batch))
    assert score.isneginf().tolist() == [True, False, True, True]
    frames, score = kernel.rnnt_align(*batch.rnnt_args)
    assert score.isneginf().tolist() == [False, False, True, True] and (frames[2:] == -1).all()


def test_masked_arcs(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=5, durations=(0, 1, 2), device=device)
    batch.targets.fill_(3)
    batch.duration_logits[0, 2:4, :, 0] = -torch.inf
    batch.token_logits[0, 1, :, 0] = -torch.inf  # no blank at frame 1
    batch.token_logits[1, :, 1, 3] = -torch.inf  # the second label of sample 1 cannot be emitted
    _, _, score = assert_op_matches(kernel, batch, make_node_lp(batch))
    assert score[0].isfinite() and score[1] == -torch.inf


BAD_LENGTHS = [
    ("logit_lengths", -1),
    ("logit_lengths", 7),
    ("logit_lengths", -(2**62)),
    ("target_lengths", -1),
    ("target_lengths", 4),
    ("target_lengths", 2**33),
]


def assert_only_sample_1_is_nan(result, good):
    frames, durations, score = result
    assert score[1].isnan() and (frames[1] == -1).all() and (durations[1] == -1).all()
    for tensor, expected in zip(result, good):
        assert same_bits(tensor[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("name, value", BAD_LENGTHS)
def test_malformed_length_marks_only_its_sample(kernel, device, name, value):
    batch = make_batch(B=3, T=6, U=3, device=device)
    node_lp = make_node_lp(batch)
    good = run(kernel, batch, node_lp)
    getattr(batch, name)[1] = value
    assert_only_sample_1_is_nan(run(kernel, batch, node_lp), good)


@pytest.mark.parametrize("label", [-1, 7, 2**31 - 1, 2**40])
@pytest.mark.parametrize("T", [0, 6])
def test_label_outside_the_vocabulary_marks_only_its_sample(kernel, device, label, T):
    batch = make_batch(B=3, T=6, U=3, logit_lengths=[6, T, 6], device=device)
    node_lp = make_node_lp(batch)
    good = run(kernel, batch, node_lp)
    batch.targets[1, 2] = label
    assert_only_sample_1_is_nan(run(kernel, batch, node_lp), good)


@pytest.mark.parametrize("durations", [(), (0, 1, 2), (0, 4)])
def test_nan_at_any_valid_node_reachable_or_not(kernel, device, durations):
    # Sample b has its NaN at node b; the last field is the label's, which a node of the last column does not use.
    T, U = 6, 2
    batch = make_batch(durations=durations, B=T * (U + 1), T=T, U=U, device=device)
    clean = make_node_lp(batch)
    for field in [*range(DUR_LP, DUR_LP + len(durations)), BLANK_LP, LABEL_LP]:
        node_lp = clean.clone()
        for b in range(len(node_lp)):
            node_lp[b, b // (U + 1), b % (U + 1), field] = torch.nan
        frames, _, score = run(kernel, batch, node_lp)
        uses = torch.tensor([field != LABEL_LP or b % (U + 1) < U for b in range(len(node_lp))], device=device)
        assert torch.equal(score.isnan(), uses)
        assert (frames[uses] == -1).all()


def test_log_probs_of_any_size(kernel, device):
    batch = make_batch(B=2, T=20, U=6, durations=(0, 1, 2), scale=1e6, dtype=torch.float64, device=device)
    _, _, score = assert_op_matches(kernel, batch, make_node_lp(batch))
    assert score.isfinite().all() and (score < -1e6).all()


def test_the_op_checks_its_arguments(kernel, device):
    batch = make_batch(device=device)
    node_lp = make_node_lp(batch)
    run(kernel, batch, node_lp)
    for wrong in (node_lp[..., :4], node_lp.transpose(1, 2), node_lp.half(), node_lp[0]):
        with pytest.raises(RuntimeError):
            run(kernel, batch, wrong)
    with pytest.raises(RuntimeError):
        run(kernel, batch.replace(durations=(0, -1, 2)), node_lp)


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4), (0, 1, 9)])
def test_cuda_equals_cpu_to_the_last_bit(kernel, durations):
    # More than a block's threads on an anti-diagonal, and quantised weights, so that there are ties everywhere.
    B, T, U = 2, 1100, 1060
    generator = torch.Generator().manual_seed(0)
    node_lp = -torch.randint(0, 5, (B, T, U + 1, record_size(len(durations))), generator=generator).float() / 8
    targets, lengths = torch.zeros(B, U, dtype=torch.int64), (torch.tensor([T, 700]), torch.tensor([U, 345]))
    on_cpu = kernel.align.ops.align(node_lp, targets, *lengths, list(durations), 4)
    on_cuda = kernel.align.ops.align(
        node_lp.cuda(), targets.cuda(), *(length.cuda() for length in lengths), list(durations), 4
    )
    assert on_cpu[2].isfinite().all()
    for tensor, expected in zip(on_cuda, on_cpu):
        assert same_bits(tensor.cpu(), expected)
