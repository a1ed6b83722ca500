"""The models that end_to_end.py trains: transducers of transformers with random weights of the released sizes, and small ones to try the script."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers

FRAMES_PER_SECOND = 100  # of the features, 10 ms apart


@dataclass(frozen=True)
class Size:
    """A model of transformers, and the batch that it trains on."""

    name: str  # in the results
    model: str  # the class in transformers
    V: int
    encoder: dict = field(default_factory=dict)  # beside what is the same for all
    joint: dict = field(default_factory=dict)
    seconds: float = 20.0
    labels: int = 99

    @property
    def tdt(self) -> bool:
        return self.model.endswith("TDT")


# What transformers' defaults do not have as the released models have it. Without layerdrop each step does the same work.
RELEASED = {"num_mel_bins": 128, "attention_bias": False, "convolution_bias": False, "scale_input": False}
SIZES = [
    Size("Parakeet-TDT 0.6B, V = 8193", "ParakeetForTDT", 8193, RELEASED),
    Size("Parakeet-TDT 0.6B, V = 1025", "ParakeetForTDT", 1025, RELEASED),
    Size("Nemotron 3.5, V = 13088", "Nemotron3_5AsrForRNNT", 13_088, RELEASED),
]
SMALL_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
}
SMALL_JOINT = {"decoder_hidden_size": 32, "num_decoder_layers": 1}
TINY = [
    Size("tiny TDT", "ParakeetForTDT", 33, SMALL_ENCODER, SMALL_JOINT, seconds=1.0, labels=5),
    Size(
        "tiny RNN-T",
        "Nemotron3_5AsrForRNNT",
        29,
        SMALL_ENCODER,
        SMALL_JOINT | {"num_prompts": 4, "prompt_intermediate_size": 16, "default_prompt_id": 1},
        seconds=1.0,
        labels=5,
    ),
]


def build_model(size: Size, device: str) -> torch.nn.Module:
    """In training, with weights from one seed. Raises AttributeError where this transformers lacks the model."""
    encoders = ("ParakeetEncoderConfig", "ParakeetTDTConfig")
    if not size.tdt:
        encoders = ("NemotronAsrStreamingEncoderConfig", "Nemotron3_5AsrConfig")
    encoder_config, config = (getattr(transformers, name) for name in encoders)
    cls = getattr(transformers, size.model)
    tokens = {
        "vocab_size": size.V,
        "blank_token_id": size.V - 1,
        "pad_token_id": 0,
        "decoder_start_token_id": size.V - 1,
    }
    made = config(encoder_config=encoder_config(layerdrop=0.0, **size.encoder), **tokens, **size.joint)
    torch.manual_seed(0)
    with torch.device(device):
        return cls(made).train()


def make_batch(size: Size, model: torch.nn.Module, samples: int, device: str) -> dict[str, torch.Tensor]:
    frames = round(size.seconds * FRAMES_PER_SECOND)
    generator = torch.Generator(device).manual_seed(1)
    mels = model.config.encoder_config.num_mel_bins
    labels = torch.randint(1, size.V - 1, (samples, size.labels), generator=generator, device=device)
    return {
        "input_features": torch.randn(samples, frames, mels, generator=generator, device=device),
        "attention_mask": torch.ones(samples, frames, dtype=torch.bool, device=device),
        "labels": labels,
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=size.V - 1),
    }
