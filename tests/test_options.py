"""omega, fastemit_lambda, clamp and delay_penalty of the TDT loss: against the oracle, at their ends, together, compiled. RNN-T's are in test_rnnt.py."""

import pytest
import torch
from support.batches import make_batch
from support.calls import call, loss_and_grads, reduced, through_the_ops
from support.comparisons import assert_grads_match, assert_losses_match, assert_matches, assert_same_bits, same_bits
from support.tolerances import DTYPES
from torch.utils._python_dispatch import TorchDispatchMode

RAGGED = {"B": 4, "T": 12, "U": 5, "logit_lengths": [12, 9, 5, 1], "target_lengths": [5, 2, 0, 3]}
ALL = {"omega": 0.3, "fastemit_lambda": 0.5, "clamp": 0.05, "delay_penalty": 0.2}
OPTIONS = {
    "omega": {"omega": 0.3},
    "omega 1": {"omega": 1.0},
    "fastemit": {"fastemit_lambda": 0.5},
    "clamp": {"clamp": 0.05},
    "delay penalty": {"delay_penalty": 0.2},
    "negative delay penalty": {"delay_penalty": -0.5},
    "fastemit of both lattices": {"omega": 0.4, "fastemit_lambda": 1.0},
    "clamp of both lattices": {"omega": 0.4, "clamp": 0.05},
    "clamp after fastemit": {"fastemit_lambda": 1.0, "clamp": 0.05},
    "all": ALL,
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients(kernel, device, api, options, dtype):
    batch = make_batch(V=33, durations=(0, 1, 2, 3, 4), sigma=0.05, dtype=dtype, device=device, **RAGGED, **options)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


def test_every_option_matters_in_these_batches():
    plain = make_batch(V=33, durations=(0, 1, 2, 3, 4), sigma=0.05, **RAGGED)
    for options in OPTIONS.values():
        changed = plain.replace(options=options).expected
        assert (changed.grad_tokens - plain.expected.grad_tokens).abs().max() > 0.01
        assert (changed.grad_durations - plain.expected.grad_durations).abs().max() > 0.01


WEAK = [
    ("omega", 1e-300),
    ("fastemit_lambda", 1e-30),
    ("delay_penalty", 1e-30),
    ("delay_penalty", -1e-30),
    ("clamp", 1e30),
    ("clamp", -0.01),
    *((name, 0) for name in ALL),
]


@pytest.mark.parametrize("name, value", WEAK)
def test_options_too_weak_to_matter_change_no_bit(kernel, device, api, name, value):
    batch = make_batch(V=33, durations=(0, 1, 2), sigma=0.05, device=device, **RAGGED)
    assert_same_bits(loss_and_grads(kernel, batch, api, **{name: value}), loss_and_grads(kernel, batch, api))


@pytest.mark.parametrize(
    "durations", [(1,), (0, 1), (2, 4), (4, 3, 2, 1, 0), (0, 1, 1), (0, 1, 9, 2**40), tuple(range(64))]
)
def test_all_options_with_every_kind_of_durations(kernel, device, api, durations):
    batch = make_batch(B=2, T=14, U=3, V=6, durations=durations, target_lengths=[3, 2], device=device, **ALL)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.parametrize("T, U", [(1, 40), (9, 33), (6, 300), (70, 64)])
def test_all_options_with_every_kind_of_shape(kernel, device, T, U):
    batch = make_batch(B=2, T=T, U=U, V=5, target_lengths=[U, U - 1], device=device, **ALL)
    assert_matches(loss_and_grads(kernel, batch), batch)


def test_label_equal_to_blank(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, V=5, blank=2, device=device, **ALL)
    batch.targets[0, 1] = 2
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "mean_batch", "mean_volume"])
@pytest.mark.parametrize("options", [ALL, {"omega": 0.3}], ids=["all", "omega"])
def test_reductions(kernel, device, api, reduction, options):
    batch = make_batch(sigma=0.05, device=device, **RAGGED, **options)
    per_sample = batch.expected.losses.clone().requires_grad_()
    expected = reduced(reduction, per_sample, batch.target_lengths)
    (weights,) = torch.autograd.grad(expected.sum(), per_sample)
    outcome = loss_and_grads(kernel, batch, api, reduction=reduction)
    torch.testing.assert_close(outcome.losses.double(), expected.detach(), rtol=1e-6, atol=0)
    assert_grads_match(outcome, batch, weights)


# omega


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_omega_1_is_the_rnnt_loss_of_the_tokens(kernel, device, api, dtype):
    batch = make_batch(V=33, sigma=0.05, dtype=dtype, omega=1.0, device=device, **RAGGED)
    outcome = loss_and_grads(kernel, batch, api)
    rnnt = loss_and_grads(kernel, batch.without_durations())
    assert (outcome.grad_durations == 0).all()
    torch.testing.assert_close(outcome.losses, rnnt.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(outcome.grad_tokens, rnnt.grad_tokens, rtol=torch.finfo(dtype).eps, atol=1e-6)


def infeasible_batch(device, omega, **arguments):
    """Durations [1] and more labels than frames: sample 0 has no TDT alignment, all have RNN-T's."""
    lengths = {"logit_lengths": [3, 6], "target_lengths": [4, 4]}
    return make_batch(B=2, T=6, U=4, durations=(1,), omega=omega, device=device, **lengths, **arguments)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "options", [{}, {"fastemit_lambda": 0.5, "clamp": 0.1, "delay_penalty": 0.2}], ids=["omega", "all"]
)
@pytest.mark.parametrize("omega", [1e-300, 0.5])
def test_no_alignment_in_a_lattice_that_counts(kernel, device, api, omega, options):
    batch = infeasible_batch(device, omega, **options)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses[0] == torch.inf and outcome.losses[1].isfinite()
    assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()
    assert_matches(outcome, batch)
    with_zero = loss_and_grads(kernel, batch, api, zero_infinity=True)
    assert with_zero.losses[0] == 0 and (with_zero.grad_tokens[0] == 0).all()
    assert_same_bits(with_zero, outcome, samples=[1])


def test_no_alignment_in_a_lattice_that_does_not_count(kernel, device, api):
    batch = infeasible_batch(device, omega=1.0)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses.isfinite().all() and (outcome.grad_tokens[0] != 0).any()
    assert_matches(outcome, batch)


@pytest.mark.parametrize("omega", [1e-300, 0.5, 1.0])
def test_no_alignment_in_the_rnnt_lattice(kernel, device, api, omega):
    # TDT steps over the frame that has no blank; RNN-T needs a blank at every frame.
    batch = make_batch(B=2, T=6, U=3, durations=(0, 1, 2), device=device)
    batch.token_logits[0, 3, :, 0] = -torch.inf
    assert batch.expected.losses.isfinite().all()
    batch = batch.replace(options={"omega": omega})
    assert batch.expected.losses.isinf().tolist() == [True, False]
    outcome = loss_and_grads(kernel, batch, api)
    assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()
    assert_matches(outcome, batch)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_omega_1_does_not_look_at_the_durations(kernel, device, api, bad):
    batch = make_batch(B=2, T=6, U=3, durations=(0, 1, 2), omega=1.0, device=device)
    good = loss_and_grads(kernel, batch, api)
    batch.duration_logits[1, 2, 1] = bad  # -inf at a whole node makes NaN log-probabilities
    outcome = loss_and_grads(kernel, batch.replace(), api)
    assert_same_bits(outcome, good)


def test_an_infinite_upstream_gradient_leaves_an_infeasible_sample_at_zero(kernel, device):
    batch = infeasible_batch(device, omega=0.5, clamp=0.1)
    outcome = loss_and_grads(kernel, batch, upstream=torch.tensor([torch.inf, 1.0], device=device))
    assert (outcome.grad_tokens[0] == 0).all() and (outcome.grad_durations[0] == 0).all()


def test_zero_frames(kernel, device):
    for omega in (0.5, 1.0):
        batch = make_batch(B=2, T=4, U=2, logit_lengths=[0, 4], omega=omega, device=device)
        outcome = loss_and_grads(kernel, batch)
        assert outcome.losses[0] == torch.inf and (outcome.grad_tokens[0] == 0).all()
        assert loss_and_grads(kernel, batch, zero_infinity=True).losses[0] == 0


# fastemit_lambda


@pytest.mark.parametrize("omega", [0.0, 0.4])
def test_fastemit_leaves_the_loss_alone(kernel, device, api, omega):
    batch = make_batch(omega=omega, device=device, **RAGGED)
    plain, fast = loss_and_grads(kernel, batch, api), loss_and_grads(kernel, batch, api, fastemit_lambda=3.0)
    assert same_bits(fast.losses, plain.losses)
    assert not torch.allclose(fast.grad_durations, plain.grad_durations, atol=1e-2)


def test_fastemit_of_nothing_but_blanks_changes_no_bit(kernel, device, api):
    batch = make_batch(B=2, T=7, U=0, durations=(0, 1, 2), device=device)
    assert_same_bits(loss_and_grads(kernel, batch, api, fastemit_lambda=3.0), loss_and_grads(kernel, batch, api))


# clamp


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clamp_before_the_loss_scale(kernel, device, api, dtype):
    batch = make_batch(B=2, T=6, U=3, V=257, scale=3.0, clamp=0.01, dtype=dtype, device=device)
    outcome = loss_and_grads(kernel, batch, api, upstream=torch.full((2,), 65536.0, device=device))
    assert outcome.grad_tokens.double().abs().max().item() == pytest.approx(655.36, rel=2**-8)
    assert_grads_match(outcome, batch, torch.full((2,), 65536.0))


@pytest.mark.parametrize("omega", [0.0, 0.5])
def test_clamp_before_the_upstream_gradient(kernel, device, api, omega):
    weights = torch.tensor([0.5, -20.0, 0.0, 3.0], device=device)
    batch = make_batch(clamp=0.1, omega=omega, device=device, **RAGGED)
    outcome = loss_and_grads(kernel, batch, api, upstream=weights)
    assert_grads_match(outcome, batch, weights)
    torch.testing.assert_close(outcome.grad_tokens[1].abs().max(), torch.tensor(2.0, device=device))


def test_clamp_before_the_weight_of_the_reduction(kernel, device, api):
    batch = make_batch(clamp=0.1, device=device, **RAGGED)  # target lengths 5, 2, 0, 3; mean divides by 4 of them
    outcome = loss_and_grads(kernel, batch, api, reduction="mean")
    largest = outcome.grad_tokens.abs().amax(dim=(1, 2, 3))
    torch.testing.assert_close(largest, 0.1 / 4 / torch.tensor([5.0, 2.0, 1.0, 3.0], device=device))


# delay_penalty


def test_delay_penalty_shifts_the_loss_of_a_forced_alignment(kernel, device, api):
    # T = U + 1 and durations [1]: the labels sit at frames 0 to U - 1, half a frame early on average.
    batch = make_batch(B=2, T=5, U=4, durations=(1,), device=device)
    plain = loss_and_grads(kernel, batch, api)
    early = loss_and_grads(kernel, batch, api, delay_penalty=0.25)
    torch.testing.assert_close(early.losses, plain.losses - 0.25 * 4 * 0.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(early.grad_tokens, plain.grad_tokens, rtol=0, atol=1e-6)


def test_delay_penalty_moves_labels_forward(kernel, device):
    batch = make_batch(T=20, U=4, durations=(0, 1, 2), scale=0.0, device=device)
    frames = torch.arange(20.0, device=device)[:, None, None]
    mean_frame = {}
    for delay_penalty in (-0.5, 0.0, 0.5):
        _, occupancy = kernel.tdt_loss(*batch.args, delay_penalty=delay_penalty, return_occupancy=True)
        mean_frame[delay_penalty] = (occupancy.label[0] * frames).sum().item() / 4
    assert mean_frame[0.5] < mean_frame[0.0] - 2 and mean_frame[-0.5] > mean_frame[0.0] + 2


@pytest.mark.parametrize("delay_penalty", [1e4, -1e4])
def test_the_largest_delay_penalty(kernel, device, api, delay_penalty):
    batch = make_batch(B=2, T=50, U=3, logit_lengths=[50, 31], delay_penalty=delay_penalty, device=device)
    outcome = loss_and_grads(kernel, batch, api)
    assert_losses_match(outcome.losses, batch)
    assert outcome.grad_tokens.isfinite().all() and outcome.grad_durations.isfinite().all()


# The contract, with all of them at once


@pytest.mark.kernels_ci
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_padding_is_never_read(kernel, device, api, garbage):
    lengths = {"logit_lengths": [6, 3, 0], "target_lengths": [1, 3, 2]}
    batch = make_batch(B=3, T=6, U=3, device=device, **lengths, **ALL)
    clean = loss_and_grads(kernel, batch, api)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = garbage
    outcome = loss_and_grads(kernel, batch.replace(), api)
    assert_same_bits(outcome, clean)
    assert (outcome.grad_tokens[~batch.valid] == 0).all() and (outcome.grad_durations[~batch.valid] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [ALL, {"clamp": 0.05}, {"omega": 0.3}], ids=["all", "clamp", "omega"])
def test_nan_or_infinity_at_a_valid_node(kernel, device, api, options, bad):
    lengths = {"logit_lengths": [6, 4, 5], "target_lengths": [3, 2, 1]}
    batch = make_batch(B=3, T=6, U=3, device=device, **lengths, **options)
    good = loss_and_grads(kernel, batch, api)
    batch.token_logits[1, 2, 1, 2] = bad
    batch = batch.replace()
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses[1].isnan()
    for grad in (outcome.grad_tokens, outcome.grad_durations):
        assert grad[1][batch.valid[1]].isnan().all() and (grad[1][~batch.valid[1]] == 0).all()
    assert_same_bits(outcome, good, samples=[0, 2])


@pytest.mark.parametrize("name, value", [("logit_lengths", 7), ("target_lengths", -1), ("targets", 9)])
def test_malformed_samples(kernel, device, api, name, value):
    batch = make_batch(B=3, T=6, U=3, device=device, **ALL)
    good = through_the_ops(kernel, batch, api)
    getattr(batch, name)[1] = value
    outcome = through_the_ops(kernel, batch, api, zero_infinity=True)
    assert outcome.losses[1].isnan()
    assert (outcome.grad_tokens[1] == 0).all() and (outcome.grad_durations[1] == 0).all()
    assert_same_bits(outcome, good, samples=[0, 2])


@pytest.mark.kernels_ci
def test_same_call_same_bits(kernel, device, api):
    batch = make_batch(B=4, T=40, U=40, V=65, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device=device, **ALL)
    first = loss_and_grads(kernel, batch, api)
    for _ in range(3):
        assert_same_bits(loss_and_grads(kernel, batch, api), first)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inplace_gradient(kernel, device, dtype):
    batch = make_batch(V=37, dtype=dtype, device=device, **RAGGED, **ALL)
    logits, seen = batch.joint.clone().requires_grad_() * 1, []
    logits.register_hook(seen.append)
    losses = call(kernel, batch, [logits], inplace_grad=True)
    losses.sum().backward()
    expected = loss_and_grads(kernel, batch, "joint")
    assert seen[0].data_ptr() == logits.data_ptr()
    assert same_bits(losses.detach(), expected.losses)
    assert same_bits(seen[0], torch.cat([expected.grad_tokens, expected.grad_durations], dim=-1))


@pytest.mark.parametrize(
    "options", [{"omega": 0.3}, {"delay_penalty": 0.2}, ALL], ids=["omega", "delay penalty", "all"]
)
def test_gradcheck(kernel, device, options):
    options = {name: value for name, value in options.items() if name in ("omega", "delay_penalty")}  # derivatives
    lengths = {"logit_lengths": [4, 3], "target_lengths": [2, 1]}
    batch = make_batch(B=2, T=4, U=2, V=3, sigma=0.05, dtype=torch.float64, device=device, **lengths, **options)
    assert torch.autograd.gradcheck(lambda x, z: call(kernel, batch, [x, z], "mean"), batch.leaves())


class RecordLoss(TorchDispatchMode):
    """Keeps the shape of alpha and beta as the op `loss` returned them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.name().endswith("::loss"):
            _, _, _, _, alpha_beta, _ = result
            self.shape = tuple(alpha_beta.shape)
        return result


def test_two_lattices_only_where_omega_asks_for_them_and_none_without_gradient(kernel, device, api):
    plain = make_batch(device=device, **RAGGED)
    for options, lattices in [({}, 1), ({"omega": 0.3}, 2), ({**ALL, "omega": 0.0}, 1)]:
        batch = plain.replace(options=options)
        with RecordLoss() as trained:
            expected = loss_and_grads(kernel, batch, api).losses
        assert trained.shape == (lattices, 2, *batch.valid.shape)
        logits = batch.leaves() if api == "separate" else [batch.joint.clone().requires_grad_()]
        with RecordLoss() as evaluated, torch.no_grad():
            losses = call(kernel, batch, logits)
        assert evaluated.shape == (0,) and same_bits(losses, expected)


# torch.compile


class Compiled:
    def __init__(self, kernel):
        for name in ("tdt_loss", "tdt_loss_joint"):
            setattr(self, name, torch.compile(getattr(kernel, name), fullgraph=True, backend="aot_eager"))


@pytest.fixture
def compiled(kernel):
    torch._dynamo.reset()
    yield Compiled(kernel)
    torch._dynamo.reset()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fullgraph_equals_eager(kernel, compiled, device, api, dtype):
    batch = make_batch(sigma=0.05, dtype=dtype, device=device, **RAGGED, **ALL)
    for reduction in ("none", "mean"):
        outcome = loss_and_grads(compiled, batch, api, reduction=reduction)
        expected = loss_and_grads(kernel, batch, api, reduction=reduction)
        assert same_bits(outcome.grad_tokens, expected.grad_tokens)
        assert same_bits(outcome.grad_durations, expected.grad_durations)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)


def test_fullgraph_with_options_that_change_every_step(kernel, compiled, device):
    # torch.compile takes a float that changes between calls for a symbol.
    batch = make_batch(device=device, **RAGGED)
    for step in range(3):
        options = {name: value * (1 + step) / 3 for name, value in ALL.items()}
        outcome = loss_and_grads(compiled, batch.replace(options=options))
        expected = loss_and_grads(kernel, batch.replace(options=options))
        assert same_bits(outcome.grad_tokens, expected.grad_tokens)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)
