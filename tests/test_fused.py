"""`tdt_loss_fused_joint` and `rnnt_loss_fused_joint`: loss and gradients of a joint network whose logits never exist.

Their tiles, dropout, precision and what autograd asks of them are in the other test_fused_*.py.
"""

import pytest
import torch
from support.comparisons import same_bits
from support.fused import (
    NAMES,
    RAGGED,
    assert_matches,
    assert_same_bits,
    expected,
    fused,
    logits_of,
    make_problem,
    unfused,
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("durations", [(0, 1, 2, 3), ()], ids=["tdt", "rnnt"])
def test_loss_and_gradients(kernel, device, dtype, activation, durations):
    problem = make_problem(durations=durations, activation=activation, sigma=0.05, dtype=dtype, device=device, **RAGGED)
    upstream = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=dtype, device=device)
    outcome = fused(kernel, problem, upstream=upstream)
    assert_matches(outcome, expected(problem, upstream.cpu()), problem)
    assert outcome.stats.valid_rows == problem.nodes == 9 * 5 + 6 * 3 + 4 * 1 + 5 * 4


@pytest.mark.parametrize("H", [1, 5, 8, 36, 640])
@pytest.mark.parametrize("V", [3, 8, 33])
def test_every_width(kernel, device, H, V):
    problem = make_problem(H=H, V=V, durations=(2, 0, 1), device=device, **RAGGED)
    assert_matches(fused(kernel, problem), expected(problem), problem)


@pytest.mark.parametrize(
    "options",
    [
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
def test_every_option(kernel, device, options, durations):
    if not durations:
        options = {name: value for name, value in options.items() if name != "omega"}
    problem = make_problem(
        durations=durations, sigma=0.05, options=options, dtype=torch.float64, device=device, **RAGGED
    )
    assert_matches(fused(kernel, problem, max_tile_bytes=20 * problem.tile_bytes), expected(problem), problem)


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum", "none"])
def test_reductions_are_those_of_the_dense_loss(kernel, device, reduction):
    problem = make_problem(dtype=torch.float64, device=device, **RAGGED)
    leaves = [x.requires_grad_() for x in problem.operands]
    dense = kernel.tdt_loss_joint(
        logits_of(leaves, "relu"), *problem.labels, problem.blank, list(problem.durations), reduction=reduction
    )
    dense.sum().backward()
    outcome = fused(kernel, problem, reduction)
    torch.testing.assert_close(outcome.loss, dense.detach(), rtol=1e-13, atol=0)
    for name, leaf in zip(NAMES, leaves):
        torch.testing.assert_close(outcome.grads[name], leaf.grad, rtol=1e-12, atol=1e-14)


def test_without_bias(kernel, device):
    problem = make_problem(bias=False, device=device, **RAGGED)
    outcome = fused(kernel, problem)
    assert set(outcome.grads) == {"encoder", "decoder", "weight"}
    assert_matches(outcome, expected(problem), problem)


def test_strided_inputs(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    strided = problem.replace(
        encoder=problem.encoder.transpose(0, 1).contiguous().transpose(0, 1),
        decoder=problem.decoder.repeat_interleave(2, dim=-1)[..., ::2],
        weight=problem.weight.t().contiguous().t(),
        targets=problem.targets.t().contiguous().t(),
    )
    assert_same_bits(fused(kernel, strided), fused(kernel, problem))


@pytest.mark.parametrize("offset", [1, 4])
def test_inputs_at_any_address(kernel, device, offset):
    problem = make_problem(H=32, dtype=torch.bfloat16, device=device, **RAGGED)

    def moved(x):
        buffer = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
        return buffer[offset:].view(x.shape).copy_(x)

    assert_same_bits(
        fused(kernel, problem.replace(encoder=moved(problem.encoder), decoder=moved(problem.decoder))),
        fused(kernel, problem),
    )


@pytest.mark.parametrize("frozen", [("encoder",), ("decoder",), ("weight", "bias"), ("encoder", "decoder"), ("bias",)])
def test_frozen_inputs(kernel, device, frozen):
    problem = make_problem(device=device, **RAGGED)
    everything = fused(kernel, problem, tolerance=1e-6)
    leaves = [x.detach().requires_grad_(name not in frozen) for name, x in zip(NAMES, problem.operands)]
    loss = kernel.tdt_loss_fused_joint(
        *leaves, *problem.labels, problem.blank, list(problem.durations), reduction="none"
    )
    loss.sum().backward()
    for name, leaf in zip(NAMES, leaves):
        assert leaf.grad is None if name in frozen else same_bits(leaf.grad, everything.grads[name])


def test_long_samples(kernel, device):
    # More than 32 frames and label positions, the width of a warp, and several samples in a tile.
    problem = make_problem(B=5, T=150, U=70, V=9, H=8, device=device, logit_lengths=[150, 90, 40, 1, 77])
    assert_matches(fused(kernel, problem), expected(problem), problem)


# Unusual batches


def test_no_alignment(kernel, device):
    problem = make_problem(durations=(1, 2), logit_lengths=[9, 2, 0, 9], target_lengths=[4, 4, 2, 0], device=device)
    outcome = fused(kernel, problem)
    assert outcome.loss.isinf().tolist() == [False, True, True, False]
    assert_matches(outcome, expected(problem), problem)
    assert (outcome.grads["encoder"][1:3] == 0).all() and (outcome.grads["decoder"][1:3] == 0).all()
    assert outcome.stats.live_rows <= 9 * 5 + 9
    assert (fused(kernel, problem, zero_infinity=True).loss[1:3] == 0).all()


@pytest.mark.parametrize("B, T, U", [(0, 4, 2), (2, 0, 2), (2, 4, 0), (1, 1, 0), (2, 0, 0)])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_empty(kernel, device, B, T, U, reduction):
    problem = make_problem(B=B, T=T, U=U, durations=(0, 1, 2), device=device)
    outcome = fused(kernel, problem, reduction)
    reference = expected(problem)
    assert outcome.loss.shape == ((B,) if reduction == "none" else ())
    losses = reference.loss if reduction == "none" else reference.loss.sum()
    torch.testing.assert_close(outcome.loss.double().cpu(), losses, rtol=1e-6, atol=1e-6)
    for name, grad in reference.grads.items():
        torch.testing.assert_close(outcome.grads[name].double().cpu(), grad, rtol=1e-5, atol=1e-6)


def test_padding_is_never_read(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    clean = fused(kernel, problem)
    for b, (T, U) in enumerate(zip(RAGGED["logit_lengths"], RAGGED["target_lengths"])):
        problem.encoder[b, T:] = torch.nan
        problem.decoder[b, U + 1 :] = torch.nan
        problem.targets[b, U:] = -7
    outcome = fused(kernel, problem)
    assert_same_bits(outcome, clean)
    assert (outcome.grads["encoder"][1, 6:] == 0).all() and (outcome.grads["decoder"][2, 1:] == 0).all()


def test_nan_stays_in_its_sample(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    clean = fused(kernel, problem)
    problem.encoder[1, 2, 3] = torch.nan
    outcome = fused(kernel, problem)
    assert outcome.loss.isnan().tolist() == [False, True, False, False]
    dense = unfused(kernel, problem).grads
    others = torch.tensor([0, 2, 3])
    for name in ("encoder", "decoder"):
        assert outcome.grads[name][1].isnan().any()
        assert torch.equal(outcome.grads[name].isnan(), dense[name].isnan())
        assert same_bits(outcome.grads[name][others], clean.grads[name][others])
    # As in the dense pipeline, the parameters see every sample.
    assert outcome.grads["weight"].isnan().all() and outcome.grads["bias"].isnan().all()


BY_SAMPLE = ("encoder", "decoder", "targets", "logit_lengths", "target_lengths")


@pytest.mark.cuda
def test_malformed_samples_on_the_gpu(kernel):
    problem = make_problem(device="cuda", **RAGGED)
    without = fused(kernel, problem.replace(**{n: x[[0, 2]] for n, x in vars(problem).items() if n in BY_SAMPLE}))
    problem.logit_lengths[1] = 10
    problem.targets[3, 1] = 21
    outcome = fused(kernel, problem)
    assert outcome.loss.isnan().tolist() == [False, True, False, True]
    assert (outcome.grads["encoder"][[1, 3]] == 0).all() and (outcome.grads["decoder"][[1, 3]] == 0).all()
    for name in ("weight", "bias"):
        torch.testing.assert_close(outcome.grads[name], without.grads[name], rtol=1e-5, atol=1e-5)
