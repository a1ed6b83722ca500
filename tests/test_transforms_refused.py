"""What the losses refuse under transforms: second derivatives, losses without logits, gradients in place."""

import pytest
import torch
import torch.autograd.forward_ad as fw
from support.small_model import FUNCTIONS, make_model, make_speech
from support.transformed import (
    CLOSE,
    NO_SECOND_DERIVATIVE,
    batch_for,
    expected_grad,
    in_place,
    rnnt_loss,
    tangent_of,
    tdt_loss_joint,
    tdt_loss_of_slices,
)
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

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
