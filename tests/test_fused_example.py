"""The fused example: the small model of the training example trains without logits, with the loss and gradients that it has otherwise."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.loss.loss_tdt", reason="needs a transformers with the TDT loss")
for name in ("jiwer", "librosa", "matplotlib", "tqdm"):
    pytest.importorskip(name, reason=f"the training example needs {name}")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_parakeet  # noqa: E402
from fused_parakeet import use_fused_loss  # noqa: E402
from transformers import ParakeetForRNNT, ParakeetRNNTConfig  # noqa: E402


@pytest.fixture(scope="module")
def speech():
    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    shortest = sorted(range(len(texts)), key=lambda i: len(waveforms[i]))[:2]
    return [waveforms[i] for i in shortest], [texts[i] for i in shortest]


@pytest.fixture(scope="module")
def vocabulary(speech):
    return train_parakeet.Vocabulary.of(speech[1])


@pytest.fixture
def model(vocabulary):
    torch.manual_seed(0)
    return train_parakeet.build_model(vocabulary)


def loss_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def refuse(*args, **kwargs):
    raise AssertionError("the joint network was called")


def assert_same(ours, theirs):
    total = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm()
        # What the softmax or the batch norm behind it cancels has gradient 0, but for rounding.
        cancelled = name.endswith(("k_proj.bias", "depthwise_conv.bias"))
        assert error <= (1e-6 * total if cancelled else 1e-5 * gradient.norm()), name


def test_loss_and_gradients_of_the_model(kernel, model, speech, vocabulary, monkeypatch):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    model.train()
    their_output, theirs = loss_and_gradients(model, batch)
    use_fused_loss(model, kernel, max_tile_bytes=1 << 20)
    monkeypatch.setattr(model.joint, "forward", refuse)
    our_output, ours = loss_and_gradients(model, batch)
    assert our_output.loss.item() == pytest.approx(their_output.loss.item(), rel=1e-6)
    assert our_output.logits is None
    assert_same(ours, theirs)


def test_rnnt_model(kernel, model, speech, vocabulary):
    """The RNN-T sibling: what its own forward gives through the kernel."""
    names = (
        "vocab_size",
        "decoder_hidden_size",
        "num_decoder_layers",
        "encoder_config",
        "blank_token_id",
        "pad_token_id",
    )
    config = ParakeetRNNTConfig(**{name: getattr(model.config, name) for name in names})
    torch.manual_seed(0)
    rnnt = ParakeetForRNNT(config).train()
    batch = train_parakeet.make_batch(*speech, vocabulary)
    batch["labels"][batch["labels"] == train_parakeet.PAD] = vocabulary.blank  # how this model marks padding
    rnnt.loss_function = kernel.parakeet_rnnt_loss
    their_output, theirs = loss_and_gradients(rnnt, batch)
    use_fused_loss(rnnt, kernel)
    our_output, ours = loss_and_gradients(rnnt, batch)
    assert our_output.loss.item() == pytest.approx(their_output.loss.item(), rel=1e-6)
    assert_same(ours, theirs)


def test_without_labels_nothing_changes(kernel, model, speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    del batch["labels"]
    model.eval()
    signature = inspect.signature(model.forward)
    with torch.no_grad():
        before = model(**batch).logits
        use_fused_loss(model, kernel)
        torch.testing.assert_close(model(**batch).logits, before, rtol=0, atol=0)
    assert inspect.signature(model.forward) == signature


def test_training_and_reading_back(kernel, device, model, speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary, device)
    use_fused_loss(model.to(device), kernel)
    losses = train_parakeet.train(model, batch, steps=10, progress=False)
    assert losses[-1] < 0.9 * losses[0]
    assert len(train_parakeet.transcribe(model, batch, vocabulary)) == 2
