"""The layers in the mapping of the kernels library: `kernelize` puts them in the place of a loss, and nothing else when it cannot.

The stand-ins refuse to run, so that a loss can only come from the kernel.
"""

import inspect
from pathlib import Path

import pytest
import torch
from support.batches import make_batch

kernels = pytest.importorskip("kernels", minversion="0.17", reason="needs the mapping of kernels 0.17")

from kernels import (  # noqa: E402
    LayerRepository,
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)

MODES = [Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE]


@use_kernel_forward_from_hub("TDTLoss")
class StandIn(torch.nn.Module):
    def forward(
        self,
        token_logits,
        duration_logits,
        targets,
        logit_lengths,
        target_lengths,
        blank_token_id,
        durations,
        sigma=0.0,
        reduction="mean",
    ):
        raise AssertionError("the stand-in ran")


@use_kernel_forward_from_hub("RNNTLoss")
class RNNTStandIn(torch.nn.Module):
    def forward(self, logits, targets, logit_lengths, target_lengths, blank_token_id, reduction="mean_volume"):
        raise AssertionError("the stand-in ran")


@pytest.fixture
def folder(kernel):
    """The local repository that the kernel was loaded from."""
    return Path(kernel.__file__).resolve().parents[2]


@pytest.fixture(params=["local", "hub"])
def mapping(request, folder, device):
    """Layer names to layers: of a folder, and of a Hub repository, in whose place LOCAL_KERNELS puts the same."""

    def repository(layer_name):
        if request.param == "local":
            return LocalLayerRepository(repo_path=folder, layer_name=layer_name)
        return LayerRepository("kernels-community/tdt-loss", layer_name=layer_name, revision="main")

    return {name: {device: repository(name)} for name in ("TDTLoss", "RNNTLoss")}


def ops_that_run(call):
    """What `call` returns, and the names of the ops under it, compiled or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    return result, {event.name for event in profile.events()}


def of(kernel, names):
    prefix = f"{kernel.loss.ops.name}::"
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def assert_comes_from(kernel, forward):
    assert Path(inspect.getfile(forward.__func__)).parent == Path(kernel.__file__).parent


def kernelized(kernel, module, mapping, mode, device):
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(module, mode=mode, device=device, use_fallback=False)
    assert_comes_from(kernel, module.forward)
    return module


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_layer_for_tdt(kernel, device, mapping, mode):
    module = kernelized(kernel, StandIn(), mapping, mode, device)
    if Mode.TORCH_COMPILE in mode:
        module = torch.compile(module, fullgraph=True)
    batch = make_batch(B=2, T=6, U=3, V=11, device=device)
    token_logits, duration_logits = batch.leaves()

    def step():
        loss = module(token_logits, duration_logits, *batch.rest, reduction="sum")
        loss.backward()
        return loss.detach()

    loss, names = ops_that_run(step)
    assert {"loss", "gradient"} <= of(kernel, names)
    torch.testing.assert_close(loss.double(), batch.expected.losses.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(token_logits.grad.double(), batch.expected.grad_tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(duration_logits.grad.double(), batch.expected.grad_durations, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_layer_for_rnnt(kernel, device, mapping, mode):
    module = kernelized(kernel, RNNTStandIn(), mapping, mode, device)
    batch = make_batch(B=2, T=6, U=3, V=11, durations=(), device=device)
    loss, names = ops_that_run(lambda: module(*batch.rnnt_args, reduction="sum"))
    assert "loss" in of(kernel, names)
    torch.testing.assert_close(loss.double(), batch.expected.losses.sum(), rtol=1e-6, atol=0)


def hooked(monkeypatch, transformers_loss, name, layer_name, model_class):
    """`model_class` with the kernel hook that transformers gives other functions, on the loss that its `loss_function` calls."""

    def refuse(*args, **kwargs):
        raise AssertionError("the loss of transformers ran")

    refuse.__signature__ = inspect.signature(getattr(transformers_loss, name))
    hook = use_kernel_forward_from_hub(layer_name)(refuse)
    monkeypatch.setattr(transformers_loss, name, hook)
    return use_kernelized_func(hook)(type(model_class.__name__, (model_class,), {}))


@pytest.fixture
def parakeet():
    """The training example, its data cut short: (module, vocabulary, batch)."""
    from support.example_model import EXAMPLES, train_parakeet

    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    waveforms, texts = [x[:16_000] for x in waveforms[:2]], [text[:4] for text in texts[:2]]
    vocabulary = train_parakeet.Vocabulary.of(texts)
    return train_parakeet, vocabulary, train_parakeet.make_batch(waveforms, texts, vocabulary)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_parakeet_with_a_hook_on_its_loss(kernel, parakeet, mapping, device, mode, monkeypatch):
    train_parakeet, vocabulary, batch = parakeet
    from transformers.loss import loss_tdt

    torch.manual_seed(0)
    plain = train_parakeet.build_model(vocabulary).train().to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    expected = plain(**batch).loss
    model = hooked(monkeypatch, loss_tdt, "tdt_loss", "TDTLoss", type(plain))(plain.config).train().to(device)
    model.load_state_dict(plain.state_dict())
    with pytest.raises(AssertionError, match="the loss of transformers ran"):
        model(**batch)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=device)
    loss, names = ops_that_run(lambda: model(**batch).loss)
    assert "loss" in of(kernel, names)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()


def test_use_kernels_of_transformers_has_no_hook_for_the_loss(kernel, parakeet):
    """As the README says. Should this fail, transformers has one: the README must then say how to map it."""
    train_parakeet, vocabulary, batch = parakeet
    integration = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hasattr(integration, "get_kernel_mapping_transformers"):
        pytest.skip("needs a transformers that lists its kernels on demand")
    from transformers import KernelConfig
    from transformers.loss.loss_tdt import ParakeetForTDTLoss

    assert not any("tdt" in name.lower() or "rnnt" in name.lower() for name in integration._build_kernel_mapping())
    with use_kernel_mapping({}, inherit_mapping=False):  # transformers adds its own for good
        config = KernelConfig({"TDTLoss": "kernels-community/tdt-loss:TDTLoss"})
        with pytest.raises(ValueError, match="TDTLoss is not registered in the model"):
            train_parakeet.build_model(vocabulary).set_use_kernels(True, config)
        model = train_parakeet.build_model(vocabulary).train()
        model.use_kernels = True
    assert model.loss_function is ParakeetForTDTLoss
    model.loss_function = kernel.parakeet_tdt_loss
    _, names = ops_that_run(lambda: model(**batch))
    assert "loss" in of(kernel, names)


def test_a_mapping_that_lacks_the_layer_is_an_error(mapping, device):
    with (
        use_kernel_mapping({}, inherit_mapping=False),
        pytest.raises(ValueError, match="No layer mapping for `TDTLoss`"),
    ):
        kernelize(StandIn(), mode=Mode.TRAINING, device=device, use_fallback=False)
    other = "cuda" if device == "cpu" else "cpu"
    with use_kernel_mapping(mapping, inherit_mapping=False), pytest.raises(ValueError, match=f"device type .*{other}"):
        kernelize(StandIn(), mode=Mode.TRAINING, device=other, use_fallback=False)


def test_a_repository_that_lacks_the_kernel_is_an_error(device, tmp_path, folder):
    """Whatever `use_fallback` says, short of KernelizeFallback.ALL."""
    missing = {
        "no build": (LocalLayerRepository(repo_path=tmp_path, layer_name="TDTLoss"), FileNotFoundError),
        "no layer": (LocalLayerRepository(repo_path=folder, layer_name="CTCLoss"), ValueError),
        "no repository": (LayerRepository("kernels-community/none", layer_name="TDTLoss", revision="v1"), Exception),
    }
    for repository, error in missing.values():
        for use_fallback in (True, False):
            with use_kernel_mapping({"TDTLoss": {device: repository}}, inherit_mapping=False), pytest.raises(error):
                kernelize(StandIn(), mode=Mode.TRAINING, device=device, use_fallback=use_fallback)


def test_another_signature_is_an_error(folder, device, tmp_path):
    """A mapping to the wrong layer: RNN-T's in TDT's place."""
    new = tmp_path / "kernel"  # a layer is only checked when its repository is loaded for the first time
    new.symlink_to(folder)
    repository = LocalLayerRepository(repo_path=new, layer_name="RNNTLoss")
    with (
        use_kernel_mapping({"TDTLoss": {device: repository}}, inherit_mapping=False),
        pytest.raises(TypeError, match="number of arguments"),
    ):
        kernelize(StandIn(), mode=Mode.TRAINING, device=device)
