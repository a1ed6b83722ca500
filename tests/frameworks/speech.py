"""The five recordings as tensors, and what the frameworks' runs share; nothing but torch, numpy and the standard library."""

import json
import sys
import time
import wave
from pathlib import Path

import numpy as np
import torch

SPEECH = Path(__file__).resolve().parents[2] / "examples" / "speech"
SAMPLING_RATE = 16_000


def load_speech():
    """Waveforms (numpy, float32) and texts."""
    waveforms, texts = [], []
    for line in (SPEECH / "transcripts.tsv").read_text(encoding="utf-8").splitlines():
        name, text = line.split("\t")
        with wave.open(str(SPEECH / name), "rb") as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        waveforms.append(samples.astype(np.float32) / 32768)
        texts.append(text)
    return waveforms, texts


def padded(rows, value=0):
    rows = [torch.as_tensor(row) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value), lengths


def log_mel(waveforms, bins=40, hop=160, window=400, stack=4):
    """(frames, bins * stack) for each waveform: log energies in linear bands, normalised, so many frames in one."""
    features = []
    for waveform in waveforms:
        x = torch.stft(torch.as_tensor(waveform), 512, hop, window, torch.hann_window(window), return_complex=True)
        x = torch.nn.functional.adaptive_avg_pool1d(x.abs().square().T, bins).add(1e-6).log()
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        features.append(x[: len(x) // stack * stack].reshape(-1, bins * stack))
    return features


def relative(ours, theirs):
    """The difference of two losses, relative."""
    return abs(float(ours) - float(theirs)) / abs(float(theirs))


def gradient_error(ours, theirs):
    """The largest difference of a parameter's gradient, relative to that gradient or to a thousandth of all together."""
    total = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    return max(
        float((ours[name] - gradient).norm() / torch.maximum(gradient.norm(), 1e-3 * total))
        for name, gradient in theirs.items()
    )


def gradients_of(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def word_errors(said, heard):
    """Words that are wrong, by edit distance, over words said."""
    errors = 0
    for a, b in zip(said, heard):
        a, b = a.split(), b.split()
        row = list(range(len(b) + 1))
        for i, word in enumerate(a, 1):
            row, before = [i], row
            for j, other in enumerate(b, 1):
                row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
        errors += row[-1]
    return errors / sum(len(text.split()) for text in said)


def kernel():
    from kernels import get_kernel

    return get_kernel("kernels-community/tdt-loss", version=1)


class Run:
    """Collects what a framework's run has found; `finish` prints it as the last line and fails where a bound is broken."""

    def __init__(self):
        self.found, self.failures, self.start = {}, [], time.monotonic()

    def expect(self, what, value, at_most):
        self.found[what] = value
        if not value <= at_most:
            self.failures.append(f"{what} is {value}, more than {at_most}")
        print(f"{what}: {value} (at most {at_most})", flush=True)

    def note(self, what, value):
        self.found[what] = value
        print(f"{what}: {value}", flush=True)

    def finish(self):
        self.found["seconds"] = round(time.monotonic() - self.start, 1)
        self.found["failures"] = self.failures
        print(json.dumps(self.found))
        sys.exit(bool(self.failures))


@torch.no_grad()
def greedy(encoded, decode, score, blank, most=300):
    """The labels of one recording, as many a frame as the model wants: what is learnt by heart may come all at once.

    Args:
        encoded: (T, H).
        decode: list of labels -> (H,), the decoder's state after them.
        score: (H,), (H,) -> (V,).
    """
    labels, state = [], decode([])
    for frame in encoded:
        while len(labels) < most:
            best = int(score(frame, state).argmax())
            if best == blank:
                break
            labels.append(best)
            state = decode(labels)
    return labels


def train_and_transcribe(run, model, loss_of_step, read, texts, *, enough, rate=4e-3, most=400):
    """Learns the recordings by heart and reads them back: no word may be wrong.

    Args:
        loss_of_step: () -> the loss of all recordings, which AdamW minimises, `most` steps or until it is at most `enough`.
        read: () -> what the trained model, in evaluation, says the recordings are.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    while len(losses) < most and (not losses or losses[-1] > enough):
        loss = loss_of_step()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        heard = read()
    run.note("training: loss before and after", [round(losses[0], 4), round(losses[-1], 6)])
    run.note("training: steps", len(losses))
    run.expect("training: word error rate", word_errors(texts, heard), 0.0)
