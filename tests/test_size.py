"""Sizes far from the usual: offsets beyond 2^31 and 2^32, batches, lattices and vocabularies of every extreme; right values, time in proportion."""

import math
import time
from pathlib import Path

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import assert_matches, same_bits
from support.known_values import loss_of_durations_0_1, loss_of_durations_1, loss_of_rnnt

KINDS = {"tdt 0 1": (0, 1), "tdt 1": (1,), "rnnt": ()}
every_kind = pytest.mark.parametrize("durations", KINDS.values(), ids=KINDS.keys())


def loss_of(durations, T, U, V):
    """The loss of a sample with equal logits."""
    return {(0, 1): loss_of_durations_0_1, (1,): loss_of_durations_1, (): loss_of_rnnt}[durations](T, U, V)


def arcs_of(durations, T, U):
    """How many arcs an alignment has, where all have as many."""
    return {(1,): T, (): T + U}.get(durations)


def with_equal_logits(B, T, U, V, durations, device, dtype=torch.float32):
    """Joint logits of zeros and the rest of the arguments: label 1 everywhere, blank 0, full lengths."""
    logits = torch.zeros(B, T, U + 1, V + len(durations), dtype=dtype, device=device)
    return logits, labels_of(B, T, U, device)


def labels_of(B, T, U, device):
    targets = torch.ones(B, U, dtype=torch.int64, device=device)
    return targets, torch.full((B,), T, device=device), torch.full((B,), U, device=device)


def run(kernel, logits, labels, durations, **options):
    """Losses, and the gradient of their sum."""
    logits = logits.detach().requires_grad_()
    if durations:
        losses = kernel.tdt_loss_joint(logits, *labels, 0, list(durations), reduction="none", **options)
    else:
        losses = kernel.rnnt_loss(logits, *labels, 0, "none", **options)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), grad


def assert_values(losses, grad, T, U, V, durations):
    """Losses, and what the gradient of one sample adds up to, in closed form."""
    expected = torch.full_like(losses, loss_of(durations, T, U, V), dtype=torch.float64)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)
    rounding = 1e-5 if grad.dtype == torch.float32 else 1e-2
    # Every alignment visits (0, 0) and (T - 1, U), and each of its arcs leaves G / V at a token that is neither label nor blank.
    first, last = grad[-1, 0, 0].double(), grad[-1, T - 1, U].double()
    for node in (first, last):
        assert node[2].item() == pytest.approx(1 / V, rel=rounding)
        assert node[:V].sum().item() == pytest.approx(0, abs=rounding * 10)
    assert last[0].item() == pytest.approx(1 / V - 1, rel=rounding)
    arcs = arcs_of(durations, T, U)
    if arcs is not None:
        visits = grad[-1, :, :, 2].double().sum().item() * V
        assert visits == pytest.approx(arcs, rel=rounding)


# Offsets


@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("durations", [(0, 1, 2), ()], ids=["tdt", "rnnt"])
def test_rows_further_apart_than_2_to_the_32_elements(kernel, device, durations, inplace_grad):
    # Memory that nobody touches costs nothing on the host.
    batch = make_batch(B=2, T=2, U=1, V=5, durations=durations, dtype=torch.bfloat16, device=device)
    strides = (2**32, 2**31, 64, 1)
    extent = strides[0] + strides[1] + strides[2] + 8
    if device == "cpu" and extent * 2 > memory_of_the_host():
        pytest.skip("needs 13 GB of address space")
    logits = batch.joint if durations else batch.token_logits
    far = torch.empty(extent, dtype=torch.bfloat16, device=device).as_strided(logits.shape, strides)
    far.copy_(logits)
    labels = batch.lengths
    losses, grad = run(kernel, logits.clone(), labels, durations)
    far_losses, far_grad = run(kernel, far, labels, durations, inplace_grad=inplace_grad)
    assert same_bits(far_losses, losses) and same_bits(far_grad, grad)
    assert (far_grad.data_ptr() == far.data_ptr()) == inplace_grad


def memory_of_the_host():
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemTotal"].split()[0]) * 1024


@pytest.mark.cuda
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_one_sample_beyond_2_to_the_32_elements(kernel, durations, dtype):
    T, U, V = 2100, 499, 4096
    logits, labels = with_equal_logits(1, T, U, V, durations, "cuda", dtype)
    assert logits.numel() > 2**32
    losses, grad = run(kernel, logits, labels, durations)
    assert_values(losses, grad, T, U, V, durations)
    losses_in_place, grad_in_place = run(kernel, logits, labels, durations, inplace_grad=True)
    assert same_bits(losses_in_place, losses)
    assert torch.equal(grad_in_place, grad)


@pytest.mark.cuda
@every_kind
def test_a_batch_beyond_2_to_the_32_elements(kernel, durations):
    B, T, U, V = 66, 256, 63, 4096
    logits, labels = with_equal_logits(B, T, U, V, durations, "cuda", torch.float16)
    assert logits.numel() > 2**32
    losses, grad = run(kernel, logits, labels, durations)
    assert_values(losses, grad, T, U, V, durations)
    for b in (1, B // 2, B - 1):
        assert torch.equal(grad[b], grad[0])


@pytest.mark.cuda
def test_two_tensors_beyond_2_to_the_32_elements(kernel):
    T, U, V = 2100, 499, 4096
    tokens, labels = with_equal_logits(1, T, U, V, (), "cuda", torch.bfloat16)
    durations = torch.zeros(1, T, U + 1, 1, dtype=torch.bfloat16, device="cuda")
    tokens.requires_grad_()
    loss = kernel.tdt_loss(tokens, durations, *labels, 0, [1], reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), tokens)
    assert_values(loss.detach(), grad, T, U, V, (1,))


# Batches


@pytest.mark.parametrize("durations", [(0, 1), ()], ids=["tdt", "rnnt"])
def test_70_000_tiny_samples(kernel, device, durations):
    batch = make_batch(
        B=70_000, T=2, U=1, V=3, durations=durations, device=device, **({"omega": 0.3} if durations else {})
    )
    outcome = loss_and_grads(kernel, batch)
    some = torch.tensor([0, 1, 32_767, 32_768, 65_535, 65_536, 69_999], device=device)
    parts = ("token_logits", "duration_logits", "targets", "logit_lengths", "target_lengths")
    few = batch.replace(**{name: getattr(batch, name)[some] for name in parts})
    for name in ("losses", "grad_tokens", "grad_durations"):
        setattr(outcome, name, getattr(outcome, name)[some])
    assert_matches(outcome, few)


def test_alignment_of_70_000_tiny_samples(kernel, device):
    logits, labels = with_equal_logits(70_000, 2, 1, 3, (), device)
    alignment = kernel.rnnt_align(logits, *labels, 0)
    assert (alignment.frames == 0).all()
    torch.testing.assert_close(alignment.score, torch.full_like(alignment.score, -3 * math.log(3)))


# Lattices and vocabularies


LATTICES = {  # T, U, V
    "U = 5000": (40, 5000, 8),
    "T = 20000": (20_000, 8, 8),
    "T and U in the thousands": (2000, 1500, 3),
    "V = 3": (50, 20, 3),
    "V = 262144": (4, 2, 262_144),
}
every_lattice = pytest.mark.parametrize("T, U, V", LATTICES.values(), ids=LATTICES.keys())


@every_kind
@every_lattice
def test_extreme_lattices_and_vocabularies(kernel, device, durations, T, U, V):
    if device == "cpu" and T * U > 10**6:
        pytest.skip("three million nodes: on the GPU only")
    if durations == (1,) and U > T - 1:
        T = U + 100  # durations [1] take a frame for each label
        if device == "cpu":
            pytest.skip("25 million nodes: on the GPU only")
    logits, labels = with_equal_logits(1, T, U, V, durations, device)
    losses, grad = run(kernel, logits, labels, durations)
    assert_values(losses, grad, T, U, V, durations)


@every_lattice
def test_alignments_of_extreme_lattices(kernel, device, T, U, V):
    if device == "cpu" and T * U > 10**6:
        pytest.skip("three million nodes: on the GPU only")
    logits, labels = with_equal_logits(1, T, U, V, (0, 1), device)
    frames, durations, score = kernel.tdt_align_joint(logits, *labels, 0, [0, 1])
    # As few arcs as possible: as many labels as there are frames to pass take one each, the last of them.
    moving = min(U, T - 1)
    expected = torch.tensor([0] * (U - moving) + [1] * moving, device=device)
    assert torch.equal(durations[0], expected)
    assert torch.equal(frames[0], expected.cumsum(0) - expected)
    assert score.item() == pytest.approx(-(U + T - moving) * math.log(2 * V), rel=1e-6)


@pytest.mark.parametrize("T, U", [(100, 5), (300, 12)])
def test_64_durations(kernel, device, api, T, U):
    batch = make_batch(B=2, T=T, U=U, V=6, durations=tuple(range(64)), logit_lengths=[T, T - 9], device=device)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.cuda
@every_kind
def test_wide_vocabulary_beyond_2_to_the_31_elements(kernel, durations):
    B, T, U, V = 2, 200, 20, 262_144
    logits, labels = with_equal_logits(B, T, U, V, durations, "cuda", torch.bfloat16)
    assert logits.numel() > 2**31
    losses, grad = run(kernel, logits, labels, durations)
    assert_values(losses, grad, T, U, V, durations)


@pytest.mark.cuda
@pytest.mark.parametrize("durations", [(0, 1), ()], ids=["tdt", "rnnt"])
def test_long_and_wide_beyond_2_to_the_31_elements(kernel, durations):
    T, U, V = 20_000, 5000, 30
    logits, labels = with_equal_logits(1, T, U, V, durations, "cuda", torch.bfloat16)
    assert logits.numel() > 2**31
    losses, grad = run(kernel, logits, labels, durations, inplace_grad=True)
    assert_values(losses, grad, T, U, V, durations)


@pytest.mark.parametrize("V", [3, 262_144])
def test_without_logits(kernel, device, V):
    B, T, U, H = 2, 4, 2, 8
    encoder = torch.randn(B, T, H, device=device, requires_grad=True)
    decoder = torch.randn(B, U + 1, H, device=device, requires_grad=True)
    weight, bias = torch.zeros(V, H, device=device), torch.zeros(V, device=device, requires_grad=True)
    losses = kernel.rnnt_loss_fused_joint(encoder, decoder, weight, bias, *labels_of(B, T, U, device), 0, "none")
    expected = torch.full((B,), loss_of_rnnt(T, U, V), dtype=torch.float64, device=device)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(losses.sum(), bias)
    assert grad[2].item() == pytest.approx(B * (T + U) / V, rel=1e-5)


def test_without_logits_of_70_000_tiny_samples(kernel, device):
    B, T, U, H, V = 70_000, 2, 1, 4, 3
    encoder, decoder = torch.zeros(B, T, H, device=device), torch.zeros(B, U + 1, H, device=device)
    weight, bias = torch.zeros(V, H, device=device), torch.zeros(V, device=device, requires_grad=True)
    losses = kernel.rnnt_loss_fused_joint(encoder, decoder, weight, bias, *labels_of(B, T, U, device), 0, "none")
    torch.testing.assert_close(losses, torch.full_like(losses, loss_of_rnnt(T, U, V)), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(losses.sum(), bias)
    assert grad[2].item() == pytest.approx(B * (T + U) / V, rel=1e-4)


# Time


def seconds(function, device):
    """The best of three; on the CPU of processor time, which other processes do not add to, nor threads that wait."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    function()
    best = math.inf
    for _ in range(3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = clock()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best


GROWN = {  # B, T, U, V: small, and with one of them eight times as large
    "T": ((1, 2500, 8, 8), (1, 20_000, 8, 8)),
    "U": ((1, 40, 625, 8), (1, 40, 5000, 8)),
    "V": ((1, 2, 1, 5 * 2**19), (1, 2, 1, 5 * 2**22)),
    "B": ((5000, 2, 1, 3), (40_000, 2, 1, 3)),
}


@pytest.mark.parametrize("small, large", GROWN.values(), ids=GROWN.keys())
def test_time_grows_in_proportion(kernel, device, small, large):
    def step(B, T, U, V):
        logits, labels = with_equal_logits(B, T, U, V, (0, 1), device)
        return lambda: run(kernel, logits, labels, (0, 1))

    # Eight times the work, most of it with cold memory; what grows with the square would take 64 times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert seconds(step(*large), device) < 24 * max(seconds(step(*small), device), 1e-4)
    finally:
        torch.set_num_threads(threads)


# Beyond what there is


def test_more_nodes_than_an_int_counts_are_refused(kernel, device):
    T, U = 2**15, 2**16 - 1
    logits = torch.zeros(1, 1, 1, 5, device=device).expand(2, T, U + 1, 5)
    with pytest.raises(RuntimeError, match="more than 2\\^31 - 1 samples or nodes"):
        kernel.rnnt_loss(logits, *labels_of(2, T, U, device), 0)


def test_more_samples_than_an_int_counts_are_refused(kernel, device):
    B = 2**32
    lengths = torch.zeros(1, dtype=torch.int64, device=device).expand(B)
    arguments = (torch.empty(B, 0, 1, 5, device=device), None, lengths.unsqueeze(1)[:, :0], lengths, lengths)
    with pytest.raises(RuntimeError, match="more than 2\\^31 - 1 samples or nodes"):
        kernel.loss.ops.log_probs(*arguments, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize("num_durations", [0, 5])
def test_more_columns_than_an_int_counts_are_refused(kernel, device, num_durations):
    labels = labels_of(1, 1, 1, device)
    for columns in (2**31 - 2**16, 2**31, 2**33):  # the fewest of them, and ones that wrap around
        logits = torch.zeros(1, 1, 1, 1, device=device).expand(1, 1, 2, columns)
        with pytest.raises(
            RuntimeError, match=f"at most {2**31 - 1 - 2**16} tokens and durations are .*, got {columns}"
        ):
            kernel.loss.ops.log_probs(logits, None, *labels, 0, num_durations, 0.0, 0.0)


@pytest.mark.parametrize("num_durations", [-4, -1, 65])
def test_impossible_numbers_of_durations_are_refused(kernel, device, num_durations):
    labels = labels_of(1, 2, 1, device)
    logits = torch.zeros(1, 2, 2, 80, device=device)
    with pytest.raises(RuntimeError, match="durations: from 0 to 64 are supported, got"):
        kernel.loss.ops.log_probs(logits, None, *labels, 0, num_durations, 0.0, 0.0)
    node_lp, row_max = torch.zeros(1, 2, 2, 8, device=device), torch.zeros(1, 2, 2, device=device)
    tile, nodes = logits[0, 0, :1], torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="durations: from 0 to 64 are supported, got"):
        kernel.loss.ops.log_probs_tile_(tile, tile[0], nodes, node_lp, row_max, *labels, 0, 40, num_durations, 0.0, 0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("B", [2**29, 2**30 + 1])
def test_more_blocks_than_a_grid_has_are_refused(kernel, B):
    # Two directions of two lattices: at 2^30 + 1 samples the number of blocks would wrap around to 4.
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 100 << 30:
        pytest.skip("needs 100 GiB")
    logits = torch.zeros(1, 1, 1, 3, dtype=torch.bfloat16, device="cuda").expand(B, 1, 1, 3)
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    targets = torch.zeros(1, 0, dtype=torch.int32, device="cuda").expand(B, 0)
    labels = targets, one.expand(B), (one - 1).expand(B)
    with pytest.raises(RuntimeError, match="2\\^31 - 1 blocks"):
        kernel.loss.ops.loss(logits, None, *labels, 0, [1], 0.0, 0.0, 0.5, 0.0, 0.0, False, True, False, 1)
