"""The training example: its model trains through the kernel, and gets the loss and gradients that transformers' own loss gives it."""

import pytest
import torch
from support.example_model import assert_same_gradients, loss_and_gradients, make_model, shortest_speech, train_parakeet


@pytest.fixture(scope="module")
def speech():
    return shortest_speech(2)


@pytest.fixture
def vocabulary(speech):
    return train_parakeet.Vocabulary.of(speech[1])


@pytest.fixture
def model(vocabulary):
    return make_model(vocabulary)


def test_the_characters_come_back(vocabulary):
    text = "".join(reversed(vocabulary.characters))
    ids = [vocabulary.blank, *vocabulary.encode(text), vocabulary.blank, train_parakeet.PAD]
    assert vocabulary.decode(ids) == text
    assert max(ids) < vocabulary.size


def test_a_batch_holds_labels_behind_a_blank(speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    labels, decoder_input_ids = batch["labels"], batch["decoder_input_ids"]
    assert (labels != train_parakeet.PAD).sum(-1).tolist() == [len(text) for text in speech[1]]
    assert (decoder_input_ids[:, 0] == vocabulary.blank).all()
    torch.testing.assert_close(decoder_input_ids[:, 1:], labels)


def test_loss_and_gradients_equal_those_of_transformers(kernel, model, speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    their_output, theirs = loss_and_gradients(model, batch)
    model.loss_function = kernel.parakeet_tdt_loss
    our_output, ours = loss_and_gradients(model, batch)
    assert our_output.loss.item() == pytest.approx(their_output.loss.item(), rel=1e-6)
    assert_same_gradients(ours, theirs, rounding=1e-7)


def test_the_loss_falls(kernel, device, model, speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary, device)
    model.to(device).loss_function = kernel.parakeet_tdt_loss
    losses = train_parakeet.train(model, batch, steps=10, progress=False)
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]


def test_training_stops_at_the_target_loss(kernel, model, speech, vocabulary):
    batch = train_parakeet.make_batch(*speech, vocabulary)
    model.loss_function = kernel.parakeet_tdt_loss
    losses = train_parakeet.train(model, batch, steps=10, target_loss=1e3, progress=False)
    assert len(losses) == 1


def test_a_saved_model_comes_back(model, speech, vocabulary, tmp_path):
    path = tmp_path / "new" / "weights.pt"
    train_parakeet.save_model(model, vocabulary, path)
    loaded, characters = train_parakeet.load_model(path)
    assert characters == vocabulary
    batch = train_parakeet.make_batch(*speech, vocabulary)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def test_an_untrained_model_fails_and_says_so(tmp_path, capsys):
    picture, weights = tmp_path / "new" / "loss.png", tmp_path / "weights.pt"
    assert train_parakeet.main(["--steps", "1", "--output", str(picture), "--weights", str(weights)]) == 1
    output = capsys.readouterr()
    assert "word error rate" in output.out
    assert "FAILED" in output.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not weights.exists()
