"""`tdt_loss` and `tdt_loss_joint`: values and gradients, reductions, dtypes, layouts of the inputs."""

import inspect

import pytest
import torch
from support.batches import make_batch
from support.calls import Outcome, loss_and_grads, reduced
from support.comparisons import assert_grads_match, assert_matches
from support.known_values import PUBLISHED_GRADIENT, PUBLISHED_LOSS
from support.memory import peak_extra_bytes
from support.tolerances import DTYPES, TOLERANCE


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients(kernel, device, api, dtype):
    lengths = {"logit_lengths": [12, 9, 5, 12], "target_lengths": [5, 2, 0, 3]}
    batch = make_batch(
        B=4, T=12, U=5, V=33, durations=(0, 1, 2, 3, 4), sigma=0.05, dtype=dtype, device=device, **lengths
    )
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_published_check_values(kernel, device, api, dtype):
    batch = make_batch(T=3, U=1, V=4, blank=3, sigma=0.05, scale=0.0, dtype=dtype, device=device)
    outcome = loss_and_grads(kernel, batch.replace(targets=torch.zeros_like(batch.targets)), api)
    assert outcome.losses.item() == pytest.approx(PUBLISHED_LOSS, rel=TOLERANCE[dtype].loss, abs=5e-7)
    both = torch.cat([outcome.grad_tokens, outcome.grad_durations], dim=-1)[0].double().cpu()
    for (t, u), values in PUBLISHED_GRADIENT.items():
        torch.testing.assert_close(both[t, u], torch.tensor(values).double(), rtol=TOLERANCE[dtype].rounding, atol=2e-7)


@pytest.mark.parametrize("blank", [0, 3, 6, -1, -7])
def test_blank_anywhere_and_counted_from_the_end(kernel, device, api, blank):
    batch = make_batch(B=2, T=6, U=3, V=7, blank=blank, device=device)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.parametrize("durations", [(1,), (0, 1), (2, 4), (4, 3, 2, 1, 0), (0, 1, 1), (0, 1, 9, 17)])
def test_every_kind_of_durations(kernel, device, api, durations):
    batch = make_batch(B=2, T=14, U=3, V=6, durations=durations, target_lengths=[3, 2], device=device)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


@pytest.mark.parametrize("container", [list, tuple, torch.tensor, lambda d: torch.tensor(d, dtype=torch.int32)])
def test_durations_in_any_container(kernel, device, container):
    batch = make_batch(B=2, T=6, U=3, durations=(0, 1, 3), device=device)
    losses = kernel.tdt_loss(*batch.args[:6], container([0, 1, 3]), reduction="none")
    torch.testing.assert_close(losses.double(), batch.expected.losses, rtol=1e-6, atol=0)


def test_label_equal_to_blank_adds_both_terms(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, V=5, blank=2, device=device)
    batch.targets[0, 1] = 2
    assert_matches(loss_and_grads(kernel, batch, api), batch)


def test_a_vocabulary_of_the_blank_alone(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, V=1, device=device)
    outcome = loss_and_grads(kernel, batch, api)
    assert_matches(outcome, batch)
    assert (outcome.grad_tokens.abs() < 1e-6).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "mean_batch", "mean_volume"])
def test_reductions(kernel, device, api, reduction):
    batch = make_batch(B=3, T=7, U=4, logit_lengths=[7, 5, 6], target_lengths=[4, 0, 2], sigma=0.05, device=device)
    per_sample = batch.expected.losses.clone().requires_grad_()
    expected = reduced(reduction, per_sample, batch.target_lengths)
    (weights,) = torch.autograd.grad(expected.sum(), per_sample)
    outcome = loss_and_grads(kernel, batch, api, reduction=reduction)
    assert outcome.losses.shape == expected.shape and outcome.losses.dtype == torch.float32
    torch.testing.assert_close(outcome.losses.double(), expected.detach(), rtol=1e-6, atol=0)
    assert_grads_match(outcome, batch, weights)


def test_mean_is_the_default(kernel, device):
    batch = make_batch(B=2, T=7, U=4, target_lengths=[4, 2], device=device)
    assert torch.equal(kernel.tdt_loss(*batch.args), kernel.tdt_loss(*batch.args, reduction="mean"))
    assert torch.equal(
        kernel.tdt_loss_joint(*batch.joint_args), kernel.tdt_loss_joint(*batch.joint_args, reduction="mean")
    )


def test_a_silent_utterance_does_not_make_the_mean_infinite(kernel, device):
    batch = make_batch(B=2, T=4, U=2, target_lengths=[0, 2], device=device)
    for reduction in ("mean", "mean_volume"):
        assert kernel.tdt_loss(*batch.args, reduction).isfinite()
    silent = make_batch(T=4, U=0, device=device)
    per_sample = silent.expected.losses[0].item()
    assert kernel.tdt_loss(*silent.args, "mean").item() == pytest.approx(per_sample, rel=1e-6)
    assert kernel.tdt_loss(*silent.args, "mean_volume").item() == pytest.approx(per_sample, rel=1e-6)


def test_empty_batch(kernel, device, api):
    batch = make_batch(B=0, T=4, U=2, device=device)
    outcome = loss_and_grads(kernel, batch, api)
    assert outcome.losses.shape == (0,) and outcome.grad_tokens.shape == (0, 4, 3, 7)
    assert loss_and_grads(kernel, batch, api, reduction="sum").losses.item() == 0


def test_sigma(kernel, device, api):
    batch = make_batch(B=2, T=6, U=3, V=7, sigma=0.3, device=device)
    assert_matches(loss_and_grads(kernel, batch, api), batch)


def test_zero_infinity(kernel, device, api):
    lengths = {"logit_lengths": [3, 6], "target_lengths": [3, 3]}
    batch = make_batch(B=2, T=6, U=3, durations=(1,), device=device, **lengths)
    outcome = loss_and_grads(kernel, batch, api, zero_infinity=True)
    assert outcome.losses[0] == 0
    assert outcome.losses[1].item() == pytest.approx(batch.expected.losses[1].item(), rel=1e-6)
    assert_grads_match(outcome, batch)
    assert loss_and_grads(kernel, batch, api).losses[0] == torch.inf


def layouts(batch):
    """The same logits with other strides, by name; NaN fills the gaps."""

    def spread(logits, index, *size):
        return torch.full(size, torch.nan, dtype=logits.dtype, device=logits.device)[index].copy_(logits)

    def each(change):
        return batch.replace(token_logits=change(batch.token_logits), duration_logits=change(batch.duration_logits))

    B, T, U1, V = batch.token_logits.shape
    joint = batch.joint
    return {
        "slices of a joint tensor": batch.replace(token_logits=joint[..., :V], duration_logits=joint[..., V:]),
        "time first": each(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        "labels first": each(lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)),
        "every second frame": each(lambda x: spread(x, (slice(None), slice(None, None, 2)), B, 2 * T, U1, x.shape[-1])),
        "last dimension not contiguous": each(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        "every second token": each(lambda x: spread(x, (..., slice(None, None, 2)), B, T, U1, 2 * x.shape[-1])),
    }


@pytest.mark.parametrize("layout", layouts(make_batch()).keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(kernel, device, layout, dtype):
    batch = make_batch(
        B=3, T=6, U=3, V=13, logit_lengths=[6, 4, 5], target_lengths=[3, 2, 1], dtype=dtype, device=device
    )
    changed = layouts(batch)[layout]
    outcome = loss_and_grads(kernel, changed)
    assert_matches(outcome, batch)
    torch.testing.assert_close(outcome.losses, loss_and_grads(kernel, batch).losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["time first", "every second frame", "last dimension not contiguous"])
def test_layouts_of_joint_logits(kernel, device, layout):
    batch = make_batch(B=3, T=6, U=3, V=13, logit_lengths=[6, 4, 5], target_lengths=[3, 2, 1], device=device)
    logits = layouts(batch.replace(token_logits=batch.joint))[layout].token_logits.detach().requires_grad_()
    losses = kernel.tdt_loss_joint(logits, *batch.rest, "none")
    losses.sum().backward()
    assert_matches(Outcome(losses.detach(), *logits.grad.split([13, 3], dim=-1)), batch)


def test_expanded_batch_sums_its_gradients(kernel, device):
    one = make_batch(T=6, U=3, device=device)
    three = make_batch(B=3, T=6, U=3, target_lengths=[3, 1, 2], device=device)
    leaf = one.token_logits.clone().requires_grad_()
    expanded = three.replace(token_logits=leaf.expand(3, -1, -1, -1))
    losses = kernel.tdt_loss(*expanded.args, "none")
    losses.sum().backward()
    torch.testing.assert_close(losses.detach().double(), expanded.expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        leaf.grad.double(), expanded.expected.grad_tokens.sum(0, keepdim=True), rtol=0, atol=1e-5
    )


def test_no_hidden_copy_of_strided_logits(kernel, device):
    batch = make_batch(B=2, T=24, U=7, V=2048, device=device)
    slices = layouts(batch)["slices of a joint tensor"]
    permuted = layouts(batch)["time first"]
    for changed in (slices, permuted):
        nodes = batch.valid.numel()
        assert peak_extra_bytes(lambda changed=changed: kernel.tdt_loss(*changed.args), device) <= 64 * nodes + 8192


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_integer_dtypes_of_targets_and_lengths(kernel, device, index_dtype):
    batch = make_batch(
        B=2, T=6, U=3, logit_lengths=[6, 4], target_lengths=[3, 2], device=device, index_dtype=index_dtype
    )
    assert_matches(loss_and_grads(kernel, batch), batch)


def test_targets_and_lengths_of_any_strides(kernel, device):
    batch = make_batch(B=3, T=6, U=3, logit_lengths=[6, 4, 5], target_lengths=[3, 2, 1], device=device)
    strided = batch.replace(
        targets=batch.targets.t().contiguous().t(),
        logit_lengths=torch.stack([batch.logit_lengths, torch.full_like(batch.logit_lengths, -9)], dim=1)[:, 0],
    )
    assert strided.targets.stride() == (1, 3) and strided.logit_lengths.stride() == (2,)
    assert_matches(loss_and_grads(kernel, strided), batch)


def test_error_is_no_larger_than_plain_torch(kernel, device):
    """The grounds of the tolerance table: transformers' loss, plain torch in float32, beside ours on the same logits."""
    plain_loss = pytest.importorskip("transformers.loss.loss_tdt").tdt_loss
    batch = make_batch(B=2, T=60, U=20, V=101, durations=(0, 1, 2, 3, 4), scale=3.0, device=device)
    token_logits, duration_logits = batch.leaves()
    losses = plain_loss(token_logits, duration_logits, *batch.rest, reduction="none")
    losses.sum().backward()
    plain = Outcome(losses.detach(), token_logits.grad, duration_logits.grad)
    ours = loss_and_grads(kernel, batch)

    def error(outcome, name):
        return (getattr(outcome, name).double() - getattr(batch.expected, name)).abs().max().item()

    for name in ("losses", "grad_tokens", "grad_durations"):
        assert error(ours, name) <= 2 * error(plain, name) + 1e-6, name


def test_signatures(kernel):
    def names(function):
        return [
            (p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY
        ]

    common = [("targets", inspect.Parameter.empty), ("logit_lengths", inspect.Parameter.empty)]
    assert names(kernel.tdt_loss)[2:4] == names(kernel.tdt_loss_joint)[1:3] == common
    assert names(kernel.tdt_loss)[-2:] == names(kernel.tdt_loss_joint)[-2:] == [("sigma", 0.0), ("reduction", "mean")]
    assert names(kernel.tdt_loss) == names(pytest.importorskip("transformers.loss.loss_tdt").tdt_loss)
    options = inspect.signature(kernel.tdt_loss_joint).parameters
    assert options["zero_infinity"].kind is options["inplace_grad"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum"])
def test_reduction_of_more_samples_than_a_block_has_threads(kernel, device, reduction):
    lengths = torch.arange(600) % 4  # silent utterances among them
    batch = make_batch(B=600, T=5, U=3, V=6, target_lengths=lengths.tolist(), device=device)
    losses = kernel.tdt_loss(*batch.args, reduction="none").double()
    divisor = lengths.clamp(min=1).double().to(device)
    expected = {
        "mean": (losses / divisor).mean(),
        "mean_batch": losses.mean(),
        "mean_volume": losses.sum() / lengths.sum().item(),
        "sum": losses.sum(),
    }[reduction]
    assert kernel.tdt_loss(*batch.args, reduction=reduction).item() == pytest.approx(expected.item(), rel=1e-6)
