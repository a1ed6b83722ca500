"""The dense losses as functions of joint logits, as torch.func and forward mode want them, and what their derivatives must be.

Values come from the oracle, and from differences of the loss itself in float64. There is no second derivative, by whatever transforms.
"""

import pytest
import torch

from support.batches import make_batch

V, DURATIONS = 6, (0, 1, 2)

CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # float64
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
