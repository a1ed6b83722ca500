"""Train the small Parakeet-TDT of train_parakeet.py with the Trainer of transformers.

    make build
    LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python examples/trainer_parakeet.py

One step of the optimizer sees the five recordings in batches of two, two and one, and its gradient is that of one batch
of five: the Trainer counts the labels of all three batches, and the loss divides by that count. Only the statistics of
the encoder's batch norm are those of the small batches. The exit status is 0 when the model hears every word right.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; train_parakeet.py says why

import jiwer
import torch
from kernels import get_kernel
from train_parakeet import HERE, PAD, REPO_ID, VERSION, Vocabulary, build_model, load_speech, make_batch, transcribe
from transformers import Trainer, TrainerCallback, TrainingArguments

IGNORED = -100  # what the Trainer does not count as a label


def collate(vocabulary: Vocabulary, samples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch for `ParakeetForTDT`, with labels padded as the Trainer wants them."""
    batch = make_batch([sample["waveform"] for sample in samples], [sample["text"] for sample in samples], vocabulary)
    batch["labels"][batch["labels"] == PAD] = IGNORED
    return batch


class StopBelow(TrainerCallback):
    """Ends the training when the logged loss, an average over the steps since the last, is below a target."""

    def __init__(self, target_loss: float):
        self.target_loss = target_loss

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("loss", float("inf")) < self.target_loss:
            control.should_training_stop = True


def make_trainer(
    model: torch.nn.Module, loss: Callable[..., torch.Tensor], samples: list[dict], vocabulary: Vocabulary, **arguments
) -> Trainer:
    """A Trainer of `model` with `loss`, which `ParakeetForTDT.forward` calls; `arguments` are those of `TrainingArguments`."""
    model.loss_function = loss
    settings = {
        "output_dir": tempfile.gettempdir(),  # where nothing is saved
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,  # the collator makes the columns
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=samples,
        data_collator=functools.partial(collate, vocabulary),
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Parakeet-TDT with the Trainer of transformers.")
    parser.add_argument("--steps", type=int, default=300, help="at most so many steps (default: %(default)s)")
    parser.add_argument("--target-loss", type=float, default=0.01, help="stop below this loss (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--speech", type=Path, default=HERE / "speech", help="folder of recordings and transcripts")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, transcribe, report; returns 0 when every word is right."""
    args = parse_args(argv)
    kernel = get_kernel(REPO_ID, version=VERSION)
    waveforms, said = load_speech(args.speech)
    vocabulary = Vocabulary.of(said)
    torch.manual_seed(args.seed)
    model = build_model(vocabulary)

    trainer = make_trainer(
        model,
        functools.partial(kernel.parakeet_tdt_loss, reduction="mean_volume"),
        [{"waveform": waveform, "text": text} for waveform, text in zip(waveforms, said)],
        vocabulary,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=args.steps,
        learning_rate=3e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=5,
        seed=args.seed,
        use_cpu=args.cpu,
    )
    trainer.add_callback(StopBelow(args.target_loss))
    trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"trained {trainer.state.global_step} steps; loss {losses[0]:.3f} -> {losses[-1]:.5f}\n")
    heard = transcribe(model, make_batch(waveforms, said, vocabulary, model.device), vocabulary)
    for truth, guess in zip(said, heard):
        print(f"said    {truth}\nheard   {guess}\n")
    error_rate = jiwer.wer(said, heard)
    print(f"word error rate {error_rate:.1%}")
    return 0 if error_rate == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
