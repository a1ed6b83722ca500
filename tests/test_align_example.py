"""The alignment example: words get the frames of their first characters, the picture shows a lattice that sums to what it must."""

import re

import pytest
import torch
from support.example_model import EXAMPLES, make_model, train_parakeet

# isort: split
import align_parakeet  # needs what example_model looks for


@pytest.fixture(scope="module")
def speech():
    return train_parakeet.load_speech(EXAMPLES / "speech")


@pytest.fixture(scope="module")
def untrained(speech, tmp_path_factory):
    """The weights of a model that has learnt nothing: any alignment will do here."""
    path = tmp_path_factory.mktemp("model") / "weights.pt"
    vocabulary = train_parakeet.Vocabulary.of(speech[1])
    train_parakeet.save_model(make_model(vocabulary), vocabulary, path)
    return path


def test_words_begin_with_their_first_characters():
    assert align_parakeet.word_starts("ab c def", [0, 2, 3, 5, 5, 6, 6, 9]) == [(0, "ab"), (5, "c"), (6, "def")]
    assert align_parakeet.word_starts("", []) == []


def test_a_path_goes_along_rows_with_blanks_and_up_with_labels():
    assert align_parakeet.path_of([1, 1, 4], [0, 2, 1], 6) == ([0, 1, 1, 1, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2, 3, 3])


def test_a_frame_is_80_ms(untrained):
    model, _ = train_parakeet.load_model(untrained)
    assert align_parakeet.seconds_per_frame(model) == pytest.approx(0.08)


def test_what_the_model_hands_to_its_loss(kernel, untrained, speech):
    model, vocabulary = train_parakeet.load_model(untrained)
    before = model.loss_function
    batch = train_parakeet.make_batch(*speech, vocabulary)
    arguments = align_parakeet.loss_arguments(model, batch)
    assert model.loss_function is before
    assert arguments[4].tolist() == [len(text) for text in speech[1]]
    with torch.no_grad():
        torch.testing.assert_close(kernel.tdt_loss(*arguments), model(**batch).loss, rtol=1e-5, atol=0)


def test_prints_every_word_and_draws_a_lattice(kernel, untrained, speech, tmp_path, capsys, monkeypatch):
    drawn = []
    draw = align_parakeet.draw_lattice
    monkeypatch.setattr(align_parakeet, "draw_lattice", lambda *given: (drawn.append(given), draw(*given)))
    picture = tmp_path / "new" / "lattice.png"
    arguments = ["--weights", str(untrained), "--output", str(picture), "--device", "cpu", "--recording", "2"]
    assert align_parakeet.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = re.findall(r"(\d+\.\d\d) (\S+)", "\n".join(line for line in lines if line.startswith("  ")))
    assert [word for _, word in printed] == " ".join(speech[1]).split()
    for waveform, text in zip(*speech):
        own, printed = printed[: len(text.split())], printed[len(text.split()) :]
        times = [float(seconds) for seconds, _ in own]
        assert times == sorted(times)
        assert times[-1] <= len(waveform) / train_parakeet.SAMPLING_RATE
    assert picture.read_bytes().startswith(b"\x89PNG")

    (nodes, (t, u), text, _, _) = drawn[0]
    assert text == speech[1][1]
    assert nodes.shape[1] == len(text) + 1
    # Every alignment starts at the first node, and leaves every row at least once.
    assert nodes[0, 0].item() == pytest.approx(1, abs=1e-5)
    assert (nodes.sum(0) > 1 - 1e-5).all()
    assert t == sorted(t)
    assert u == sorted(u)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--weights", "/nowhere/weights.pt"], "make train"), (["--recording", "6"], "must be in 1 to 5, got 6")],
)
def test_says_what_is_missing(kernel, untrained, capsys, arguments, message):
    assert align_parakeet.main(["--weights", str(untrained), *arguments]) == 1
    assert message in capsys.readouterr().err
