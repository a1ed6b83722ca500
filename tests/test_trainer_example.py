"""The Trainer of transformers with the kernel's loss: gradients over accumulated batches, and the example."""

import re
from functools import partial

import pytest
import torch
from support import example_model
from support.example_model import EXAMPLES, train_parakeet
from transformers import TrainerCallback

pytest.importorskip("accelerate", reason="the example needs accelerate")

import trainer_parakeet


@pytest.fixture(scope="module")
def samples():
    """Four pieces of recordings, and text of very different lengths."""
    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    lengths, letters = (19_200, 12_000, 16_000, 19_200), (12, 3, 7, 1)
    return [
        {"waveform": waveform[:n], "text": text[:u]} for waveform, text, n, u in zip(waveforms, texts, lengths, letters)
    ]


@pytest.fixture(scope="module")
def vocabulary(samples):
    return train_parakeet.Vocabulary.of([sample["text"] for sample in samples])


def make_model(samples, vocabulary):
    """Batch norm over the batch at hand would make samples depend on one another: it keeps the statistics of all samples instead."""
    model = example_model.make_model(vocabulary)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(**trainer_parakeet.collate(vocabulary, samples) | {"labels": None})
    for norm in norms:
        norm.eval()
        norm.train = lambda mode, norm=norm: norm
    return model


class Gradients(TrainerCallback):
    """What the optimizer is about to use."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def step(loss, samples, vocabulary, batches, *, model_accepts_loss_kwargs=True, prepare=None, **arguments):
    """One step of the Trainer on all samples, in so many batches: the logged loss and the gradients."""
    seen = Gradients()
    model = make_model(samples, vocabulary)
    if prepare is not None:
        prepare(model)
    trainer = trainer_parakeet.make_trainer(
        model,
        loss,
        samples,
        vocabulary,
        per_device_train_batch_size=len(samples) // batches,
        gradient_accumulation_steps=batches,
        max_steps=1,
        logging_steps=1,
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = model_accepts_loss_kwargs
    trainer.add_callback(seen)
    trainer.train()
    return trainer.state.log_history[0]["loss"], seen.of


def assert_same(ours, theirs):
    (our_loss, our_gradients), (their_loss, their_gradients) = ours, theirs
    assert our_loss == pytest.approx(their_loss, rel=1e-5)
    for name, gradient in their_gradients.items():
        if not name.endswith("k_proj.bias"):  # which the softmax cancels: nothing but rounding
            assert (our_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("batches", [2, 4])
def test_accumulated_batches_equal_one_large_batch(kernel, samples, vocabulary, batches):
    loss = partial(kernel.parakeet_tdt_loss, reduction="mean_volume")
    assert_same(step(loss, samples, vocabulary, batches), step(loss, samples, vocabulary, 1))


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_accumulated_batches_of_the_fused_loss(kernel, samples, vocabulary, batches):
    def fuse(model):
        kernel.use_fused_loss(model, reduction="mean_volume")

    def refuse(*args, **kwargs):
        raise AssertionError("the loss of logits ran")

    theirs = step(partial(kernel.parakeet_tdt_loss, reduction="mean_volume"), samples, vocabulary, 1)
    assert_same(step(refuse, samples, vocabulary, batches, prepare=fuse), theirs)


def test_it_is_the_mean_over_the_labels_of_all_batches(kernel, samples, vocabulary):
    logged, _ = step(partial(kernel.parakeet_tdt_loss, reduction="mean_volume"), samples, vocabulary, 2)
    model = make_model(samples, vocabulary)
    model.loss_function = partial(kernel.parakeet_tdt_loss, reduction="sum")
    total = model(**trainer_parakeet.collate(vocabulary, samples)).loss
    assert logged == pytest.approx(total.item() / sum(len(sample["text"]) for sample in samples), rel=1e-4)


def test_mean_needs_the_trainer_to_average(kernel, samples, vocabulary):
    """The default of ParakeetForTDT, in batches of one size."""
    steps = partial(step, kernel.parakeet_tdt_loss, samples, vocabulary)
    assert_same(steps(2, model_accepts_loss_kwargs=False), steps(1))


def test_padding_that_is_not_minus_100_is_an_error(kernel, samples, vocabulary, monkeypatch):
    monkeypatch.setattr(trainer_parakeet, "IGNORED", train_parakeet.PAD)
    loss = partial(kernel.parakeet_tdt_loss, reduction="mean_volume")
    with pytest.raises(ValueError, match="labels must be padded with -100"):
        step(loss, samples, vocabulary, 2)
    _, ours = step(loss, samples, vocabulary, 1)  # a single batch leaves no doubt
    monkeypatch.undo()
    _, theirs = step(loss, samples, vocabulary, 1)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_example_trains(tmp_path, capsys):
    """The three shortest recordings, in batches of two and one."""
    lines = (EXAMPLES / "speech" / "transcripts.tsv").read_text().splitlines()
    size = {line: (EXAMPLES / "speech" / line.split("\t")[0]).stat().st_size for line in lines}
    shortest = sorted(lines, key=size.get)[:3]
    (tmp_path / "transcripts.tsv").write_text("\n".join(shortest))
    for line in shortest:
        name = line.split("\t")[0]
        (tmp_path / name).symlink_to(EXAMPLES / "speech" / name)
    assert trainer_parakeet.main(["--steps", "10", "--cpu", "--speech", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    first, last = re.search(r"trained 10 steps; loss ([0-9.]+) -> ([0-9.]+)", output).groups()
    assert float(last) < 0.9 * float(first)
    assert "word error rate" in output
