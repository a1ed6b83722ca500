"""`torch.func` around the losses: grad, vjp, jvp, Jacobians, vmap, and models."""

import pytest
import torch
from support.batches import make_batch
from support.calls import reduced
from support.small_model import loss_and_gradients, make_model, make_speech
from support.transformed import (
    CLOSE,
    V,
    batch_for,
    differences,
    every_loss,
    expected_grad,
    rnnt_loss,
    tangent_of,
    tdt_loss,
    tdt_loss_joint,
    tdt_loss_of_slices,
)
from torch.func import (
    functional_call,
    grad_and_value,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)


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
