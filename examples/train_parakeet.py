"""Train a small Parakeet-TDT from scratch on five recordings, with the TDT loss of this package.

    make train                    builds the kernel first; ARGS="--seed 1" passes options on
    LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python examples/train_parakeet.py --seed 1
    LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" torchrun --nproc-per-node 2 examples/train_parakeet.py

Features and model are transformers' own; the loss is the kernel that `kernels.get_kernel` resolves, and there is no
other: a kernel that does not load ends the run. The trained model then writes down what it hears with `model.generate`.
The exit status is 0 when it hears every word right, and then its weights are kept for align_parakeet.py. This is a check
that the loss trains, not a recipe for speech recognition: five sentences are learnt by heart.

Under torchrun every process trains on its part of the recordings, on a GPU of its own or on the CPU. Gradients are those of the
mean loss of all recordings (`loss_weight`), but for batch norm, whose statistics are those of each process's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import wave
from dataclasses import dataclass
from pathlib import Path

# Read when torch is imported. Its threads otherwise spin while they wait for one another, as the LSTM has them do at every label:
# 10 s a step instead of 0.9 s on two cores of which another process holds one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jiwer
import numpy as np
import torch
import torch.distributed as dist
from kernels import get_kernel
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import ParakeetEncoderConfig, ParakeetFeatureExtractor, ParakeetForTDT, ParakeetTDTConfig

REPO_ID = "kernels-community/tdt-loss"
VERSION = 1
HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "output"
WEIGHTS = OUTPUT / "weights.pt"
SAMPLING_RATE = 16_000  # Hz
PAD = 0  # label padding; characters follow, and the blank comes last, as in the released Parakeet models


@dataclass(frozen=True)
class Vocabulary:
    """One token per character: ids are 0 for padding, 1 to n for the characters, n + 1 for the blank."""

    characters: str

    @classmethod
    def of(cls, texts: list[str]) -> Vocabulary:
        """The characters that occur in `texts`, sorted."""
        return cls("".join(sorted(set("".join(texts)))))

    @property
    def blank(self) -> int:
        return len(self.characters) + 1

    @property
    def size(self) -> int:
        return len(self.characters) + 2

    def encode(self, text: str) -> list[int]:
        return [self.characters.index(character) + 1 for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i - 1] for i in ids if i not in (PAD, self.blank))


def load_speech(folder: Path) -> tuple[list[np.ndarray], list[str]]:
    """The recordings that `transcripts.tsv` names, as float32 in [-1, 1), and what is said in each."""
    waveforms, texts = [], []
    for line in (folder / "transcripts.tsv").read_text(encoding="utf-8").splitlines():
        name, text = line.split("\t")
        with wave.open(str(folder / name), "rb") as file:
            if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLING_RATE, 1, 2):
                raise ValueError(f"{name} must be 16 kHz, mono, 16 bit; got {file.getparams()}")
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        waveforms.append(samples.astype(np.float32) / 32768)
        texts.append(text)
    return waveforms, texts


def make_batch(
    waveforms: list[np.ndarray], texts: list[str], vocabulary: Vocabulary, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """What `ParakeetForTDT.forward` takes in training.

    Returns:
        `input_features` (B, frames, 80) and their `attention_mask` (B, frames); `labels` (B, U), padded with `PAD`;
        `decoder_input_ids` (B, U + 1): the labels behind a blank, which stands for the start of the sentence.
    """
    extractor = ParakeetFeatureExtractor(sampling_rate=SAMPLING_RATE)
    features = extractor(waveforms, sampling_rate=SAMPLING_RATE, return_tensors="pt")
    tokens = [torch.tensor(vocabulary.encode(text)) for text in texts]
    labels = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
    batch = {
        "input_features": features["input_features"],
        "attention_mask": features["attention_mask"],
        "labels": labels,
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=vocabulary.blank),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def build_model(vocabulary: Vocabulary, durations: tuple[int, ...] = (0, 1, 2, 3, 4)) -> ParakeetForTDT:
    """A Parakeet-TDT of about 2.2 million parameters with random weights and without dropout."""
    encoder = ParakeetEncoderConfig(
        hidden_size=144,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=576,
        subsampling_conv_channels=32,
        dropout=0.0,
        layerdrop=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
    )
    config = ParakeetTDTConfig(
        vocab_size=vocabulary.size,
        decoder_hidden_size=128,
        num_decoder_layers=1,
        durations=list(durations),
        encoder_config=encoder,
        pad_token_id=PAD,
        blank_token_id=vocabulary.blank,
        decoder_start_token_id=vocabulary.blank,
    )
    model = ParakeetForTDT(config)
    # The joint network's last columns are durations; `generate` takes its argmax over all of them.
    model.generation_config.suppress_tokens = list(range(vocabulary.size, vocabulary.size + len(durations)))
    return model


def join_processes(device: torch.device) -> torch.device:
    """Under torchrun, meet the other processes; returns the device of this one."""
    if not dist.is_torchelastic_launched():
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def rank_and_processes() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_processes(value: float | torch.Tensor, device: torch.device) -> float:
    total = torch.as_tensor(value, dtype=torch.float64).to(device, copy=True)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def loss_weight(samples: int, device: torch.device) -> float:
    """What this process's mean loss over its `samples` is to be multiplied by.

    DistributedDataParallel takes the mean of the processes' gradients, each process alike. With this weight it is the gradient of
    the mean over the samples of all processes, however many each has. (A loss per label wants `reduction="sum"`, times the
    number of processes, over the labels of all: what docs/LOSSES.md says under "Several GPUs".)
    """
    _, processes = rank_and_processes()
    return samples * processes / sum_over_processes(samples, device)


def train(
    model: ParakeetForTDT,
    batch: dict[str, torch.Tensor],
    steps: int,
    target_loss: float = 0.0,
    learning_rate: float = 3e-3,
    progress: bool = True,
) -> list[float]:
    """Train on one batch until the loss falls below `target_loss`, for at most `steps` steps.

    AdamW, the learning rate warmed up over 10 steps, gradients clipped to a norm of 1. Of several processes each has its part
    of the batch, and all take the same steps.

    Returns:
        The loss of every step, in nats per label (`reduction="mean"`), over the samples of all processes.
    """
    device = batch["labels"].device
    _, processes = rank_and_processes()
    replica = DistributedDataParallel(model) if dist.is_initialized() else model
    weight = loss_weight(len(batch["labels"]), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses: list[float] = []
    model.train()
    with tqdm(total=steps, desc="training", unit="step", disable=not progress) as bar:
        while len(losses) < steps and (not losses or losses[-1] >= target_loss):
            loss = weight * replica(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(sum_over_processes(loss.detach(), device) / processes)
            bar.update()
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses


@torch.no_grad()
def transcribe(model: ParakeetForTDT, batch: dict[str, torch.Tensor], vocabulary: Vocabulary) -> list[str]:
    """What the model hears in each recording: greedy decoding with `model.generate`.

    One recording at a time: in a batch, the sentences that are over would go on until the longest is.
    """
    model.eval()
    heard = []
    for features, mask in zip(batch["input_features"], batch["attention_mask"]):
        inputs = features[mask][None]  # (1, frames, 80), without padding
        # As many tokens as feature frames, 8 for each encoder frame: a bound that only a broken model reaches.
        output = model.generate(input_features=inputs, attention_mask=mask[mask][None], max_new_tokens=inputs.shape[1])
        heard.append(vocabulary.decode(output.sequences[0].tolist()))
    return heard


def save_model(model: ParakeetForTDT, vocabulary: Vocabulary, path: Path) -> None:
    """Keep the weights, and what `load_model` has to know beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"characters": vocabulary.characters, "durations": model.config.durations, "weights": model.state_dict()}
    torch.save(kept, path)


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[ParakeetForTDT, Vocabulary]:
    """The model that `save_model` kept, and its vocabulary."""
    kept = torch.load(path, map_location=device, weights_only=True)
    vocabulary = Vocabulary(kept["characters"])
    model = build_model(vocabulary, tuple(kept["durations"])).to(device)
    model.load_state_dict(kept["weights"])
    return model, vocabulary


def plot_losses(losses: list[float], path: Path, title: str) -> None:
    """Write the loss of every step as a PNG, on a logarithmic scale."""
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(losses) + 1), losses, color="tab:blue")
    axes.set(title=title, xlabel="step", ylabel="TDT loss, nats per label")
    axes.margins(x=0.01)
    axes.grid(which="both", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Parakeet-TDT on five recordings and read them back.")
    parser.add_argument("--steps", type=int, default=300, help="at most so many steps (default: %(default)s)")
    parser.add_argument("--target-loss", type=float, default=0.003, help="stop below this loss (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of AdamW's (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--fused", action="store_true", help="compute the loss without the joint network's logits")
    parser.add_argument("--tolerance", type=float, help="of the fused loss, in nats (default: its own)")
    parser.add_argument("--speech", type=Path, default=HERE / "speech", help="folder of recordings and transcripts")
    parser.add_argument("--output", type=Path, default=OUTPUT / "loss.png", help="where the loss curve goes")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where the trained weights go")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, transcribe, report; returns 0 when every word is right."""
    args = parse_args(argv)
    device = join_processes(torch.device(args.device))
    rank, processes = rank_and_processes()
    kernel = get_kernel(REPO_ID, version=VERSION)

    waveforms, said = load_speech(args.speech)
    vocabulary = Vocabulary.of(said)
    if processes > len(said):
        raise ValueError(f"{processes} processes need a recording each, got {len(said)}")
    batch = make_batch(waveforms[rank::processes], said[rank::processes], vocabulary, device)
    torch.manual_seed(args.seed)
    model = build_model(vocabulary).to(device)
    if args.fused:
        kernel.use_fused_loss(model, **({} if args.tolerance is None else {"tolerance": args.tolerance}))
    else:
        model.loss_function = kernel.parakeet_tdt_loss

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = sum(map(len, waveforms)) / SAMPLING_RATE
    if rank == 0:
        print(f"device  {device} ({name}), {processes} process{'es' * (processes > 1)}")
        print(f"loss    {REPO_ID} version {VERSION}, from {Path(kernel.__file__).parent}")
        print(f"model   {type(model).__name__}, {parameters / 1e6:.2f} million parameters, seed {args.seed}")
        print(f"data    {len(said)} sentences, {seconds:.1f} s of speech, {len(vocabulary.characters)} characters")

    start = time.perf_counter()
    losses = train(model, batch, args.steps, args.target_loss, args.learning_rate, progress=rank == 0)
    wall = time.perf_counter() - start
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return 0  # the first process reads everything back
    print(f"trained {len(losses)} steps in {wall:.1f} s; loss {losses[0]:.3f} -> {losses[-1]:.5f}\n")

    heard = transcribe(model, make_batch(waveforms, said, vocabulary, device), vocabulary)
    for truth, guess in zip(said, heard):
        print(f"said    {truth}\nheard   {guess}\n")
    plot_losses(
        losses, args.output, f"Parakeet-TDT, {parameters / 1e6:.1f} M parameters, from scratch on {len(said)} sentences"
    )
    error_rate = jiwer.wer(said, heard)
    print(f"word error rate {error_rate:.1%}; loss curve in {args.output}")
    if error_rate > 0:
        print(f"FAILED: the word error rate is {error_rate:.1%} after {len(losses)} steps, not 0", file=sys.stderr)
        return 1
    save_model(model, vocabulary, args.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
