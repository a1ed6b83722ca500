"""Forced alignment: the op `align` from given log-probabilities, and `tdt_align`, `tdt_align_joint` and `rnnt_align`.

The op is held against an enumeration of all alignments of tiny lattices and, for larger ones, against a float64 recursion over arcs in plain Python.
Both sum in the order of best(t, u) = weight + best(target), so scores are compared bit by bit. No durations stands for RNN-T, as in the op.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from support import oracle
from support.batches import BLANK_LP, DUR_LP, DURATIONS, LABEL_LP, make_batch
from support.comparisons import same_bits
from support.tolerances import DTYPES, TOLERANCE

LOGITS = ("token_logits", "duration_logits")
LENGTHS = {"logit_lengths": [9, 7, 4], "target_lengths": [3, 2, 4]}


class Alignment(NamedTuple):
    frames: list
    durations: list
    score: float


NO_ALIGNMENT = Alignment([], [], -np.inf)


def arcs_of(durations):
    """(is_label, d, i) of all arcs, the preferred ones first."""
    if not durations:
        return [(True, 0, 0), (False, 1, 0)]
    arcs = [(is_label, d, i) for i, d in enumerate(durations) for is_label in (True, False) if is_label or d > 0]
    return sorted(arcs, key=lambda arc: (not arc[0], arc[1], arc[2]))


def weight_of(record, is_label, i, durations):
    """Log-weight of an arc from a node's record: blank_lp, label_lp, dur_lp."""
    return record[LABEL_LP if is_label else BLANK_LP] + (record[DUR_LP + i] if durations else 0.0)


def alignment_of(path, durations, score):
    """What is said about a path of arcs (t, u, is_label, i)."""
    labels = [(t, durations[i] if durations else 0) for t, _, is_label, i in path if is_label]
    return Alignment([t for t, _ in labels], [d for _, d in labels], score)


def best_by_recursion(records, durations):
    """The best alignment of one sample, from its records (T, U+1, R) in float64."""
    T, U1, _ = records.shape
    if T == 0:
        return NO_ALIGNMENT
    best, choice = {}, {}
    for t in reversed(range(T)):
        for u in reversed(range(U1)):
            best[t, u], choice[t, u] = -np.inf, None
            for is_label, d, i in arcs_of(durations):
                to = (t + d, u + is_label)
                if to[0] < T and to[1] < U1:
                    onward = best[to]
                elif not is_label and to == (T, U1 - 1):
                    onward = 0.0
                else:
                    continue
                score = weight_of(records[t, u], is_label, i, durations) + onward
                if score > best[t, u]:
                    best[t, u], choice[t, u] = score, (is_label, d, i)
    if best[0, 0] == -np.inf:
        return NO_ALIGNMENT
    path, t, u = [], 0, 0
    while t < T:
        is_label, d, i = choice[t, u]
        path.append((t, u, is_label, i))
        t, u = t + d, u + is_label
    return alignment_of(path, durations, best[0, 0])


def best_by_enumeration(records, durations):
    """The same, over all alignments one by one."""
    T, U1, _ = records.shape

    def score_of(path):
        score = 0.0
        for t, u, is_label, i in reversed(path):
            score = weight_of(records[t, u], is_label, i, durations) + score
        return score

    def preference(path):
        return [(not is_label, durations[i] if durations else 0, i) for _, _, is_label, i in path]

    paths = list(oracle.enumerate_alignments(T, U1 - 1, durations))
    scores = [score_of(path) for path in paths]
    top = max(scores, default=-np.inf)
    if top == -np.inf:
        return NO_ALIGNMENT
    return alignment_of(min((p for p, s in zip(paths, scores) if s == top), key=preference), durations, top)


def record_size(durations):
    return (3 + len(durations) + 3) // 4 * 4


def make_node_lp(batch, dtype=torch.float64):
    """The records of the batch in `dtype`, 0 in the padding."""
    return batch.expected_node_lp.to(dtype, copy=True)


def records_of(batch, node_lp, b):
    T, U = int(batch.logit_lengths[b]), int(batch.target_lengths[b])
    return node_lp[b, :T, : U + 1].double().cpu().numpy()


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


# The op


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
    shape = (*batch.token_logits.shape[:3], record_size(durations))
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


# The functions


def align(kernel, batch, api):
    """TDTAlignment, or for api "rnnt" RNNTAlignment, of a batch."""
    if api == "rnnt":
        return kernel.rnnt_align(*batch.rnnt_args, sigma=batch.sigma, **batch.options)
    if api == "joint":
        return kernel.tdt_align_joint(*batch.joint_args, **batch.options)
    return kernel.tdt_align(*batch.args, **batch.options)


def assert_alignments_match(alignment, batch, api):
    """The reference's alignment from the oracle's log-probabilities; its score within their rounding."""
    assert type(alignment).__name__ == ("RNNTAlignment" if api == "rnnt" else "TDTAlignment")
    batch, dtype = batch.without_durations() if api == "rnnt" else batch, batch.token_logits.dtype
    assert alignment.score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert alignment.frames.dtype == torch.int64 and alignment.frames.shape == batch.targets.shape
    node_lp = make_node_lp(batch)
    for b in range(len(alignment.score)):
        expected = best_by_recursion(records_of(batch, node_lp, b), batch.durations)
        padding = [-1] * (batch.targets.shape[1] - len(expected.frames))
        assert alignment.frames[b].tolist() == expected.frames + padding
        if api != "rnnt":
            assert alignment.durations[b].tolist() == expected.durations + padding
        # An error for every nat of a log-probability and one more for each arc's, of tokens and duration, and the penalties.
        nats = abs(expected.score) + (2 + 2 * batch.penalty) * int(batch.logit_lengths[b] + batch.target_lengths[b])
        assert alignment.score[b].item() == pytest.approx(expected.score, rel=0, abs=TOLERANCE[dtype].log_prob * nats)


@pytest.fixture(params=["separate", "joint", "rnnt"])
def api(request):
    return request.param


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_and_score(kernel, device, api, dtype):
    batch = make_batch(B=3, T=9, U=4, V=11, sigma=0.05, scale=2.0, dtype=dtype, device=device, **LENGTHS)
    assert_alignments_match(align(kernel, batch, api), batch, api)


@pytest.mark.parametrize("scale", [1.0, 5.0, 60.0])
def test_score_is_at_most_the_log_likelihood_and_close_in_a_sharp_lattice(kernel, device, api, scale):
    batch = make_batch(B=3, T=9, U=4, scale=scale, dtype=torch.float64, device=device, **LENGTHS)
    loss = {"separate": kernel.tdt_loss, "joint": kernel.tdt_loss_joint, "rnnt": kernel.rnnt_loss}[api]
    losses = loss(
        *(batch.rnnt_args if api == "rnnt" else batch.joint_args if api == "joint" else batch.args), reduction="none"
    )
    score = align(kernel, batch, api).score
    assert (score <= -losses + 1e-12 * losses).all()
    if scale == 60.0:
        torch.testing.assert_close(score, -losses, rtol=1e-3, atol=0)
    else:
        assert (score < -losses).all()


def test_finds_a_given_alignment(kernel, device):
    durations = (0, 1, 2, 3, 4)
    batch = make_batch(T=12, U=4, durations=durations, scale=0.1, device=device)
    path = [(0, 0, False, 2), (2, 0, True, 0), (2, 1, True, 3), (5, 2, False, 1), (6, 2, True, 4), (10, 3, True, 1)]
    for t, u, is_label, i in [*path, (11, 4, False, 1)]:
        batch.token_logits[0, t, u, batch.targets[0, u] if is_label else batch.blank] += 20.0
        batch.duration_logits[0, t, u, i] += 20.0
    alignment = align(kernel, batch, "separate")
    assert alignment.frames.tolist() == [[2, 2, 6, 10]] and alignment.durations.tolist() == [[0, 3, 4, 1]]
    assert -1e-3 < alignment.score.item() <= 0


def test_equal_logits_take_labels_first_and_as_few_arcs_as_possible(kernel, device):
    batch = make_batch(T=8, U=2, durations=(4, 0, 1, 2, 3), scale=0.0, device=device)
    alignment = align(kernel, batch, "separate")
    # Three arcs are the fewest: two labels and the exit. The first label is as short as leaves the other two enough.
    assert alignment.frames.tolist() == [[0, 0]] and alignment.durations.tolist() == [[0, 4]]
    assert align(kernel, batch, "rnnt").frames.tolist() == [[0, 0]]


def test_a_label_equal_to_blank_comes_before_the_blank(kernel, device, api):
    batch = make_batch(B=2, T=6, U=2, scale=0.0, device=device)
    batch.targets.fill_(batch.blank)
    batch.token_logits[..., batch.blank] = 1.5
    alignment = align(kernel, batch, api)
    assert alignment.frames.tolist() == [[0, 0]] * 2 if api == "rnnt" else (alignment.frames[:, 0] == 0).all()
    assert_alignments_match(alignment, batch, api)


def test_blank_anywhere_and_counted_from_the_end(kernel, device, api):
    for blank in (0, 3, 6, -1, -7):
        batch = make_batch(B=3, T=9, U=4, blank=blank, dtype=torch.float64, device=device, **LENGTHS)
        assert_alignments_match(align(kernel, batch, api), batch, api)


def test_nan_logits_at_a_valid_node(kernel, device, api):
    batch = make_batch(B=3, T=9, U=4, device=device, **LENGTHS)
    good = align(kernel, batch, api)
    for bad in (torch.nan, torch.inf):
        batch.token_logits[1, 3, 1, 2] = bad
        result = align(kernel, batch.replace(), api)
        assert result.score[1].isnan() and (result.frames[1] == -1).all()
        for tensor, expected in zip(result, good):
            assert same_bits(tensor[[0, 2]], expected[[0, 2]])


def test_targets_wider_than_the_logits(kernel, device, api):
    batch = make_batch(B=3, T=9, U=4, device=device, **LENGTHS)
    expected = align(kernel, batch, api)
    garbage = torch.full((3, 3), -100, device=device)
    wider = align(kernel, batch.replace(targets=torch.cat([batch.targets, garbage], dim=1)), api)
    assert wider.frames.shape == (3, 7) and (wider.frames[:, 4:] == -1).all()
    assert torch.equal(wider.frames[:, :4], expected.frames) and same_bits(wider.score, expected.score)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint8, torch.int16])
def test_integer_dtypes_and_other_devices_of_targets_and_lengths(kernel, device, api, index_dtype):
    batch = make_batch(B=3, T=9, U=4, device=device, **LENGTHS)
    expected = align(kernel, batch, api)
    names = ("targets", "logit_lengths", "target_lengths")
    on_host = batch.replace(**{name: getattr(batch, name).to("cpu", index_dtype) for name in names})
    for tensor, wanted in zip(align(kernel, on_host, api), expected):
        assert same_bits(tensor, wanted)


def test_layouts(kernel, device):
    batch = make_batch(B=3, T=9, U=4, V=13, dtype=torch.float64, device=device, **LENGTHS)
    V = batch.token_logits.shape[-1]
    layouts = [
        batch.replace(token_logits=batch.joint[..., :V], duration_logits=batch.joint[..., V:]),
        batch.replace(token_logits=batch.token_logits.transpose(1, 2).contiguous().transpose(1, 2)),
        batch.replace(token_logits=batch.token_logits.movedim(3, 0).contiguous().movedim(0, 3)),  # copied
        batch.replace(targets=batch.targets.t().contiguous().t()),
    ]
    for layout in layouts:
        assert_alignments_match(align(kernel, layout, "separate"), batch, "separate")


@pytest.mark.parametrize("B, T, U", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
def test_empty_sizes(kernel, device, api, B, T, U):
    batch = make_batch(B=B, T=T, U=U, target_lengths=[0] * B, device=device)
    alignment = align(kernel, batch, api)
    assert alignment.frames.shape == (B, U) and alignment.score.shape == (B,)
    assert (alignment.frames == -1).all()
    assert_alignments_match(alignment, batch, api)


def test_logits_that_require_grad(kernel, device, api):
    batch = make_batch(B=3, T=9, U=4, device=device, **LENGTHS)
    expected = align(kernel, batch, api)
    tokens, durations = batch.leaves()
    alignment = align(kernel, batch.replace(token_logits=tokens, duration_logits=durations), api)
    for tensor, wanted in zip(alignment, expected):
        assert not tensor.requires_grad and same_bits(tensor, wanted)
    assert torch.equal(tokens, batch.token_logits) and torch.equal(durations, batch.duration_logits)


@pytest.mark.parametrize("delay_penalty", [-0.3, 0.1, 2.0])
def test_delay_penalty(kernel, device, api, delay_penalty):
    batch = make_batch(B=3, T=9, U=4, dtype=torch.float64, delay_penalty=delay_penalty, device=device, **LENGTHS)
    assert_alignments_match(align(kernel, batch, api), batch, api)


def test_delay_penalty_moves_labels_to_earlier_frames(kernel, device, api):
    batch = make_batch(B=3, T=20, U=4, logit_lengths=[20, 16, 9], scale=3.0, device=device)
    sums = [
        align(kernel, batch.replace(options={"delay_penalty": penalty}), api).frames.sum(1)
        for penalty in (-100.0, -1.0, 0.0, 1.0, 100.0)
    ]
    assert all((later >= earlier).all() for later, earlier in zip(sums, sums[1:]))
    assert (sums[0] > sums[2]).all() and (sums[2] > sums[4]).all()
    assert (sums[4] == 0).all()  # all labels at frame 0: durations 0 allow it


def test_errors(kernel, device, api):
    batch = make_batch(B=2, device=device)
    for penalty in (float("nan"), float("inf"), 1e5):
        with pytest.raises(ValueError, match="delay_penalty"):
            align(kernel, batch.replace(options={"delay_penalty": penalty}), api)
    with pytest.raises(TypeError, match="delay_penalty"):
        align(kernel, batch.replace(options={"delay_penalty": "much"}), api)
    with pytest.raises(TypeError, match="sigma"):
        align(kernel, batch.replace(sigma="much"), api)
    changes = {
        "targets": (batch.targets[:, :2], ValueError),
        "logit_lengths": (torch.tensor([3, 6]), ValueError),
        "target_lengths": (torch.tensor([1.0, 2.0]), TypeError),
        "blank": (7, ValueError),
    }
    for name, (value, exception) in changes.items():
        with pytest.raises(exception, match="blank_token_id" if name == "blank" else name):
            align(kernel, batch.replace(**{name: value}), api)
    with pytest.raises((TypeError, ValueError), match="logits"):
        align(kernel, batch.replace(**{name: getattr(batch, name).long() for name in LOGITS}), api)
    if api != "rnnt":
        for durations in ((), (0, 0, 0), (0, 1, -1)):
            with pytest.raises(ValueError, match="durations"):
                align(kernel, batch.replace(durations=durations), api)


# On a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4), (0, 1, 9)])
def test_cuda_equals_cpu_to_the_last_bit(kernel, durations):
    # More than a block's threads on an anti-diagonal, and quantised weights, so that there are ties everywhere.
    B, T, U = 2, 1100, 1060
    generator = torch.Generator().manual_seed(0)
    node_lp = -torch.randint(0, 5, (B, T, U + 1, record_size(durations)), generator=generator).float() / 8
    targets, lengths = torch.zeros(B, U, dtype=torch.int64), (torch.tensor([T, 700]), torch.tensor([U, 345]))
    on_cpu = kernel.align.ops.align(node_lp, targets, *lengths, list(durations), 4)
    on_cuda = kernel.align.ops.align(
        node_lp.cuda(), targets.cuda(), *(length.cuda() for length in lengths), list(durations), 4
    )
    assert on_cpu[2].isfinite().all()
    for tensor, expected in zip(on_cuda, on_cpu):
        assert same_bits(tensor.cpu(), expected)


@pytest.mark.cuda
def test_malformed_values_on_the_gpu(kernel, api):
    batch = make_batch(B=3, T=6, U=3, device="cuda")
    good = align(kernel, batch, api)
    for name, index, value in (("logit_lengths", (1,), 9), ("target_lengths", (1,), -1), ("targets", (1, 0), 7)):
        bad = batch.replace(**{name: getattr(batch, name).clone()})
        getattr(bad, name)[index] = value
        result = align(kernel, bad, api)
        assert result.score[1].isnan() and (result.frames[1] == -1).all()
        for tensor, expected in zip(result, good):
            assert same_bits(tensor[[0, 2]], expected[[0, 2]])


@pytest.mark.cuda
def test_no_host_synchronization(kernel, api):
    batch = make_batch(B=3, T=9, U=4, device="cuda", **LENGTHS)
    batch.joint  # noqa: B018  made here, not below
    expected = align(kernel, batch, api)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = align(kernel, batch, api)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor, wanted in zip(result, expected):
        assert same_bits(tensor, wanted)


@pytest.mark.cuda
def test_cuda_graph(kernel):
    static = make_batch(B=3, T=9, U=4, device="cuda", **LENGTHS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        align(kernel, static, "separate")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = align(kernel, static, "separate")
    for seed in range(1, 4):
        fresh = make_batch(B=3, T=9, U=4, device="cuda", seed=seed, logit_lengths=[9 - seed, 7, 4 + seed])
        for name in ("token_logits", "duration_logits", "targets", "logit_lengths", "target_lengths"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        for tensor, expected in zip(captured, align(kernel, fresh, "separate")):
            assert same_bits(tensor, expected)


@pytest.mark.cuda
def test_side_stream(kernel):
    # The inputs appear on the side stream late; a launch on any other stream would read zeros.
    batch = make_batch(B=3, T=9, U=4, device="cuda", **LENGTHS)
    expected = align(kernel, batch, "separate")
    late = batch.replace(token_logits=torch.zeros_like(batch.token_logits))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.token_logits.copy_(batch.token_logits)
        result = align(kernel, late, "separate")
    stream.synchronize()
    for tensor, wanted in zip(result, expected):
        assert same_bits(tensor, wanted)
