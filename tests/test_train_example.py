"""The training example: its model trains through the kernel, and gets the loss and gradients that transformers' own loss gives it."""

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


@pytest.fixture(scope="module")
def speech():
    """The two shortest recordings, 3 s each, and what is said in them."""
    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    shortest = sorted(range(len(texts)), key=lambda i: len(waveforms[i]))[:2]
    return [waveforms[i] for i in shortest], [texts[i] for i in shortest]


@pytest.fixture
def vocabulary(speech):
    return train_parakeet.Vocabulary.of(speech[1])


@pytest.fixture
def model(vocabulary):
    torch.manual_seed(0)
    return train_parakeet.build_model(vocabulary)


def loss_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


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
    model.train()
    their_loss, theirs = loss_and_gradients(model, batch)
    model.loss_function = kernel.parakeet_tdt_loss
    our_loss, ours = loss_and_gradients(model, batch)
    assert our_loss == pytest.approx(their_loss, rel=1e-6)
    total = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm()
        # What the softmax or the batch norm behind it cancels has gradient 0, but for rounding.
        cancelled = name.endswith(("k_proj.bias", "depthwise_conv.bias"))
        assert error <= (1e-7 * total if cancelled else 1e-5 * gradient.norm()), name


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
