"""The fused example: the small model of the training example trains without logits, with the loss and gradients that it has otherwise."""

import inspect

import pytest
import torch
from example_model import assert_same_gradients, loss_and_gradients, make_model, shortest_speech, train_parakeet
from fused_parakeet import use_fused_loss
from transformers import ParakeetForRNNT, ParakeetRNNTConfig


@pytest.fixture(scope="module")
def speech():
    return shortest_speech(2)


@pytest.fixture(scope="module")
def vocabulary(speech):
    return train_parakeet.Vocabulary.of(speech[1])


@pytest.fixture
def model(vocabulary):
    return make_model(vocabulary)


def refuse(*args, **kwargs):
    raise AssertionError("the joint network was called")


def test_loss_and_gradients_of_the_model(kernel, model, speech, vocabulary, monkeypatch):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    their_output, theirs = loss_and_gradients(model, batch)
    use_fused_loss(model, kernel, max_tile_bytes=1 << 20)
    monkeypatch.setattr(model.joint, "forward", refuse)
    our_output, ours = loss_and_gradients(model, batch)
    assert our_output.loss.item() == pytest.approx(their_output.loss.item(), rel=1e-6)
    assert our_output.logits is None
    assert_same_gradients(ours, theirs)


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
    assert_same_gradients(ours, theirs)


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
