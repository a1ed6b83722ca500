"""`layers.TDTLoss`: what the kernels library asks of a layer, and the same numbers as the functions, from slices of a joint tensor too."""

import inspect

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import assert_matches, same_bits
from support.memory import PaddedSlices, peak_extra_bytes


def test_what_the_kernels_library_asks_of_a_layer(kernel):
    layer = kernel.layers.TDTLoss
    assert issubclass(layer, torch.nn.Module)
    assert layer.has_backward is True and layer.can_torch_compile is True
    assert "__init__" not in vars(layer)
    module = layer()
    assert not module.state_dict() and not list(module.parameters())


def test_forward_has_the_signature_of_transformers(kernel):
    transformers_loss = pytest.importorskip("transformers.loss.loss_tdt").tdt_loss
    theirs = list(inspect.signature(transformers_loss).parameters.values())
    ours = list(inspect.signature(kernel.layers.TDTLoss.forward).parameters.values())[1:]
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.kernels_ci
def test_same_numbers_as_the_function(kernel, device):
    batch = make_batch(B=3, T=7, U=4, logit_lengths=[7, 5, 6], target_lengths=[4, 2, 3], sigma=0.05, device=device)
    module = kernel.layers.TDTLoss()
    token_logits, duration_logits = batch.leaves()
    losses = module(token_logits, duration_logits, *batch.rest, reduction="none")
    losses.sum().backward()
    expected = loss_and_grads(kernel, batch)
    assert same_bits(losses.detach(), expected.losses)
    assert same_bits(token_logits.grad, expected.grad_tokens) and same_bits(
        duration_logits.grad, expected.grad_durations
    )


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum"])
def test_reductions(kernel, device, reduction):
    batch = make_batch(B=2, T=7, U=4, target_lengths=[4, 2], device=device)
    assert torch.equal(kernel.layers.TDTLoss()(*batch.args, reduction), kernel.tdt_loss(*batch.args, reduction))


def slices(logits, D):
    """As Parakeet cuts."""
    V = logits.shape[-1] - D
    return logits[..., :V], logits[..., V:]


def test_slices_of_one_joint_tensor(kernel, device):
    batch = make_batch(B=3, T=7, U=4, V=11, logit_lengths=[7, 5, 6], target_lengths=[4, 2, 3], device=device)
    leaf = batch.joint.clone().requires_grad_()
    logits = leaf * 1  # as the head of a model makes them
    losses = kernel.layers.TDTLoss()(*slices(logits, 3), *batch.rest, reduction="none")
    losses.sum().backward()
    expected = loss_and_grads(kernel, batch)
    expected.losses, expected.grad_tokens, expected.grad_durations = losses.detach(), *slices(leaf.grad, 3)
    assert_matches(expected, batch)


def test_slices_whose_own_gradients_are_observed(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=11, device=device)
    leaf = batch.joint.clone().requires_grad_()
    token_logits, duration_logits = slices(leaf * 1, 3)
    token_logits.retain_grad()
    seen = []
    duration_logits.register_hook(seen.append)
    kernel.layers.TDTLoss()(token_logits, duration_logits, *batch.rest, reduction="sum").backward()
    torch.testing.assert_close(token_logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[0].double(), batch.expected.grad_durations, rtol=0, atol=1e-5)


def test_slices_of_which_one_is_detached(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=11, device=device)
    leaf = batch.joint.clone().requires_grad_()
    token_logits, duration_logits = slices(leaf * 1, 3)
    kernel.layers.TDTLoss()(token_logits.detach(), duration_logits, *batch.rest, reduction="sum").backward()
    grad_tokens, grad_durations = slices(leaf.grad, 3)
    assert (grad_tokens == 0).all()
    torch.testing.assert_close(grad_durations.double(), batch.expected.grad_durations, rtol=0, atol=1e-5)


def test_slices_that_do_not_adjoin(kernel, device):
    batch = make_batch(B=2, T=6, U=3, V=11, device=device)
    wide = torch.cat(
        [batch.token_logits, torch.full_like(batch.token_logits, torch.nan), batch.duration_logits], dim=-1
    )
    leaf = wide.requires_grad_()
    logits = leaf * 1
    kernel.layers.TDTLoss()(logits[..., :11], logits[..., 22:], *batch.rest, reduction="sum").backward()
    torch.testing.assert_close(leaf.grad[..., :11].double(), batch.expected.grad_tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(leaf.grad[..., 22:].double(), batch.expected.grad_durations, rtol=0, atol=1e-5)


def test_errors_come_through(kernel, device):
    batch = make_batch(device=device)
    with pytest.raises(ValueError, match="reduction"):
        kernel.layers.TDTLoss()(*batch.args, reduction="average")


def layer_loss(kernel, batch, token_logits, duration_logits):
    return kernel.layers.TDTLoss()(token_logits, duration_logits, *batch.joint_args[1:])


def loss_of_copies(kernel, batch, token_logits, duration_logits):
    """The same of tensors that lie apart: autograd alone puts the gradients of the slices together."""
    return kernel.tdt_loss(token_logits.clone(), duration_logits.clone(), *batch.joint_args[1:])


def test_slices_of_a_joint_tensor_need_no_tensor_of_zeros(kernel, device):
    """Backward makes the gradient of the joint tensor and nothing else of that size."""
    batch = make_batch(B=2, T=30, U=10, V=1019, durations=(0, 1, 2, 3, 4), device=device)
    size, of_nodes = batch.joint.numel() * batch.joint.element_size(), 60 * batch.valid.numel() + 8192
    for loss_of, padded_slices, least, most in ((layer_loss, 0, 1, 1), (loss_of_copies, 2, 1.9, 9)):
        leaf = batch.joint.detach().requires_grad_()
        loss = loss_of(kernel, batch, *slices(leaf.view_as(leaf), 5))
        with PaddedSlices() as padded:
            loss.backward(retain_graph=True)
        assert padded.count == padded_slices
        leaf.grad = None
        peak = peak_extra_bytes(loss.backward, device)
        assert least * size <= peak <= most * size + of_nodes


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda joint, V: (joint[..., 1:V], joint[..., V:]), id="a gap in front"),
        pytest.param(lambda joint, V: (joint[..., : V - 1], joint[..., V:]), id="a gap between"),
        pytest.param(lambda joint, V: (joint[:, 1:, :, :V], joint[:, 1:, :, V:]), id="other frames"),
    ],
)
def test_other_slices_are_taken_as_they_are(kernel, device, cut):
    batch = make_batch(B=2, T=6, U=3, V=9, device=device)
    batch = batch.replace(targets=batch.targets.clamp(max=6), logit_lengths=batch.logit_lengths.clamp(max=5))
    losses, grads = [], []
    for loss_of in (layer_loss, loss_of_copies):
        joint = batch.joint.detach().requires_grad_()
        loss = loss_of(kernel, batch, *cut(joint, 9))
        loss.backward()
        losses.append(loss.detach())
        grads.append(joint.grad)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
    assert grads[0].any()


def test_a_joint_tensor_changed_in_place_after_the_cut(kernel, device):
    """The slices then belong to the new values, and so must the gradient."""
    batch = make_batch(B=2, T=6, U=3, device=device)
    leaf = batch.joint_args[0].detach().requires_grad_()
    joint = leaf * 1.0
    cut = slices(joint, 3)
    joint.mul_(2.0)
    layer_loss(kernel, batch, *cut).backward()
    expected = batch.joint_args[0].detach().requires_grad_()
    kernel.tdt_loss_joint(expected * 2.0, *batch.joint_args[1:]).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


def run_behind_a_linear_layer(kernel, batch, cut, loss_of):
    """The loss of what `cut` makes of a linear layer's output, the gradient of the layer's input, and how many slices were padded."""
    torch.manual_seed(0)
    head = torch.nn.Linear(5, batch.joint.shape[-1]).to(batch.joint.device)
    hidden = torch.randn(*batch.joint.shape[:3], 5, device=batch.joint.device, requires_grad=True)
    loss = loss_of(kernel, batch, *cut(head(hidden)))
    with PaddedSlices() as padded:
        loss.backward()
    return loss.detach(), hidden.grad, padded.count


CUTS = {
    "as Parakeet cuts": lambda logits: slices(logits.squeeze(2), 3),
    "counted from the end": lambda logits: (logits[..., :-3], logits[..., -3:]),
    "split": lambda logits: logits.split([9, 3], dim=-1),
    "a copy": lambda logits: slices(logits.flip(1), 3),
    "another view": lambda logits: slices(logits.transpose(1, 2).transpose(1, 2), 3),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_slices_of_what_a_linear_layer_gives(kernel, device, cut):
    batch = make_batch(B=2, T=6, U=3, V=9, device=device)
    loss, grad, padded = run_behind_a_linear_layer(kernel, batch, cut, layer_loss)
    expected_loss, expected_grad, expected_padded = run_behind_a_linear_layer(kernel, batch, cut, loss_of_copies)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)
    assert padded == 0 and expected_padded in (0, 2)  # the backward of a split is a concatenation


def test_hooks_between_the_head_and_the_slices(kernel, device):
    """They see the gradient of the joint tensor, and what they make of it goes on."""
    batch = make_batch(B=2, T=6, U=3, V=9, device=device)
    grads = []
    for loss_of in (layer_loss, loss_of_copies):
        leaf = batch.joint.detach().requires_grad_()
        logits, seen = leaf * 2.0, []
        logits.register_hook(lambda grad, seen=seen: seen.append(grad.clone()) or grad * 3.0)
        loss_of(kernel, batch, *slices(logits, 3)).backward()
        grads.append((*seen, leaf.grad))
        assert len(seen) == 1 and torch.equal(leaf.grad, seen[0] * 6.0)
    for actual, expected in zip(*grads):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
