"""When was each word said? The best alignment of the five recordings, by the model that `make train` has trained.

    make align                    trains first if there are no weights; ARGS="--recording 2" passes options on
    LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python examples/align_parakeet.py --recording 2

Prints the words of each recording with the second in which each begins, from `tdt_align`, and draws the lattice of one
recording: how likely an alignment passes each node (from `return_occupancy`), and the best path on top. The seconds are those
in which this model writes its labels down; having learnt five sentences by heart, it may do so before or after they are heard.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train_parakeet.py, before torch is imported

import torch
from kernels import get_kernel
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from train_parakeet import (
    HERE,
    OUTPUT,
    REPO_ID,
    SAMPLING_RATE,
    VERSION,
    WEIGHTS,
    load_model,
    load_speech,
    make_batch,
)
from transformers import ParakeetFeatureExtractor, ParakeetForTDT

SHOWN = 1e-4  # the smallest probability with a colour of its own in the picture


def seconds_per_frame(model: ParakeetForTDT) -> float:
    """Of an encoder frame, that is, of a column of the lattice."""
    extractor = ParakeetFeatureExtractor(sampling_rate=SAMPLING_RATE)
    return model.config.encoder_config.subsampling_factor * extractor.hop_length / SAMPLING_RATE


@torch.no_grad()
def loss_arguments(model: ParakeetForTDT, batch: dict[str, Tensor]) -> tuple:
    """What `model` hands to its loss, in the order of `tdt_loss` and `tdt_align`: token logits (B, T, U + 1, V), duration
    logits (B, T, U + 1, D), labels (B, U), logit lengths (B,), label lengths (B,), blank, durations."""
    names = [
        "token_logits",
        "duration_logits",
        "labels",
        "logit_lengths",
        "label_lengths",
        "blank_token_id",
        "durations",
    ]
    handed = []

    def keep(**arguments: object) -> Tensor:
        handed.extend(arguments[name] for name in names)
        return torch.zeros(())

    model.eval()
    before, model.loss_function = model.loss_function, keep
    model(**batch)
    model.loss_function = before
    return tuple(handed)


def word_starts(text: str, frames: list[int]) -> list[tuple[int, str]]:
    """The words of `text` with the frame of each one's first character; `frames` holds one for every character."""
    starts = [i for i, character in enumerate(text) if character != " " and (i == 0 or text[i - 1] == " ")]
    return [(frames[i], text[i:].split(" ", 1)[0]) for i in starts]


def path_of(frames: list[int], durations: list[int], last_frame: int) -> tuple[list[int], list[int]]:
    """t and u of the corners of a path: blanks lead along a row, label u leads from row u to row u + 1."""
    t, u = [0], [0]
    for i, (frame, duration) in enumerate(zip(frames, durations)):
        t += [frame, frame + duration]
        u += [i, i + 1]
    return [*t, last_frame], [*u, len(frames)]


def draw_lattice(occupancy: Tensor, path: tuple[list[int], list[int]], text: str, frame: float, output: Path) -> None:
    """Write as a PNG how likely an alignment passes each node, and the best path.

    Args:
        occupancy: (T, U + 1) probability of each node.
        path: t and u of the best path's corners.
        text: the U characters.
        frame: seconds.
    """
    T, U1 = occupancy.shape
    figure = Figure(figsize=(max(7, 0.16 * T + 2), max(4, 0.14 * U1 + 1.6)), dpi=150, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        occupancy.T.clamp(min=SHOWN).cpu().numpy(),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        norm=LogNorm(SHOWN, 1),
    )
    axes.plot(*path, color="tab:orange", linewidth=1.2, marker=".", markersize=3, label="best path")
    axes.set_yticks(range(U1), [*text.replace(" ", "\N{OPEN BOX}"), "end"], fontsize=7)
    axes.set(xlabel="frame t", ylabel="label that comes next, u", xlim=(-0.5, T - 0.5), ylim=(-0.5, U1 - 0.5))
    axes.secondary_xaxis("top", functions=(lambda t: t * frame, lambda s: s / frame)).set_xlabel("seconds")
    axes.legend(loc="upper left", frameon=False)
    figure.colorbar(image, ax=axes, extend="min", label="probability that an alignment leaves the node (t, u)")
    figure.suptitle(textwrap.fill(text, 90), fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Align the five recordings with the trained model; draw one lattice.")
    parser.add_argument("--recording", type=int, help="whose lattice is drawn, from 1 (default: the shortest text's)")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="of train_parakeet.py (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--speech", type=Path, default=HERE / "speech", help="folder of recordings and transcripts")
    parser.add_argument("--output", type=Path, default=OUTPUT / "lattice.png", help="where the picture goes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Align, print, draw; returns 0 unless there is nothing to align with."""
    args = parse_args(argv)
    if not args.weights.is_file():
        print(f"no weights in {args.weights}: run `make train` first", file=sys.stderr)
        return 1
    kernel = get_kernel(REPO_ID, version=VERSION)
    waveforms, texts = load_speech(args.speech)
    if args.recording is not None and not 1 <= args.recording <= len(texts):
        print(f"--recording must be in 1 to {len(texts)}, got {args.recording}", file=sys.stderr)
        return 1
    model, vocabulary = load_model(args.weights, args.device)
    frame = seconds_per_frame(model)
    arguments = loss_arguments(model, make_batch(waveforms, texts, vocabulary, args.device))

    alignment = kernel.tdt_align(*arguments)
    frames, durations, scores = (tensor.tolist() for tensor in alignment)
    for number, (text, waveform) in enumerate(zip(texts, waveforms), start=1):
        # Characters of the text only: the rows of `frames` are as long as the longest text.
        words = word_starts(text, frames[number - 1][: len(text)])
        print(f"recording {number}, {len(waveform) / SAMPLING_RATE:.2f} s, best path {scores[number - 1]:.3f} nats")
        # Lines break between words, not between a time and its word.
        line = textwrap.fill("  ".join(f"{t * frame:.2f}\N{NO-BREAK SPACE}{word}" for t, word in words), 100)
        print(textwrap.indent(line.replace("\N{NO-BREAK SPACE}", " "), "  "))

    loss, occupancy = kernel.tdt_loss(*arguments, reduction="none", return_occupancy=True)
    chosen = min(range(len(texts)), key=lambda b: len(texts[b])) if args.recording is None else args.recording - 1
    T, U = int(arguments[3][chosen]), len(texts[chosen])
    nodes = (occupancy.blank + occupancy.label).sum(-1)[chosen, :T, : U + 1]
    path = path_of(frames[chosen][:U], durations[chosen][:U], T - 1)
    draw_lattice(nodes, path, texts[chosen], frame, args.output)
    print(
        f"all alignments of recording {chosen + 1} together {-loss[chosen].item():.3f} nats; its lattice in {args.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
