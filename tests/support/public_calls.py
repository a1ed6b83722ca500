"""`CALLS` has every public function once, on the tensors of `Inputs`; what holds for a call holds for each of them."""

import inspect

import pytest
import torch

from support.comparisons import same_bits

V, DURATIONS, HIDDEN = 6, [0, 1, 2], 8
D = len(DURATIONS)


class Inputs:
    """Tensors of one batch, made where the current modes of torch want them: B=3, T=5, U=2."""

    def __init__(self, device="cpu", labels_device=None, dtype=torch.float32, pin=False):
        generator = None if device == "meta" else torch.Generator("cpu").manual_seed(0)

        def normal(*shape):
            x = torch.empty(*shape, device="cpu")
            x = x.normal_(generator=generator) if type(x) is torch.Tensor else x
            return x.to(device, dtype).requires_grad_()

        self.logits = normal(3, 5, 3, V + D)
        self.encoder, self.decoder = normal(3, 5, HIDDEN), normal(3, 3, HIDDEN)
        self.weight, self.bias = normal(V + D, HIDDEN), normal(V + D)
        labels = ([[1, 2], [3, -100], [5, 1]], [5, 4, 3], [2, 1, 2])
        self.labels = [torch.tensor(x, device="cpu").to(labels_device or device) for x in labels]
        if pin:
            self.labels = [x.pin_memory() for x in self.labels]

    @property
    def slices(self):
        return self.logits[..., :V], self.logits[..., V:]

    @property
    def head(self):
        return self.encoder, self.decoder, self.weight, self.bias

    @property
    def rnnt_head(self):
        return self.encoder, self.decoder, self.weight[:V], None if self.bias is None else self.bias[:V]

    @property
    def wanted(self):
        return self.logits, *self.head


CALLS = {
    "tdt_loss": lambda k, x, **o: k.tdt_loss(*x.slices, *x.labels, 0, DURATIONS, **o),
    "tdt_loss_joint": lambda k, x, **o: k.tdt_loss_joint(x.logits, *x.labels, 0, DURATIONS, **o),
    "rnnt_loss": lambda k, x, **o: k.rnnt_loss(x.logits, *x.labels, 0, **o),
    "tdt_loss_fused_joint": lambda k, x, **o: k.tdt_loss_fused_joint(*x.head, *x.labels, 0, DURATIONS, **o),
    "rnnt_loss_fused_joint": lambda k, x, **o: k.rnnt_loss_fused_joint(*x.rnnt_head, *x.labels, 0, **o),
    "parakeet_tdt_loss": lambda k, x, **o: k.parakeet_tdt_loss(*x.slices, *x.labels, 0, DURATIONS, **o),
    "parakeet_rnnt_loss": lambda k, x, **o: k.parakeet_rnnt_loss(x.logits, *x.labels, 0, **o),
    "TDTLoss": lambda k, x, **o: k.layers.TDTLoss()(*x.slices, *x.labels, 0, DURATIONS, **o),
    "RNNTLoss": lambda k, x, **o: k.layers.RNNTLoss()(x.logits, *x.labels, 0, **o),
    "tdt_align": lambda k, x, **o: k.tdt_align(*x.slices, *x.labels, 0, DURATIONS, **o),
    "tdt_align_joint": lambda k, x, **o: k.tdt_align_joint(x.logits, *x.labels, 0, DURATIONS, **o),
    "rnnt_align": lambda k, x, **o: k.rnnt_align(x.logits, *x.labels, 0, **o),
}
ALIGN = [name for name in CALLS if "align" in name]
LOSSES = [name for name in CALLS if "align" not in name]
FUSED = [name for name in CALLS if "fused" in name]
every_call = pytest.mark.parametrize("name", CALLS)


def outcome(kernel, name, inputs, **options):
    """What the call returns, and the gradients of what it can be differentiated by."""
    result = CALLS[name](kernel, inputs, **options)
    if name in ALIGN:
        return list(result)
    grads = torch.autograd.grad(result.sum(), inputs.wanted, allow_unused=True)
    assert any(grad is not None for grad in grads)
    return [result.detach(), *grads]


def assert_same_outcome(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected):
        assert (ours is None) == (theirs is None)
        assert ours is None or same_bits(ours, theirs)


def own_logits(inputs):
    """As a model makes them: nobody else's memory."""
    leaf, inputs.logits = inputs.logits, inputs.logits * 1.5
    return leaf


def options_of(kernel, name):
    function = getattr(kernel, name, None) or getattr(kernel.layers, name).forward
    return inspect.signature(function).parameters
