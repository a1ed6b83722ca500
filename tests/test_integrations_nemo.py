"""NeMo's side without NeMo: what its wrapper does with `model.loss._loss`, and a stand-in for its models, patched.

NeMo itself is run by `make test-frameworks`.
"""

import copy
import pickle
import sys

import pytest
import torch
from support.batches import make_batch
from support.comparisons import assert_losses_match
from torch import nn


@pytest.fixture
def batch(device):
    """As in a NeMo model: vocabulary, blank, durations."""
    return make_batch(
        3, 9, 4, 8, (0, 1, 2, 3), logit_lengths=[9, 7, 5], target_lengths=[4, 2, 3], blank=7, device=device
    )


@pytest.fixture
def rnnt_losses(batch):
    """The oracle's losses of the token logits alone."""
    return batch.replace(duration_logits=batch.duration_logits[..., :0], durations=()).expected.losses


class Wrapper:
    """What NeMo's RNNTLoss does around its `_loss`: integers of 64 bits, no reduction inside, its own mean outside."""

    def __init__(self, loss):
        self._loss = loss

    def __call__(self, log_probs, targets, input_lengths, target_lengths):
        reduction, self._loss.reduction = self._loss.reduction, None
        losses = self._loss(
            acts=log_probs, labels=targets.long(), act_lens=input_lengths.long(), label_lens=target_lengths.long()
        )
        self._loss.reduction = reduction
        return losses


def test_tdt_behind_the_wrapper(kernel, batch):
    loss = kernel.integrations.nemo.TDTLoss(7, batch.durations, sigma=0.05)
    expected = batch.replace(sigma=0.05)
    losses = Wrapper(loss)(batch.joint, *batch.lengths)
    assert loss.reduction == "mean"
    assert_losses_match(losses, expected)


@pytest.mark.parametrize("reduction", [None, "none", "mean_batch", "mean", "sum", "mean_volume"])
def test_reductions_by_their_nemo_names(kernel, batch, reduction):
    losses, lengths = batch.expected.losses, batch.target_lengths
    expected = {
        "mean_batch": losses.mean(),
        "mean": (losses / lengths).mean(),
        "sum": losses.sum(),
        "mean_volume": losses.sum() / lengths.sum(),
    }.get(reduction, losses)
    actual = kernel.integrations.nemo.TDTLoss(7, batch.durations, reduction)(batch.joint, *batch.lengths)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_options_reach_the_kernel(kernel, batch):
    options = {"fastemit_lambda": 0.3, "clamp": 0.02, "omega": 0.25}
    logits = batch.joint.clone().requires_grad_()
    kernel.integrations.nemo.TDTLoss(7, batch.durations, "mean_batch", sigma=0.05, **options)(
        logits, *batch.lengths
    ).backward()
    expected = batch.joint.clone().requires_grad_()
    kernel.tdt_loss_joint(expected, *batch.replace(sigma=0.05).rest, "mean_batch", **options).backward()
    assert torch.equal(logits.grad, expected.grad)
    assert logits.grad.abs().max() <= 0.02 / 3 * (1 + 1e-6)


@pytest.mark.parametrize("clamp", [-1.0, 0.0])
def test_no_clamp_by_nemos_ways_to_say_so(kernel, batch, clamp):
    gradients = []
    for options in ({}, {"clamp": clamp}):
        logits = (batch.joint * 3).requires_grad_()
        kernel.integrations.nemo.TDTLoss(7, batch.durations, **options)(logits, *batch.lengths).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


def test_rnnt_behind_the_wrapper(kernel, batch, rnnt_losses):
    losses = Wrapper(kernel.integrations.nemo.RNNTLoss(7))(batch.token_logits, *batch.lengths)
    torch.testing.assert_close(losses.double(), rnnt_losses, rtol=1e-6, atol=0)


def test_omega_1_is_rnnt(kernel, batch, rnnt_losses):
    losses = kernel.integrations.nemo.TDTLoss(7, batch.durations, None, omega=1.0)(batch.joint, *batch.lengths)
    torch.testing.assert_close(losses.double(), rnnt_losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))], ids=["copy", "pickle"]
)
def test_copies_work(kernel, batch, copied):
    loss = kernel.integrations.nemo.TDTLoss(7, batch.durations)
    assert torch.equal(loss(batch.joint, *batch.lengths), copied(loss)(batch.joint, *batch.lengths))


@pytest.mark.parametrize("name", ["TDTLoss", "RNNTLoss"])
def test_unknown_reductions_are_refused_at_once(kernel, name):
    durations = [[0, 1]] if name == "TDTLoss" else []
    with pytest.raises(ValueError, match="reduction must be one of .* got 'max'"):
        getattr(kernel.integrations.nemo, name)(7, *durations, "max")


# A model as NeMo has them, as far as the patch looks: names of attributes and classes, the wrapper, the joint network.

H, DURATIONS, LABELS = 8, [0, 1, 2], 7


class Abstract(nn.Module):
    def joint(self, f, g):
        return self.joint_after_projection(self.project_encoder(f), self.project_prednet(g))


class Joint(Abstract):
    def __init__(self, labels, extra, dropout=0.0, activation=nn.ReLU):
        super().__init__()
        self.num_extra_outputs, self.num_classes_with_blank = extra, labels + 1 + extra
        self.enc, self.pred = nn.Linear(5, H), nn.Linear(6, H)
        dropouts = [nn.Dropout(dropout)] if dropout else []
        self.joint_net = nn.Sequential(activation(), *dropouts, nn.Linear(H, self.num_classes_with_blank))
        self.temperature, self.log_softmax, self.masking_prob, self.hypotheses = 1.0, None, -1.0, None

    project_encoder = property(lambda self: self.enc)
    project_prednet = property(lambda self: self.pred)

    def is_adapter_available(self):
        return False

    def joint_after_projection(self, f, g):
        return self.joint_net(f.unsqueeze(2) + g.unsqueeze(1)).log_softmax(-1)

    def forward(self, encoder_outputs, decoder_outputs):
        self.hypotheses = ["heard"]
        return self.joint(encoder_outputs.transpose(1, 2), decoder_outputs.transpose(1, 2))


class NeMoWrapper(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self._loss, self._force_float32, self.reduction, self.seen = nn.Identity(), True, reduction, None

    def forward(self, log_probs, targets, input_lengths, target_lengths):
        self.seen = log_probs
        if log_probs.shape[1] != input_lengths.max():
            log_probs = log_probs.narrow(dim=1, start=0, length=input_lengths.max()).contiguous()
        reduction, self._loss.reduction = self._loss.reduction, None
        losses = self._loss(acts=log_probs, labels=targets, act_lens=input_lengths, label_lens=target_lengths)
        self._loss.reduction = reduction
        return {"mean_batch": losses.mean(), "mean_volume": losses.sum() / target_lengths.sum()}[self.reduction]


class Model(nn.Module):
    def __init__(self, loss_name="tdt", options=None, reduction="mean_volume", **joint):
        super().__init__()
        kwargs = {"durations": DURATIONS, "sigma": 0.05} if loss_name.startswith("tdt") else {}
        self.cfg = {"loss": {"loss_name": loss_name, f"{loss_name}_kwargs": {**kwargs, **(options or {})}}}
        self.cfg["rnnt_reduction"] = reduction
        self.decoder = nn.Identity()
        self.joint = Joint(LABELS, len(kwargs.get("durations", [])), **joint)
        self.loss = NeMoWrapper(reduction)

    def extract_rnnt_loss_cfg(self, cfg):
        return cfg["loss_name"], cfg[f"{cfg['loss_name']}_kwargs"]

    def change_vocabulary(self, labels):
        self.joint = Joint(labels, self.joint.num_extra_outputs)
        self.loss = NeMoWrapper("mean_batch")  # NeMo forgets the reduction, and more

    def forward(self, encoded, decoded, *labelling):
        return self.loss(self.joint(encoder_outputs=encoded, decoder_outputs=decoded), *labelling)


for cls, name in ((Abstract, "AbstractRNNTJoint"), (Joint, "RNNTJoint"), (Model, "EncDecRNNTModel")):
    cls.__module__, cls.__name__, cls.__qualname__ = "nemo.stand_in", name, name
for name in ("nemo", "nemo.stand_in"):
    sys.modules.setdefault(name, type(sys)(name))  # pickle looks the classes up there
for cls in (Abstract, Joint, Model):
    setattr(sys.modules["nemo.stand_in"], cls.__name__, cls)


@pytest.fixture
def speech(device):
    generator = torch.Generator().manual_seed(0)
    encoded, decoded = torch.randn(3, 5, 9, generator=generator), torch.randn(3, 6, 5, generator=generator)
    labels = torch.randint(0, LABELS, (3, 4), generator=generator)
    batch = (encoded, decoded, labels, torch.tensor([8, 7, 5]), torch.tensor([4, 2, 3]))
    return tuple(x.to(device) for x in batch)


def make(device, *args, **kwargs):
    torch.manual_seed(0)
    return Model(*args, **kwargs).to(device)


def step(model, speech):
    model.zero_grad(set_to_none=True)
    loss = model(*speech)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def expected_of(kernel, model, speech, labels=LABELS, **options):
    """From the logits, by the functions of the package."""
    encoded, decoded, *labelling = speech
    logits = model.joint.joint(encoded.transpose(1, 2), decoded.transpose(1, 2))
    if model.joint.num_extra_outputs:
        return kernel.tdt_loss_joint(logits, *labelling, labels, DURATIONS, 0.05, "mean_volume", **options)
    return kernel.rnnt_loss(logits, *labelling, labels, "mean_volume", **options)


@pytest.mark.parametrize("use", ["use_loss", "use_fused_loss"])
@pytest.mark.parametrize("loss_name", ["tdt", "warprnnt_numba"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_model_before_and_after_a_change_of_vocabulary(kernel, device, speech, use, loss_name, activation):
    model = make(device, loss_name, {"fastemit_lambda": 0.1}, activation=activation)
    getattr(kernel, use)(model)
    for labels in (LABELS, LABELS + 3):
        torch.testing.assert_close(model(*speech), expected_of(kernel, model, speech, labels), rtol=1e-5, atol=0)
        assert isinstance(model.loss.seen, torch.Tensor) == (use == "use_loss")
        assert model.loss._force_float32 is False and model.loss.reduction == "mean_volume"
        assert model.loss._loss.options["fastemit_lambda"] == 0.1
        model.change_vocabulary(labels + 3)
        model.to(device)
    assert model.joint.hypotheses == ["heard"] or model.joint.hypotheses is None


def test_fused_gradients_are_those_of_the_logits(kernel, device, speech):
    model = make(device)
    kernel.use_loss(model)
    dense = step(model, speech)
    kernel.use_fused_loss(model)
    fused = step(model, speech)
    torch.testing.assert_close(fused, dense, rtol=1e-4, atol=1e-6)
    assert model.joint.hypotheses == ["heard"]


def test_options_restoration_and_patching_again(kernel, device, speech):
    model = make(device)
    own, joint, inner = type(model), type(model.joint), model.loss._loss
    kernel.use_fused_loss(model, omega=0.5)
    kernel.use_fused_loss(model, omega=1.0, reduction="mean_batch")
    assert model.loss._loss.options["omega"] == 1.0 and model.loss.reduction == "mean_batch"
    kernel.restore_loss(model)
    kernel.restore_loss(model)
    assert type(model) is own and type(model.joint) is joint and model.loss._loss is inner
    assert model.loss._force_float32 is True and model.loss.reduction == "mean_volume"
    model.change_vocabulary(9)
    assert isinstance(model.loss._loss, nn.Identity)


def test_copies_of_a_patched_model(kernel, device, speech):
    model = make(device)
    kernel.use_fused_loss(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(other(*speech), expected_of(kernel, other, speech), rtol=1e-5, atol=0)
    other(*speech).backward()
    assert all(p.grad is None for p in model.parameters())
    again = pickle.loads(pickle.dumps(other))
    assert torch.equal(again(*speech), other(*speech))


def with_hook(model):
    model.joint.joint_net.register_forward_hook(lambda module, args, output: output)


def with_adapter(model):
    model.joint.is_adapter_available = lambda: True


def with_masks(model):
    model.joint.masking_prob = 0.5


def with_temperature(model):
    model.joint.temperature = 2.0


def with_sigmoid(model):
    model.joint.joint_net[0] = nn.Sigmoid()


def with_more_layers(model):
    model.joint.joint_net.insert(1, nn.Linear(H, H))


@pytest.mark.parametrize(
    "change", [with_hook, with_adapter, with_masks, with_temperature, with_sigmoid, with_more_layers]
)
def test_a_joint_network_that_does_more_gives_the_dense_loss(kernel, device, speech, change):
    model = make(device)
    change(model)
    model.to(device)
    kernel.use_fused_loss(model)
    with pytest.warns(UserWarning, match="so the loss is computed from"):
        loss = model(*speech)
    torch.testing.assert_close(loss, expected_of(kernel, model, speech), rtol=1e-6, atol=0)


def test_dropout_in_training_only(kernel, device, speech):
    model = make(device, dropout=0.5)
    kernel.use_fused_loss(model)
    torch.manual_seed(0)
    losses = {model(*speech).item() for _ in range(3)}
    assert len(losses) == 3
    model.eval()
    torch.testing.assert_close(model(*speech), expected_of(kernel, model, speech), rtol=1e-5, atol=0)


def test_errors(kernel, device):
    with pytest.raises(ValueError, match="loss_name must be one of tdt, .* got 'multiblank_rnnt'"):
        kernel.use_loss(make(device, "multiblank_rnnt"))
    with pytest.raises(TypeError, match="unknown option 'omga'"):
        kernel.use_loss(make(device), omga=0.5)
    with pytest.raises(TypeError, match="unknown option 'omega'"):
        kernel.use_loss(make(device, "warprnnt_numba"), omega=0.5)
