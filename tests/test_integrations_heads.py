"""CASES 16, and its kind: whatever sits on the head or around the joint network, the loss is that of the logits.

Either the fused loss has it in, or the dense loss is taken and a warning says why.
"""

import warnings

import pytest
import torch
from support.tiny_transducers import MODELS, assert_same_gradients, loss_and_gradients, make_batch, make_transducer
from torch import nn

NAME = MODELS[0]


class Adapter(nn.Module):
    """As PEFT wraps a layer: the layer's own weight by that name, and a product of two thin ones beside it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)
    out_features = property(lambda self: self.base_layer.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Quantised(nn.Linear):
    """Another product than the weight's."""

    def forward(self, x):
        scale = self.weight.detach().abs().amax() / 3
        return nn.functional.linear(x, (self.weight / scale).round() * scale + 0 * self.weight, self.bias)


class Tagged(torch.Tensor):
    """A weight of another type, as quantisation libraries and tensor parallelism have them."""


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def adapter(model):
    torch.manual_seed(1)
    model.joint.head = Adapter(model.joint.head)


def quantised(model):
    model.joint.head.__class__ = Quantised


def hook(model):
    model.joint.head.register_forward_hook(lambda module, args, output: output * 1.5)


def pre_hook(model):
    model.joint.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def backward_hook(model):
    model.joint.head.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.0,))


def hook_on_the_joint_network(model):
    model.joint.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_on_the_activation(model):
    model.joint.activation.register_forward_hook(lambda module, args, output: output * 1.5)


def replaced_forward(model):
    own = model.joint.head.forward
    model.joint.head.forward = lambda x: own(x) * 1.5


def replaced_joint(model):
    own = model.joint

    class Joint(type(own)):
        def forward(self, **states):
            return super().forward(**states) * 1.5

    own.__class__ = Joint


def sequential_head(model):
    model.joint.head = nn.Sequential(nn.Dropout(0.0), model.joint.head)


def weight_norm_by_hook(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.joint.head)


def tensor_subclass(model):
    weight = model.joint.head.weight.detach().as_subclass(Tagged)
    model.joint.head.weight = nn.Parameter(weight)
    assert type(model.joint.head.weight) is not nn.Parameter


def another_activation(model):
    model.joint.activation = nn.SiLU()


FALLBACKS = [
    adapter,
    quantised,
    hook,
    pre_hook,
    backward_hook,
    hook_on_the_joint_network,
    hook_on_the_activation,
    replaced_forward,
    replaced_joint,
    sequential_head,
    weight_norm_by_hook,
    tensor_subclass,
    another_activation,
]


@pytest.mark.parametrize("change", FALLBACKS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_what_changes_the_head_gives_the_dense_loss_and_a_warning(kernel, change, name):
    model, batch = make_transducer(name), make_batch(name)
    untouched = make_transducer(name)
    kernel.use_loss(untouched)
    change(model)
    kernel.use_loss(model)
    expected, gradients = loss_and_gradients(model, batch)
    kernel.use_fused_loss(model)
    with pytest.warns(UserWarning, match=f"use_fused_loss\\({name}\\): .* so the loss is computed from"):
        output, ours = loss_and_gradients(model, batch)
    assert torch.equal(output.loss, expected.loss)
    assert_same_gradients(ours, gradients)
    assert output.logits is not None
    if change not in (backward_hook, weight_norm_by_hook, tensor_subclass, sequential_head):
        assert output.loss != untouched(**batch).loss  # the change shows in the loss, so the comparison means something
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        model(**batch)


def test_an_adapter_has_a_gradient(kernel):
    model, batch = make_transducer(NAME), make_batch(NAME)
    adapter(model)
    kernel.use_fused_loss(model)
    with pytest.warns(UserWarning):
        _, gradients = loss_and_gradients(model, batch)
    assert gradients["joint.head.lora_A.weight"].norm() > 0 and gradients["joint.head.lora_B.weight"].norm() > 0


def test_an_adapter_that_comes_after_the_patch(kernel):
    model, batch = make_transducer(NAME), make_batch(NAME)
    kernel.use_fused_loss(model)
    assert model(**batch).logits is None
    adapter(model)
    with pytest.warns(UserWarning, match="not a torch.nn.Linear"):
        assert model(**batch).logits is not None
    model.joint.head = model.joint.head.base_layer
    assert model(**batch).logits is None


def test_a_parametrised_head_is_composed(kernel):
    model, batch = make_transducer(NAME), make_batch(NAME)
    nn.utils.parametrize.register_parametrization(model.joint.head, "weight", Double())
    kernel.use_loss(model)
    expected, gradients = loss_and_gradients(model, batch)
    kernel.use_fused_loss(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, ours = loss_and_gradients(model, batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(ours, gradients)


def test_hooks_on_parameters_and_on_the_model_are_kept(kernel):
    model, batch = make_transducer(NAME), make_batch(NAME)
    kernel.use_fused_loss(model)
    _, gradients = loss_and_gradients(model, batch)
    seen = []
    model.joint.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.register_forward_hook(lambda module, args, output: seen.append(output.loss))
    model.encoder_projector.register_forward_hook(lambda module, args, output: seen.append(output))
    _, ours = loss_and_gradients(model, batch)
    assert len(seen) == 2
    torch.testing.assert_close(ours["joint.head.weight"], gradients["joint.head.weight"] / 2)


def test_a_head_without_bias_and_a_frozen_head(kernel):
    for change in (lambda head: setattr(head, "bias", None), lambda head: head.requires_grad_(False)):
        model, batch = make_transducer(NAME), make_batch(NAME)
        change(model.joint.head)
        kernel.use_loss(model)
        expected, gradients = loss_and_gradients(model, batch)
        kernel.use_fused_loss(model)
        output, ours = loss_and_gradients(model, batch)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
        assert output.logits is None
        assert_same_gradients(ours, gradients)


def test_global_hooks_on_modules(kernel):
    model, batch = make_transducer(NAME), make_batch(NAME)
    kernel.use_fused_loss(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.warns(UserWarning, match="global hooks"):
            assert model(**batch).logits is not None
    finally:
        handle.remove()
    assert model(**batch).logits is None
