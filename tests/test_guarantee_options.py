"""The guarantee with every option, dtype and layout, with dropout, bad values and odd batches, and inside of what torch wraps around it."""

import pytest
import torch
from support import oracle
from support.comparisons import same_bits
from support.lattices import (
    NAMES,
    SMALL_BAND,
    band_constants,
    errors,
    expected,
    fused,
    make_lattice,
    trained_lattice,
)

RAGGED = {"B": 3, "T": 20, "U": 6, "logit_lengths": [20, 13, 9], "target_lengths": [6, 4, 0]}
FIVE = {"B": 5, "T": 20, "U": 6, "logit_lengths": [20, 13, 0, 9, 20], "target_lengths": [6, 4, 2, 0, 6]}


@pytest.fixture(autouse=True)
def small_band(kernel):
    with band_constants(kernel, **SMALL_BAND):
        yield


def assert_close_runs(first, second, loss=1e-6, grads=1e-5):
    """Loss and gradients of two runs, NaN and infinities in the same places."""
    torch.testing.assert_close(first.loss, second.loss, rtol=loss, atol=loss, equal_nan=True)
    for name, grad in second.grads.items():
        actual = first.grads[name]
        assert torch.equal(actual.isnan(), grad.isnan()), name
        difference = (actual.double() - grad.double()).nan_to_num()
        assert difference.norm() <= grads * grad.double().nan_to_num().norm() + 1e-12, name


def assert_is_a_band(outcome):
    assert 0 < outcome.stats.forward_rows < outcome.stats.valid_rows


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"omega": 0.3},
        {"omega": 1.0},
        {"fastemit_lambda": 0.5},
        {"clamp": 0.02},
        {"delay_penalty": 0.2},
        {"omega": 0.4, "fastemit_lambda": 0.1, "clamp": 0.05, "delay_penalty": -0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("durations", [(0, 1, 2, 3), ()], ids=["tdt", "rnnt"])
@pytest.mark.parametrize("sigma", [0.05, -0.05])
def test_every_option(kernel, device, options, durations, sigma):
    if not durations:
        options = {name: value for name, value in options.items() if name != "omega"}
    for activation in ("relu", "tanh"):
        problem = make_lattice(
            "peaked", durations=durations, sigma=sigma, options=options, activation=activation, device=device, **RAGGED
        )
        outcome, reference = fused(kernel, problem, tolerance=1e-7), expected(problem)
        assert_is_a_band(outcome)
        torch.testing.assert_close(outcome.loss.cpu(), reference.loss, rtol=2e-7, atol=2e-7)
        # 2 (T + U) rho for each entry at most, and in practice far less.
        assert all(error < 1e-5 for error in errors(outcome, reference).values()), errors(outcome, reference)


@pytest.mark.parametrize("kind", ["peaked", "hidden", "two ways"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_dropout_draws_one_mask_for_narrow_and_full_rows(kernel, device, kind, activation):
    problem = make_lattice(kind, H=32, activation=activation, device=device, **RAGGED)

    def run(tolerance):
        torch.manual_seed(5)
        return fused(kernel, problem, dropout=0.3, tolerance=tolerance)

    exact = run(0)
    for tolerance in (1e-8, 1e-6):
        outcome = run(tolerance)
        assert (outcome.loss >= exact.loss - 1e-10).all()
        assert (outcome.loss <= exact.loss + outcome.stats.gap + 1e-10).all()
        assert_close_runs(outcome, exact, loss=2 * tolerance, grads=100 * tolerance)
    assert_is_a_band(run(1e-6))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["peaked", "random"])
def test_samples_a_few_at_a_time_equal_all_at_once(kernel, device, monkeypatch, kind, dropout):
    problem = make_lattice(kind, seed=2, device=device, **FIVE)

    def run():
        torch.manual_seed(6)
        return fused(kernel, problem, dropout=dropout, tolerance=1e-6)

    together = run()
    nodes = problem.encoder.shape[1] * problem.decoder.shape[1]
    for samples in (1, 2, 4):
        monkeypatch.setattr(kernel.fused_passes, "NODES_AT_ONCE", samples * nodes)
        parts = run()
        assert parts.stats.valid_rows == together.stats.valid_rows
        assert parts.stats.forward_rows == together.stats.forward_rows
        assert_close_runs(parts, together, loss=1e-12, grads=1e-10)
        torch.testing.assert_close(parts.stats.gap, together.stats.gap, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(kernel, device, dtype):
    problem = make_lattice("peaked", H=16, dtype=dtype, device=device, **RAGGED)
    outcome, exact = fused(kernel, problem, tolerance=1e-6), fused(kernel, problem, tolerance=0)
    assert_is_a_band(outcome)
    unit = {torch.float64: 2e-6, torch.float32: 4e-6}.get(dtype, 1e-5)
    torch.testing.assert_close(outcome.loss, exact.loss, rtol=unit, atol=unit)
    narrow = dtype.itemsize == 2
    assert_close_runs(outcome, exact, loss=unit, grads=4 * torch.finfo(dtype).eps if narrow else 2e-5)
    for name, x in zip(NAMES, problem.operands):
        assert outcome.grads[name].dtype == x.dtype


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["peaked", "broad"])
def test_same_call_same_bits(kernel, device, kind, dtype):
    problem = make_lattice(kind, dtype=dtype, device=device, **RAGGED)
    first = fused(kernel, problem)
    for _ in range(3):
        again = fused(kernel, problem)
        assert same_bits(again.loss, first.loss) and same_bits(again.stats.gap, first.stats.gap)
        assert again.stats.forward_rows == first.stats.forward_rows
        assert again.stats.live_rows == first.stats.live_rows
        for name, grad in first.grads.items():
            assert same_bits(again.grads[name], grad), name


def test_strided_inputs(kernel, device):
    problem = make_lattice("peaked", device=device, **RAGGED)
    strided = problem.replace(
        encoder=problem.encoder.transpose(0, 1).contiguous().transpose(0, 1),
        decoder=problem.decoder.repeat_interleave(2, dim=-1)[..., ::2],
        weight=problem.weight.t().contiguous().t(),
        bias=problem.bias.repeat_interleave(3)[::3],
        targets=problem.targets.t().contiguous().t(),
    )
    first, second = fused(kernel, strided), fused(kernel, problem)
    assert_is_a_band(first)
    assert same_bits(first.loss, second.loss)
    assert all(same_bits(grad, second.grads[name]) for name, grad in first.grads.items())


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_at_any_address(kernel, device, dtype, tolerance):
    """Of as many columns as a tile, so that nothing is copied for its padding."""
    problem = make_lattice("peaked", V=60, durations=(0, 1, 2, 3), dtype=dtype, device=device, **RAGGED)

    def moved(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)

    shifted = problem.replace(weight=moved(problem.weight), bias=moved(problem.bias))
    first, second = (fused(kernel, p, tolerance=tolerance) for p in (shifted, problem))
    assert same_bits(first.loss, second.loss)
    assert all(same_bits(grad, second.grads[name]) for name, grad in first.grads.items())


def test_autocast(kernel, device):
    single = make_lattice("peaked", dtype=torch.float32, device=device, **RAGGED)
    with torch.autocast(device, dtype=torch.bfloat16):
        outcome = fused(kernel, single)
    half = fused(kernel, single.to(torch.bfloat16))
    assert_is_a_band(outcome)
    assert same_bits(outcome.loss, half.loss) and outcome.stats.forward_rows == half.stats.forward_rows


def test_checkpoint(kernel, device):
    problem = make_lattice("peaked", device=device, **RAGGED)

    def run(wrap):
        leaves = [x.detach().requires_grad_() for x in problem.operands]
        torch.manual_seed(0)
        labels = (*problem.labels, problem.blank, list(problem.durations))
        wrap(lambda *x: kernel.tdt_loss_fused_joint(*x, *labels, dropout=0.1), *leaves).backward()
        return [leaf.grad for leaf in leaves]

    plain = run(lambda function, *x: function(*x))
    again = run(lambda function, *x: torch.utils.checkpoint.checkpoint(function, *x, use_reentrant=False))
    assert all(map(same_bits, plain, again))


def test_compiled_equals_eager(kernel, device):
    problem = make_lattice("peaked", device=device, **RAGGED)
    labels = (*problem.labels, problem.blank, list(problem.durations))

    def loss_of(*operands):
        return kernel.tdt_loss_fused_joint(*operands, *labels, reduction="none", tolerance=1e-6)

    torch._dynamo.reset()
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(*leaves)
    loss.sum().backward()
    torch._dynamo.reset()
    eager = fused(kernel, problem, tolerance=1e-6)
    assert_is_a_band(eager)
    assert same_bits(loss.detach(), eager.loss)
    for name, leaf in zip(NAMES, leaves):
        assert same_bits(leaf.grad, eager.grads[name]), name


# Odd batches


@pytest.mark.parametrize("lengths", [([20, 0, 9], [6, 2, 0]), ([1, 1, 1], [0, 1, 6]), ([20, 2, 20], [6, 6, 0])])
@pytest.mark.parametrize("durations", [(1, 2), (0, 50), ()], ids=str)
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_empty_short_and_infeasible_samples(kernel, device, lengths, durations, zero_infinity):
    sizes = {"logit_lengths": lengths[0], "target_lengths": lengths[1]}
    problem = make_lattice("peaked", durations=durations, device=device, **{**RAGGED, **sizes})
    outcome, reference = fused(kernel, problem, zero_infinity=zero_infinity), expected(problem)
    losses = reference.loss.masked_fill(reference.loss.isinf(), 0.0) if zero_infinity else reference.loss
    torch.testing.assert_close(outcome.loss.cpu(), losses, rtol=2e-6, atol=2e-6)
    assert all(error < 1e-4 for error in errors(outcome, reference).values()), errors(outcome, reference)
    assert (outcome.stats.gap >= 0).all() and (outcome.stats.gap <= 1e-6).all()


@pytest.mark.parametrize("B, T, U", [(0, 20, 6), (2, 0, 6), (2, 20, 0), (1, 1, 0)])
def test_empty_batches(kernel, device, B, T, U):
    problem = make_lattice("peaked", B=B, T=T, U=U, device=device)
    outcome, reference = fused(kernel, problem), expected(problem)
    assert outcome.stats.gap.shape == (B,)
    torch.testing.assert_close(outcome.loss.cpu(), reference.loss, rtol=2e-6, atol=2e-6)
    for name, grad in reference.grads.items():
        torch.testing.assert_close(outcome.grads[name].cpu(), grad, rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
def test_malformed_samples_on_the_gpu(kernel):
    problem = make_lattice("peaked", device="cuda", **RAGGED)
    problem.logit_lengths[1], problem.targets[2, 0] = 21, -5
    problem.target_lengths[2] = 1
    outcome, exact = fused(kernel, problem, tolerance=1e-6), fused(kernel, problem, tolerance=0)
    assert outcome.loss.isnan().tolist() == [False, True, True]
    assert_close_runs(outcome, exact)
    assert (outcome.grads["encoder"][1:] == 0).all() and (outcome.stats.gap[1:] == 0).all()


def test_masked_labels(kernel, device):
    """A label of probability 0: no alignment for that sample, and nothing else changes."""
    problem = make_lattice("masked", device=device, **RAGGED)
    bias, targets = problem.bias.clone(), problem.targets.clone()
    bias[7], targets[1, 1] = -torch.inf, 7
    targets[0], targets[2] = 3, 3
    problem = problem.replace(bias=bias, targets=targets)
    outcome, reference = fused(kernel, problem), expected(problem)
    assert outcome.loss.isposinf().tolist() == [False, True, False]
    torch.testing.assert_close(outcome.loss.cpu(), reference.loss, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["peaked", "broad"])
def test_bad_values_stay_in_their_sample(kernel, device, kind, where, value):
    problem = make_lattice(kind, device=device, **RAGGED)
    clean = fused(kernel, problem, tolerance=1e-6)
    getattr(problem, where)[1, 2, 3] = value
    outcome, exact = fused(kernel, problem, tolerance=1e-6), fused(kernel, problem, tolerance=0)
    assert_close_runs(outcome, exact, loss=2e-6, grads=1e-4)
    others = torch.tensor([0, 2], device=device)
    torch.testing.assert_close(outcome.loss[others], clean.loss[others], rtol=2e-6, atol=2e-6)
    for name in ("encoder", "decoder"):
        torch.testing.assert_close(outcome.grads[name][others], clean.grads[name][others], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("token", ["blank", "label", "rare", "duration"])
def test_bad_values_of_parameters_are_not_hidden(kernel, device, where, token, value):
    problem = make_lattice("peaked", device=device, **RAGGED)
    unused = [k for k in range(problem.vocab - 1) if k not in problem.targets.flatten().tolist()]
    row = {"blank": problem.blank, "label": problem.targets[0, 0].item(), "rare": unused[-1], "duration": problem.vocab}
    getattr(problem, where)[row[token]] = value
    outcome, exact = fused(kernel, problem, tolerance=1e-6), fused(kernel, problem, tolerance=0)
    assert_close_runs(outcome, exact, loss=2e-6, grads=1e-4)


# When all rows are computed


def test_lattices_without_a_band_compute_all_rows(kernel, device):
    sizes = {"B": 2, "T": 20, "U": 2, "V": 400, "device": device}
    with band_constants(kernel, _FREQUENT=128, _GROUPS=8, _MOST=0.6):
        for kind in ("flat", "random"):
            outcome = fused(kernel, make_lattice(kind, **sizes))
            assert outcome.stats.forward_rows == outcome.stats.valid_rows
            assert (outcome.stats.gap == 0).all()


def test_narrow_rows_that_are_not_narrow_compute_all_rows(kernel, device):
    with band_constants(kernel, _FREQUENT=128, _GROUPS=8):
        outcome = fused(kernel, make_lattice("peaked", V=200, T=40, device=device))
    assert outcome.stats.forward_rows == outcome.stats.valid_rows
    assert (outcome.stats.gap == 0).all()


def test_samples_of_too_many_nodes_compute_all_rows(kernel, device):
    problem = make_lattice("peaked", T=20, U=6, device=device)
    with band_constants(kernel, MOST_NODES=20 * 7):
        assert_is_a_band(fused(kernel, problem))
    with band_constants(kernel, MOST_NODES=20 * 7 - 1):
        outcome = fused(kernel, problem)
    assert outcome.stats.forward_rows == outcome.stats.valid_rows
    assert (outcome.stats.gap == 0).all()


# Logits of 16-bit operands


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_logits_of_16_bit_operands_keep_float32(kernel, device, dtype, tolerance):
    problem = trained_lattice(torch.float64).to(dtype)
    problem = problem.replace(weight=problem.weight * 2.5, bias=problem.bias).to(device)
    encoder, decoder, weight, bias = (x.detach().double().cpu().requires_grad_() for x in problem.operands)
    hidden = torch.relu(encoder[:, :, None] + decoder[:, None])
    rounded = hidden + (hidden.to(dtype).double() - hidden).detach()  # the operand of the product, in 16 bits
    logits = torch.nn.functional.linear(rounded, weight, bias)
    assert 100 < logits.abs().max() < 200
    reference = dense_reference(problem, logits)
    outcome = fused(kernel, problem, tolerance=tolerance)
    assert outcome.loss.dtype == torch.float32
    torch.testing.assert_close(outcome.loss.double().cpu(), reference, rtol=1e-5, atol=0)
    for name, leaf in zip(NAMES, (encoder, decoder, weight, bias)):
        error = (outcome.grads[name].double().cpu() - leaf.grad).norm() / leaf.grad.norm()
        assert error < torch.finfo(dtype).eps, (name, error.item())


def dense_reference(problem, logits):
    """The oracle's losses; its gradients go on through the logits."""
    x, z = logits.detach().split([problem.vocab, len(problem.durations)], dim=-1)
    labels = [label.cpu() for label in problem.labels]
    result = oracle.tdt_loss(x, z, *labels, problem.blank, problem.durations, problem.sigma)
    logits.backward(torch.cat([result.grad_tokens, result.grad_durations], dim=-1))
    return result.losses
