"""Sharp, shifted, masked and long rows: the loss errs no more than torch's own log_softmax and the same recursion in float64 would.

What is exact is computed here from the rounded logits: the maximum is subtracted first, log1p adds up the rest, in extended precision, and
the lattice is the oracle's. What torch does is `log_softmax` and its backward in the accumulation dtype, with the oracle's lattice between
them. Of both errors the largest of a family counts: rows drawn alike, of one dtype, one of them twice as lucky as another.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import oracle
from support.batches import make_batch
from support.calls import call

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KINDS = {"TDT": (0, 1, 2), "RNN-T": ()}
RECURSION = 1e-13  # relative error of two float64 recursions over one lattice
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_kind = pytest.mark.parametrize("durations", KINDS.values(), ids=KINDS.keys())


def accumulation(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# What is right, and what torch makes of it.


def exact_log_softmax(x):
    """In extended precision, from the numbers as they are."""
    x = x.cpu().double().numpy().astype(np.longdouble)
    x = x - x.max(-1, keepdims=True)
    others = np.exp(x)
    np.put_along_axis(others, x.argmax(-1)[..., None], 0, axis=-1)
    return x - np.log1p(others.sum(-1, keepdims=True))


def torch_log_softmax(x):
    """The same by torch, and its backward as a function."""
    x = x.to(accumulation(x.dtype)).requires_grad_()
    lp = x.log_softmax(-1)

    def backward(grad):
        return torch.autograd.grad(lp, x, torch.as_tensor(grad).to(lp))[0].cpu().double().numpy()

    return lp.detach().cpu().double().numpy(), backward


def lattice_of(lp, lp_durations, labels, blank, durations):
    """The loss of one sample, and d loss / d log-probability of its tokens and durations."""
    lp, lp_durations = (np.asarray(part, dtype=np.float64) for part in (lp, lp_durations))
    T, U1, V = lp.shape
    label = np.full((T, U1), -np.inf)
    for u, v in enumerate(labels):
        label[:, u] = lp[:, u, v]
    log_probs = oracle.LogProbs(blank=lp[..., blank], label=label, dur=lp_durations)
    (term,) = oracle.terms(log_probs, durations)
    d_lp = np.zeros_like(lp)
    d_lp[..., blank] -= term.blank_occ.sum(-1)
    for u, v in enumerate(labels):
        d_lp[:, u, v] -= term.label_occ[:, u].sum(-1)
    d_durations = -(term.blank_occ + term.label_occ) if durations else np.zeros_like(lp_durations)
    return -term.nodes.ll, d_lp, d_durations


def through_exact_softmax(lp, d_lp):
    return d_lp - np.exp(lp) * d_lp.sum(-1, keepdims=True)


def expectations(batch):
    """For each sample (loss, gradient of the V + D logits): exact, and as torch computes them."""
    exact, by_torch = [], []
    for b, (T, U) in enumerate(zip(batch.logit_lengths.tolist(), batch.target_lengths.tolist())):
        x, z = batch.token_logits[b, :T, : U + 1], batch.duration_logits[b, :T, : U + 1]
        rest = (batch.targets[b, :U].tolist(), batch.blank, batch.durations)

        lps = [exact_log_softmax(x), exact_log_softmax(z) if batch.durations else np.zeros((T, U + 1, 0))]
        loss, *d_lps = lattice_of(*lps, *rest)
        grads = [through_exact_softmax(lp, d_lp) for lp, d_lp in zip(lps, d_lps)]
        exact.append((float(loss), np.concatenate(grads, -1).astype(np.float64)))

        (lp, back), (lp_durations, back_durations) = torch_log_softmax(x), torch_log_softmax(z)
        loss, d_lp, d_durations = lattice_of(lp, lp_durations, *rest)
        by_torch.append((float(loss), np.concatenate([back(d_lp), back_durations(d_durations)], -1)))
    return exact, by_torch


# Every way to compute it.


def dense(api) -> Callable:
    def results(kernel, batch):
        V = batch.token_logits.shape[-1]
        two = api == "separate" and batch.durations
        logits = [batch.token_logits, batch.duration_logits] if two else [batch.joint]
        logits = [x.clone().requires_grad_() for x in logits]
        losses = call(kernel, batch, logits)
        grads = torch.autograd.grad(losses.sum(), logits)
        grad = torch.cat(grads, -1)
        assert grad.shape[-1] == V + len(batch.durations)
        return [(loss, grad[b]) for b, loss in enumerate(losses.detach())]

    return results


def fused(kernel, batch):
    """Hidden units that are 1 at one node each: the weight's columns are the rows of logits, and its gradient is theirs."""
    results = []
    for b in range(len(batch.joint)):
        x = batch.joint[b]
        T, U1, columns = x.shape
        t, u = (index.flatten() for index in torch.meshgrid(torch.arange(T), torch.arange(U1), indexing="ij"))
        encoder = (t == torch.arange(T)[:, None]).to(x)[None]  # (1, T, T * U1)
        decoder = -(u != torch.arange(U1)[:, None]).to(x)[None]
        weight = x.reshape(-1, columns).t().contiguous().requires_grad_()
        args = (encoder, decoder, weight, None, *(y[b : b + 1] for y in batch.lengths), batch.blank)
        if batch.durations:
            loss = kernel.tdt_loss_fused_joint(*args, list(batch.durations), reduction="sum")
        else:
            loss = kernel.rnnt_loss_fused_joint(*args, reduction="sum")
        (grad,) = torch.autograd.grad(loss, weight)
        results.append((loss.detach(), grad.t().reshape(x.shape)))
    return results


# 0 times -inf is NaN: no matrix product has the logits of a row with -inf and those of another row.
WAYS = {"separate": dense("separate"), "joint": dense("joint"), "fused": fused}


def rounding_of(values, dtype):
    """Half of the distance to the next number."""
    info = torch.finfo(dtype)
    return 0.5 * info.eps * np.abs(values) + info.tiny * info.eps


def assert_as_good_as_torch(kernel, batches, ways=("separate", "joint", "fused")):
    """`batches`: a family."""
    dtype = batches[0].joint.dtype
    expected = [expectations(batch) for batch in batches]
    pairs = [pair for exact, by_torch in expected for pair in zip(exact, by_torch)]
    for name in ways if batches[0].durations else [way for way in ways if way != "separate"]:
        results = [result for batch in batches for result in WAYS[name](kernel, batch)]
        worst = {"loss": [0.0, 0.0], "gradient": [0.0, 0.0]}
        for (loss, grad), ((exact_loss, exact_grad), (torch_loss, torch_grad)) in zip(results, pairs):
            assert loss.dtype == accumulation(dtype) and grad.dtype == dtype
            for what, actual, exact, by_torch, rounded in (
                ("loss", loss.item(), exact_loss, torch_loss, loss.dtype),
                ("gradient", grad.cpu().double().numpy(), exact_grad, torch_grad, dtype),
            ):
                assert np.isfinite(exact).all() and np.isfinite(by_torch).all()
                assert np.isfinite(actual).all(), f"{name}: {what} {actual}"
                allowed = rounding_of(exact, rounded) + RECURSION * np.maximum(1, np.abs(exact_loss))
                if what == "gradient":  # of the occupancies, which torch's recursion passes on in float64
                    allowed += rounding_of(1.0, loss.dtype)
                error = np.max(np.maximum(np.abs(actual - exact) - allowed, 0))
                worst[what] = np.maximum(worst[what], (error, np.abs(by_torch - exact).max()))
        for what, (ours, theirs) in worst.items():
            assert ours <= 2 * theirs, f"{name}: {what} errs by {ours:.3g} beyond its rounding, torch by {theirs:.3g}"


# The families.


def batch_of(shape, dtype, durations, device, change, seed=0):
    """Normal logits of shape (B, T, U, V), as `change(tokens, durations, labels)` makes them in float64, rounded."""
    B, T, U, V = shape
    batch = make_batch(B, T, U, V, durations, blank=1, dtype=torch.float64, seed=seed)
    labels = torch.nn.functional.pad(batch.targets, (0, 1))[:, None, :, None].expand(B, T, U + 1, 1)
    tokens, duration_logits = change(batch.token_logits.clone(), batch.duration_logits.clone(), labels)
    return batch.replace(
        token_logits=tokens.to(device, dtype),
        duration_logits=duration_logits.to(device, dtype),
        targets=batch.targets.to(device),
        logit_lengths=batch.logit_lengths.to(device),
        target_lengths=batch.target_lengths.to(device),
    )


def with_peak(on, peak):
    """The blank, the label or another token raised at every node, and one duration."""

    def change(tokens, durations, labels):
        if on == "blank":
            tokens[..., 1] += peak
        elif on == "label":
            tokens.scatter_add_(-1, labels, torch.full_like(labels, peak, dtype=tokens.dtype))
        else:
            tokens[..., -1] += peak
        durations[..., 1:2] += peak
        return tokens, durations

    return change


PEAKS = (5, 12, 18, 25, 40, 60)
SHAPES = ((8, 1, 0, 9), (5, 4, 2, 9))  # B, T, U, V


@every_dtype
@every_kind
@pytest.mark.parametrize("on", ["blank", "label", "another token"])
def test_sharp_rows(kernel, device, dtype, durations, on):
    for peak in PEAKS if dtype.itemsize > 2 else PEAKS[::2]:
        for shape in SHAPES:
            assert_as_good_as_torch(kernel, [batch_of(shape, dtype, durations, device, with_peak(on, peak))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_kind
@pytest.mark.parametrize("on", ["label", "another token"])
def test_sharp_rows_of_many_frames(kernel, device, dtype, durations, on):
    """Losses of a thousand nats and more."""
    for peak in (18, 60):
        family = [batch_of((4, 60, 5, 33), dtype, durations, device, with_peak(on, peak))]
        assert_as_good_as_torch(kernel, family, ways=("separate", "joint"))


@every_dtype
@every_kind
def test_sharp_blanks_alone(kernel, device, dtype, durations):
    """Without labels nothing hides what is left of 1: the loss may be 1e-24."""
    for peak in PEAKS:
        for shape in ((8, 1, 0, 9), (2, 60, 0, 33)):
            assert_as_good_as_torch(kernel, [batch_of(shape, dtype, durations, device, with_peak("blank", peak))])


SHIFTS = {
    torch.float32: (1e2, 1e4, 1e6, 1e8, 1e12, 3.4e38),
    torch.float16: (1e2, 1e3, 3e4, 6.5e4),
    torch.bfloat16: (1e2, 1e4, 1e8, 3.3e38),
    torch.float64: (1e2, 1e4, 1e8, 1e12, 1e16, 1e300),
}


def shifted(by, peak=0.0):
    def change(tokens, durations, labels):
        tokens[..., 1] += peak
        return tokens + by, durations - by

    return change


@every_dtype
@every_kind
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
@pytest.mark.parametrize("peak", [0, 18], ids=["flat", "sharp"])
def test_shifted_rows(kernel, device, dtype, durations, sign, peak):
    changes = [shifted(sign * shift, peak) for shift in SHIFTS[dtype]]
    family = [
        batch_of(shape, dtype, durations, device, change)
        for shape in ((3, 1, 0, 9), (2, 4, 2, 9))
        for change in changes
    ]
    assert_as_good_as_torch(kernel, family)


def frames_masked(tokens, durations, labels):
    """Every tenth frame has no logit but the smallest number: a uniform row."""
    tokens[:, ::10] = -torch.inf
    return tokens, durations


def durations_masked(tokens, durations, labels):
    durations[:, ::2] = -torch.inf
    return tokens, durations


def tokens_partly_masked(tokens, durations, labels):
    tokens[..., 4:8] = -torch.inf
    return tokens.scatter(-1, labels, 0.3), durations


def labels_masked(tokens, durations, labels):
    """At every second frame."""
    tokens[:, ::2].scatter_(-1, labels[:, ::2], -torch.inf)
    tokens[..., 1] = 0.2
    return tokens, durations


def one_token_left(tokens, durations, labels):
    tokens[:, 1::2, :, 2:] = -torch.inf
    tokens[:, 1::2, :, 0] = -torch.inf
    durations[..., 1:2] += 3
    return tokens, durations


MASKS = {
    f.__name__.replace("_", " "): f
    for f in (frames_masked, durations_masked, tokens_partly_masked, labels_masked, one_token_left)
}


@every_dtype
@every_kind
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_rows_masked_by_the_smallest_number(kernel, device, dtype, durations, mask):
    def change(tokens, durations, labels):
        smallest = torch.finfo(dtype).min
        return (x.masked_fill(x == -torch.inf, smallest) for x in mask(tokens, durations, labels))

    family = [batch_of(shape, dtype, durations, device, change) for shape in ((4, 5, 2, 9), (2, 100, 0, 17))]
    assert_as_good_as_torch(kernel, family)


@every_dtype
@every_kind
@pytest.mark.parametrize("mask", ["tokens partly masked", "labels masked", "one token left"])
def test_rows_masked_by_minus_infinity(kernel, device, dtype, durations, mask):
    # A product of 0 and -inf is NaN, so there is no fused loss with such logits at some nodes.
    family = [batch_of(shape, dtype, durations, device, MASKS[mask]) for shape in ((4, 5, 2, 9), (2, 100, 0, 17))]
    assert_as_good_as_torch(kernel, family, ways=("separate", "joint"))


@every_dtype
@every_kind
def test_from_one_end_of_the_dtype_to_the_other(kernel, device, dtype, durations):
    """A difference of two logits that is no finite number."""

    def change(tokens, durations, labels):
        tokens[..., 2:] = torch.finfo(dtype).min
        tokens[..., :2] = torch.finfo(dtype).max
        return tokens, durations

    assert_as_good_as_torch(kernel, [batch_of((4, 3, 0, 9), dtype, durations, device, change)])


@every_dtype
@every_kind
@pytest.mark.parametrize("V", [1030, 8198, 262_144])
def test_long_rows_that_are_nearly_uniform(kernel, device, dtype, durations, V):
    """A sum of as many numbers as the row has, all nearly 1."""

    def change(tokens, durations, labels):
        return tokens * 1e-3 + 0.7, durations

    assert_as_good_as_torch(kernel, [batch_of((3, 1, 0, V), dtype, durations, device, change)])


@every_kind
@pytest.mark.parametrize("shift", [0, 50, -3000])
def test_five_hundred_frames_of_sharp_blanks(kernel, device, durations, shift):
    """The report: the loss is 1.3e-3, and a log-sum-exp rounded to one number loses a third of it."""

    def change(tokens, durations, labels):
        tokens[..., 1] += 18
        durations[..., 1:2] += 18
        return (x.float().double() + shift for x in (tokens, durations))

    batch = batch_of((2, 500, 0, 64), torch.float32, durations, device, change)
    if not durations and not shift:
        (loss, _), *_ = expectations(batch)[0]
        assert 0.8e-3 < loss < 2e-3
    assert_as_good_as_torch(kernel, [batch])


# Values that are known.


@every_dtype
def test_two_equal_logits(kernel, device, dtype):
    """ln 2 and a half, whatever the two are: nothing is left of them but their difference."""
    eps = torch.finfo(accumulation(dtype)).eps
    for shift in (0.0, *SHIFTS[dtype], torch.finfo(dtype).max):
        for x in (shift, -shift):

            def change(tokens, durations, labels, x=x):
                return torch.full_like(tokens, x), torch.full_like(durations, -x)

            for durations, expected in (((), math.log(2)), ((1,), math.log(2)), ((0, 1), math.log(4))):
                batch = batch_of((1, 1, 0, 2), dtype, durations, device, change)
                for name in WAYS if durations else ("joint", "fused"):
                    ((loss, grad),) = WAYS[name](kernel, batch)
                    assert loss.item() == pytest.approx(expected, rel=2 * eps, abs=0), (name, x)
                    assert grad.flatten()[:2].tolist() == [0.5, -0.5], (name, x)
