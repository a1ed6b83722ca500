#!/usr/bin/env python3
"""Train a small transducer twice, with every row computed and with the rows of a tolerance: the loss curves and the rows.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/guarantee_training.py [--steps 300]

Data are synthetic and new in every step: tokens drawn with the frequencies of a natural language (Zipf's law), each heard for a
few frames as its own noisy code. The model is a GRU as encoder, a GRU as prediction network and a joint network of one hidden
layer; the loss is `tdt_loss_fused_joint`. Both runs start from the same weights and see the same batches. Writes
benchmarks/results/guarantee-training.json and draws it beside it as PNG. Times are not measured: on a GPU see benchmarks/fused.py.
"""

import argparse
import datetime
import json
from pathlib import Path

import torch
from kernels import get_kernel
from matplotlib.figure import Figure
from records import RESULTS, commit
from torch import nn

DURATIONS = [0, 1, 2, 3, 4]
FEATURES, NOISE = 24, 0.5  # of a frame
FRAMES = (2, 6)  # that a token lasts, fewest and most


class Transducer(nn.Module):
    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.blank = vocab - 1
        self.listen = nn.GRU(FEATURES, hidden // 2, batch_first=True, bidirectional=True)
        self.embed = nn.Embedding(vocab, hidden)
        self.predict = nn.GRU(hidden, hidden, batch_first=True)
        self.encoder, self.decoder = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab + len(DURATIONS))

    def forward(self, features, targets):
        """The inputs of the joint network: (B, T, H) and (B, U + 1, H)."""
        before = nn.functional.pad(targets, (1, 0), value=self.blank)
        return self.encoder(self.listen(features)[0]), self.decoder(self.predict(self.embed(before))[0])


class Speech:
    """Batches of synthetic utterances."""

    def __init__(self, vocab: int, labels: int, batch: int, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.labels, self.batch = labels, batch
        self.codes = torch.randn(vocab, FEATURES, generator=self.generator)
        self.frequencies = 1.0 / torch.arange(1.0, vocab)  # of the tokens without the blank

    def draw(self):
        """Features (B, T, FEATURES), targets (B, U), frames (B,) and labels (B,)."""
        shape = (self.batch, self.labels)
        targets = torch.multinomial(
            self.frequencies.expand(self.batch, -1), self.labels, True, generator=self.generator
        )
        frames = torch.randint(FRAMES[0], FRAMES[1] + 1, shape, generator=self.generator)
        heard = [self.codes[y.repeat_interleave(n)] for y, n in zip(targets, frames)]
        features = nn.utils.rnn.pad_sequence(heard, batch_first=True)
        features = features + NOISE * torch.randn(features.shape, generator=self.generator)
        return features, targets, frames.sum(1), torch.full((self.batch,), self.labels)


def train(kernel, tolerance: float, options: argparse.Namespace) -> dict[str, list[float]]:
    """The mean loss per label, and the shares of the rows that forward and backward computed, of every step."""
    torch.manual_seed(options.seed)
    model = Transducer(options.vocab, options.hidden).to(options.device)
    speech = Speech(options.vocab, options.labels, options.batch, options.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    curves = {"loss": [], "forward_share": [], "live_share": [], "largest_gap": []}
    for step in range(options.steps):
        features, targets, *lengths = speech.draw()
        features, targets = features.to(options.device), targets.to(options.device)
        encoder, decoder = model(features, targets)
        loss, stats = kernel.tdt_loss_fused_joint(
            encoder,
            decoder,
            model.head.weight,
            model.head.bias,
            targets,
            *lengths,
            model.blank,
            DURATIONS,
            tolerance=tolerance,
            return_stats=True,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curves["loss"].append(round(loss.item(), 6))
        curves["forward_share"].append(round(stats.forward_rows / stats.valid_rows, 4))
        curves["live_share"].append(round(stats.live_rows / stats.valid_rows, 4))
        curves["largest_gap"].append(float(f"{stats.gap.max().item():.3g}"))
        if step % 50 == 0:
            print(f"tolerance {tolerance:g}, step {step}: {curves['loss'][-1]}, rows {curves['forward_share'][-1]}")
    return curves


def draw(runs: dict[str, dict[str, list[float]]], path: Path, device: str) -> None:
    figure = Figure(figsize=(7, 5.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    (exact, all_rows), (bounded, band) = runs.items()
    steps = range(1, len(all_rows["loss"]) + 1)
    above.semilogy(
        steps, all_rows["loss"], color="tab:gray", linewidth=3, alpha=0.6, label=f"tolerance {exact}: every row"
    )
    above.semilogy(steps, band["loss"], color="tab:blue", linewidth=1, label=f"tolerance {bounded}")
    above.set(ylabel="TDT loss, nats per label", title=f"A small transducer trained with both, {device}")
    below.plot(steps, band["forward_share"], color="tab:blue", label="forward")
    below.plot(steps, band["live_share"], color="tab:orange", label="backward")
    below.plot(steps, all_rows["live_share"], color="tab:gray", alpha=0.6, label=f"backward, tolerance {exact}")
    below.set(xlabel="step", ylabel="share of rows computed", ylim=(0, 1.05))
    for axes in (above, below):
        axes.grid(which="both", alpha=0.25)
        axes.margins(x=0.01)
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.legend()
    below.legend(loc="center right")
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--vocab", type=int, default=512, help="tokens, blank included")
    parser.add_argument("--labels", type=int, default=12, help="of an utterance")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "guarantee-training.json")
    options = parser.parse_args()
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    runs = {f"{tolerance:g}": train(kernel, tolerance, options) for tolerance in (0.0, options.tolerance)}
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    exact, bounded = (run["loss"] for run in runs.values())
    results = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": device,
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(options).items() if name not in ("output", "device")},
        "first_loss": exact[0],
        "last_losses": {name: run["loss"][-1] for name, run in runs.items()},
        "largest_relative_difference_of_the_losses": max(abs(a - b) / a for a, b in zip(exact, bounded)),
        "runs": runs,
    }
    options.output.write_text(json.dumps(results) + "\n")
    draw(runs, options.output.with_suffix(".png"), device)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
