"""Forced alignment: `tdt_align`, `tdt_align_joint` and `rnnt_align`, from logits. test_align_op.py has the op behind them."""

import pytest
import torch
from support.alignment import best_by_recursion, make_node_lp, records_of
from support.batches import make_batch
from support.comparisons import same_bits
from support.tolerances import DTYPES, TOLERANCE

LOGITS = ("token_logits", "duration_logits")
LENGTHS = {"logit_lengths": [9, 7, 4], "target_lengths": [3, 2, 4]}


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
