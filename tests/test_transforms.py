"""torch.func and forward-mode AD: the losses of logits are differentiated as by backward; the losses without logits refuse.

Values come from the oracle, and from differences of the loss itself in float64. There is no second derivative, by whatever transforms.
"""

import pytest
import torch
import torch.autograd.forward_ad as fw
from support.batches import make_batch
from support.calls import reduced
from support.small_model import FUNCTIONS, loss_and_gradients, make_model, make_speech
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # float64
V, DURATIONS = 6, (0, 1, 2)
NO_SECOND_DERIVATIVE = "double backward through a transducer loss is not supported"


def tdt_loss(kernel, batch, x, reduction, **options):
    return kernel.tdt_loss(x[..., :V].clone(), x[..., V:].clone(), *batch.rest, reduction, **options)


def tdt_loss_of_slices(kernel, batch, x, reduction, **options):
    return kernel.tdt_loss(x[..., :V], x[..., V:], *batch.rest, reduction, **options)


def tdt_loss_joint(kernel, batch, x, reduction, **options):
    return kernel.tdt_loss_joint(x, *batch.rest, reduction, **options)


def in_place(kernel, batch, x, reduction, **options):
    return kernel.tdt_loss_joint(x, *batch.rest, reduction, inplace_grad=True, **options)


def rnnt_loss(kernel, batch, x, reduction, **options):
    return kernel.rnnt_loss(x, *batch.rnnt_args[1:], reduction, **options)


def tdt_layer(kernel, batch, x, reduction):
    return kernel.layers.TDTLoss()(x[..., :V], x[..., V:], *batch.rest, reduction)


def rnnt_layer(kernel, batch, x, reduction):
    return kernel.layers.RNNTLoss()(x, *batch.rnnt_args[1:], reduction)


def parakeet_tdt(kernel, batch, x, reduction, **options):
    return kernel.parakeet_tdt_loss(x[..., :V], x[..., V:], *batch.rest, reduction, **options)


def parakeet_rnnt(kernel, batch, x, reduction, **options):
    return kernel.parakeet_rnnt_loss(x, *batch.rnnt_args[1:], reduction, **options)


LOSSES = (
    tdt_loss,
    tdt_loss_of_slices,
    tdt_loss_joint,
    in_place,
    rnnt_loss,
    tdt_layer,
    rnnt_layer,
    parakeet_tdt,
    parakeet_rnnt,
)
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def batch_for(loss, device="cpu", dtype=torch.float64, **options):
    durations = () if "rnnt" in loss.__name__ else DURATIONS
    lengths = {"logit_lengths": [5, 4, 3], "target_lengths": [2, 1, 0]}
    return make_batch(B=3, T=5, U=2, V=V, durations=durations, dtype=dtype, device=device, **lengths, **options)


def expected_grad(batch):
    """d loss_b / d logits, (B, T, U+1, V + D)."""
    return torch.cat([batch.expected.grad_tokens, batch.expected.grad_durations], dim=-1)


def tangent_of(x, seed=1):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x)


def differences(f, x, tangent, h=1e-5):
    return (f(x + h * tangent) - f(x - h * tangent)) / (2 * h)


@pytest.mark.kernels_ci
@every_loss
def test_grad(kernel, device, loss):
    batch = batch_for(loss, device)
    for reduction in ("sum", "mean", "mean_volume"):
        gradient, value = grad_and_value(lambda x, reduction=reduction: loss(kernel, batch, x, reduction))(batch.joint)
        weights = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
        expected = reduced(reduction, batch.expected.losses * weights, batch.target_lengths)
        (weights,) = torch.autograd.grad(expected, weights)
        torch.testing.assert_close(value, expected.detach(), **CLOSE)
        weights = weights / batch.expected.losses
        torch.testing.assert_close(gradient, expected_grad(batch) * weights[:, None, None, None], **CLOSE)


@every_loss
def test_vjp(kernel, device, loss):
    batch = batch_for(loss, device)
    losses, backward = vjp(lambda x: loss(kernel, batch, x, "none"), batch.joint)
    weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64, device=device)
    torch.testing.assert_close(losses, batch.expected.losses, **CLOSE)
    torch.testing.assert_close(backward(weights)[0], expected_grad(batch) * weights[:, None, None, None], **CLOSE)


@pytest.mark.kernels_ci
@every_loss
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_jvp(kernel, device, loss, reduction):
    batch = batch_for(loss, device)
    tangent = tangent_of(batch.joint)
    losses, actual = jvp(lambda x: loss(kernel, batch, x, reduction), (batch.joint,), (tangent,))
    torch.testing.assert_close(losses, reduced(reduction, batch.expected.losses, batch.target_lengths), **CLOSE)
    of_samples = (expected_grad(batch) * tangent).sum((1, 2, 3))
    torch.testing.assert_close(actual, reduced(reduction, of_samples, batch.target_lengths), **CLOSE)
    by_differences = differences(lambda x: loss(kernel, batch, x, reduction), batch.joint, tangent)
    torch.testing.assert_close(actual, by_differences, rtol=1e-7, atol=1e-8)


@every_loss
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_jacobians(kernel, device, loss, jacobian):
    batch = batch_for(loss, device)
    actual = jacobian(lambda x: loss(kernel, batch, x, "none"))(batch.joint)
    expected = torch.zeros_like(actual)
    expected[range(3), range(3)] = expected_grad(batch)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize(
    "loss", [tdt_loss, tdt_loss_of_slices, tdt_loss_joint, rnnt_loss], ids=lambda loss: loss.__name__
)
def test_vectorized_jacobians_of_autograd(kernel, device, loss, strategy):
    """torch.autograd.functional has a vmap of its own, which is older."""
    batch = batch_for(loss, device)

    def losses(x):
        return loss(kernel, batch, x, "none")

    actual = torch.autograd.functional.jacobian(losses, batch.joint, vectorize=True, strategy=strategy)
    expected = torch.zeros_like(actual)
    expected[range(3), range(3)] = expected_grad(batch)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(
    "loss", [tdt_loss, tdt_loss_of_slices, tdt_loss_joint, rnnt_loss], ids=lambda loss: loss.__name__
)
def test_gradcheck_of_forward_mode_and_of_batched_gradients(kernel, device, loss):
    durations = () if loss is rnnt_loss else (0, 1)
    batch = make_batch(
        B=2, T=3, U=1, V=V, durations=durations, target_lengths=[1, 0], dtype=torch.float64, device=device
    )
    modes = {"check_forward_ad": True, "check_batched_grad": True}
    x = batch.joint.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(kernel, batch, x, "none"), (x,), **modes)


# vmap


@every_loss
@pytest.mark.parametrize("dim", [0, 2, -1])
def test_vmap_over_logits(kernel, device, loss, dim):
    batch = batch_for(loss, device)
    logits = torch.stack([batch.joint, batch.joint * 2, batch.joint - 1])
    expected = torch.stack([loss(kernel, batch, x, "none") for x in logits])
    actual = vmap(lambda x: loss(kernel, batch, x, "none"), in_dims=dim)(logits.movedim(0, dim))
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("loss", [tdt_loss_of_slices, tdt_loss_joint, rnnt_loss], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("batched", ["logits and labels", "labels alone", "lengths alone"])
def test_vmap_over_labels(kernel, device, loss, batched):
    """Under vmap the numbers of labels and lengths cannot be read, so those on the CPU are not checked either."""
    batch = batch_for(loss, device)
    logits = torch.stack([batch.joint, batch.joint * 2])
    targets = torch.stack([batch.targets, batch.targets.flip(1)])
    T, U = (torch.stack([x, x.flip(0)]) for x in (batch.logit_lengths, batch.target_lengths))

    def losses(x, y, T, U):
        return loss(kernel, batch.replace(targets=y, logit_lengths=T, target_lengths=U), x, "none")

    in_dims = {"logits and labels": (0, 0, 0, 0), "labels alone": (None, 0, None, None)}.get(
        batched, (None, None, 0, 0)
    )
    args = [x if d == 0 else x[0] for d, x in zip(in_dims, (logits, targets, T, U))]
    expected = [losses(*(x[i] if d == 0 else x for d, x in zip(in_dims, args))) for i in range(2)]
    torch.testing.assert_close(vmap(losses, in_dims=in_dims)(*args), torch.stack(expected), **CLOSE)


@pytest.mark.kernels_ci
@every_loss
def test_gradients_of_single_samples(kernel, device, loss):
    """vmap over the samples of a batch, each a batch of one: what differential privacy and influence functions ask for."""
    batch = batch_for(loss, device)

    def loss_of_one(x, y, T, U):
        one = batch.replace(targets=y[None], logit_lengths=T[None], target_lengths=U[None])
        return loss(kernel, one, x[None], "sum")

    gradients, losses = vmap(grad_and_value(loss_of_one))(batch.joint, *batch.lengths)
    torch.testing.assert_close(losses, batch.expected.losses, **CLOSE)
    torch.testing.assert_close(gradients, expected_grad(batch), **CLOSE)


def test_transforms_within_transforms(kernel, device):
    batch = batch_for(tdt_loss_joint, device)
    many = torch.stack([torch.stack([batch.joint * (i + j) for i in range(1, 3)]) for j in range(2)])

    def losses(x):
        return kernel.tdt_loss_joint(x, *batch.rest, "none")

    expected = torch.stack([torch.stack([losses(x) for x in row]) for row in many])
    torch.testing.assert_close(vmap(vmap(losses))(many), expected, **CLOSE)
    torch.testing.assert_close(vmap(losses, chunk_size=1)(many[0]), expected[0], **CLOSE)
    tangents = torch.stack([tangent_of(batch.joint, seed) for seed in range(3)])
    actual = vmap(lambda t: jvp(losses, (batch.joint,), (t,))[1])(tangents)
    torch.testing.assert_close(actual, (expected_grad(batch) * tangents).sum((2, 3, 4)), **CLOSE)


# Modules


@pytest.mark.parametrize("function", ["tdt_loss", "tdt_loss_joint", "rnnt_loss"])
def test_functional_call(kernel, device, function):
    model = make_model(kernel, function, device=device, dtype=torch.float64)
    inputs = make_speech(device=device, dtype=torch.float64)
    expected_loss, expected = loss_and_gradients(model, *inputs)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients, loss = grad_and_value(lambda parameters: functional_call(model, parameters, inputs))(parameters)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE)


@pytest.mark.parametrize("function", ["tdt_loss", "tdt_loss_joint", "rnnt_loss"])
@pytest.mark.parametrize("shared", [True, False], ids=["one batch", "a batch for each"])
def test_ensembles(kernel, device, function, shared):
    """The models of an ensemble, trained as one."""
    models = []
    for seed in range(3):
        models.append(make_model(kernel, function, device=device, dtype=torch.float64))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.mul_(1 + 0.1 * seed)
    speech = [make_speech(device=device, dtype=torch.float64, seed=0 if shared else seed) for seed in range(3)]
    expected = [loss_and_gradients(model, *inputs) for model, inputs in zip(models, speech)]
    parameters, buffers = stack_module_state(models)

    def loss(parameters, buffers, *inputs):
        return functional_call(models[0], (parameters, buffers), inputs)

    inputs = speech[0] if shared else [torch.stack(x) for x in zip(*speech)]
    in_dims = (0, 0, *[None if shared else 0] * 4)
    gradients, losses = vmap(grad_and_value(loss), in_dims=in_dims)(parameters, buffers, *inputs)
    torch.testing.assert_close(losses, torch.stack([loss for loss, _ in expected]), **CLOSE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, torch.stack([grads[name] for _, grads in expected]), **CLOSE)


# Forward-mode AD


@every_loss
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_numbers(kernel, device, loss, requires_grad):
    batch = batch_for(loss, device)
    tangent = tangent_of(batch.joint)
    x = batch.joint.clone().requires_grad_(requires_grad)
    with fw.dual_level():
        losses, actual = fw.unpack_dual(loss(kernel, batch, fw.make_dual(x, tangent), "none"))
        torch.testing.assert_close(losses, batch.expected.losses, **CLOSE)
        torch.testing.assert_close(actual, (expected_grad(batch) * tangent).sum((1, 2, 3)), **CLOSE)
        assert losses.requires_grad == requires_grad
        if requires_grad:  # here backward has a tangent of its own
            with pytest.raises(RuntimeError, match=NO_SECOND_DERIVATIVE):
                torch.autograd.grad(losses.sum(), x, retain_graph=True)
    if requires_grad:
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)


def test_a_tangent_of_one_of_the_two(kernel, device):
    batch = batch_for(tdt_loss, device)
    tangents = tangent_of(batch.token_logits), tangent_of(batch.duration_logits)
    grads = batch.expected.grad_tokens, batch.expected.grad_durations
    for which in (0, 1):
        logits = [batch.token_logits, batch.duration_logits]
        with fw.dual_level():
            logits[which] = fw.make_dual(logits[which], tangents[which])
            actual = fw.unpack_dual(kernel.tdt_loss(*logits, *batch.rest, "none")).tangent
        torch.testing.assert_close(actual, (grads[which] * tangents[which]).sum((1, 2, 3)), **CLOSE)


@every_loss
def test_a_dual_level_without_dual_numbers(kernel, device, loss):
    batch = batch_for(loss, device)
    x = batch.joint.clone().requires_grad_()
    with fw.dual_level():
        losses = loss(kernel, batch, x, "none")
        assert fw.unpack_dual(losses).tangent is None
        losses.sum().backward()
    torch.testing.assert_close(x.grad, expected_grad(batch), **CLOSE)


# Options, dtypes


OPTIONS = {
    "omega": {"omega": 0.3},
    "fastemit": {"fastemit_lambda": 0.5},
    "clamp": {"clamp": 0.1},
    "delay_penalty": {"delay_penalty": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(kernel, device, options):
    """fastemit_lambda and clamp change gradients and not losses; forward mode has the gradients' changes."""
    batch = batch_for(tdt_loss_joint, device, **options)
    tangent = tangent_of(batch.joint)

    def losses(x):
        return kernel.tdt_loss_joint(x, *batch.rest, "none", **options)

    torch.testing.assert_close(grad(lambda x: losses(x).sum())(batch.joint), expected_grad(batch), **CLOSE)
    actual = jvp(losses, (batch.joint,), (tangent,))[1]
    torch.testing.assert_close(actual, (expected_grad(batch) * tangent).sum((1, 2, 3)), **CLOSE)


def test_samples_without_an_alignment(kernel, device):
    batch = make_batch(
        B=2, T=3, U=3, durations=(1,), logit_lengths=[3, 3], target_lengths=[3, 1], dtype=torch.float64, device=device
    )
    tangent = tangent_of(batch.joint)
    for zero_infinity, none in ((False, torch.inf), (True, 0.0)):

        def losses(x, zero_infinity=zero_infinity):
            return kernel.tdt_loss_joint(x, *batch.rest, "none", zero_infinity=zero_infinity)

        values, actual = jvp(losses, (batch.joint,), (tangent,))
        assert values[0] == none and actual[0] == 0 and values[1].isfinite()
        gradient = grad(lambda x, f=losses: f(x)[1])(batch.joint)
        torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)


def test_occupancies(kernel, device):
    """Beside a loss that is transformed; they have no derivative."""
    batch = batch_for(tdt_loss_joint, device)

    def loss(x):
        value, occupancy = kernel.tdt_loss_joint(x, *batch.rest, "sum", return_occupancy=True)
        return value, tuple(occupancy)

    gradient, occupancy = grad(loss, has_aux=True)(batch.joint)
    torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)
    for actual, expected in zip(occupancy, (batch.expected.blank_occ, batch.expected.label_occ)):
        torch.testing.assert_close(actual, expected, **CLOSE)
    _, occupancies = vmap(loss)(torch.stack([batch.joint, batch.joint]))
    torch.testing.assert_close(occupancies[0][1], batch.expected.blank_occ, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(kernel, device, dtype):
    batch = batch_for(tdt_loss_joint, device, dtype)
    tangent = tangent_of(batch.joint)
    for loss in (tdt_loss_of_slices, tdt_loss_joint, rnnt_loss):
        own = batch if "rnnt" not in loss.__name__ else batch_for(loss, device, dtype)
        x, tangent = own.joint, tangent_of(own.joint)
        losses, actual = jvp(lambda x, f=loss, own=own: f(kernel, own, x, "none"), (x,), (tangent,))
        assert losses.dtype == actual.dtype == torch.float32
        expected = (expected_grad(own) * tangent.double()).sum((1, 2, 3))
        eps = 0.05 if dtype == torch.bfloat16 else 0.01 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)
        gradient = grad(lambda x, f=loss, own=own: f(kernel, own, x, "sum"))(x)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected_grad(own), rtol=eps, atol=eps * 0.1)


def test_logits_whose_last_dimension_is_not_contiguous(kernel, device):
    batch = batch_for(tdt_loss_joint, device)
    x = batch.joint.mT.contiguous().mT
    gradient = grad(lambda x: kernel.tdt_loss_joint(x, *batch.rest, "sum"))(x)
    torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)


# What is refused

TWICE = {
    "hessian": lambda f, x: hessian(f)(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).square().sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x,)),
    "jvp of jvp": lambda f, x: jvp(lambda x: jvp(f, (x,), (x,))[1], (x,), (x,)),
    "jacrev twice": lambda f, x: jacrev(jacrev(f))(x),
    "jacfwd twice": lambda f, x: jacfwd(jacfwd(f))(x),
    "vjp of vjp": lambda f, x: vjp(lambda x: vjp(f, x)[1](x.new_ones(()))[0].sum(), x)[1](x.new_ones(())),
    "functional.hvp": lambda f, x: torch.autograd.functional.hvp(f, x, x),
}


@pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE.keys())
@pytest.mark.parametrize("loss", [tdt_loss_of_slices, tdt_loss_joint, rnnt_loss], ids=lambda loss: loss.__name__)
def test_second_derivatives_are_an_error(kernel, device, loss, twice):
    batch = batch_for(loss, device)
    with pytest.raises(RuntimeError, match=NO_SECOND_DERIVATIVE):
        twice(lambda x: loss(kernel, batch, x, "sum"), batch.joint)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "fused" in name])
def test_losses_without_logits_refuse(kernel, device, function):
    model = make_model(kernel, function, device=device, dtype=torch.float64)
    inputs = make_speech(device=device, dtype=torch.float64)
    encoded, decoded = (x.detach() for x in model.encode(*inputs[:2]))
    dense = "tdt_loss_joint" if function.startswith("tdt") else "rnnt_loss"

    def loss(x):
        return model.joint_and_loss(x, decoded, *inputs[1:])

    def dual():
        with fw.dual_level():
            loss(fw.make_dual(encoded, encoded))

    for transformed in (
        lambda: grad(loss)(encoded),
        lambda: vjp(loss, encoded),
        lambda: jvp(loss, (encoded,), (encoded,)),
        lambda: vmap(loss)(encoded[None]),
        lambda: jacfwd(loss)(encoded),
        lambda: grad(lambda p: functional_call(model, p, inputs))({n: p.detach() for n, p in model.named_parameters()}),
        dual,
    ):
        with pytest.raises(NotImplementedError, match=f"{function} works with neither torch.func .* use {dense}"):
            transformed()


def test_inplace_grad_has_no_effect(kernel, device):
    """The transformed function's argument is not its own to write to."""
    for loss in (in_place, lambda k, b, x, r: k.rnnt_loss(x, *b.rnnt_args[1:], r, inplace_grad=True)):
        batch = batch_for(in_place, device) if loss is in_place else batch_for(rnnt_loss, device)
        x, version = batch.joint.clone(), batch.joint._version
        tangent = tangent_of(x)
        gradient = grad(lambda x, f=loss, b=batch: f(kernel, b, x, "sum"))(x)
        torch.testing.assert_close(gradient, expected_grad(batch), **CLOSE)
        jvp(lambda x, f=loss, b=batch: f(kernel, b, x, "sum"), (x,), (tangent,))
        vmap(lambda x, f=loss, b=batch: f(kernel, b, x, "sum"))(x[None])
        assert torch.equal(x, batch.joint) and batch.joint._version == version
