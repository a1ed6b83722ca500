"""What the tests of the examples share: the small Parakeet of examples/train_parakeet.py and some of its recordings.

A module that imports this one is skipped where the examples or a package that they need are missing.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.loss.loss_tdt", reason="needs a transformers with the TDT loss")
for _name in ("jiwer", "librosa", "matplotlib", "tqdm"):
    pytest.importorskip(_name, reason=f"the examples need {_name}")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if not EXAMPLES.is_dir():  # the tests alone, as the CI of kernels takes them
    pytest.skip("needs the examples", allow_module_level=True)

import train_parakeet  # noqa: E402


def shortest_speech(count):
    """Waveforms and texts of so many recordings, the shortest, 3 s each and a little more."""
    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    shortest = sorted(range(len(texts)), key=lambda i: len(waveforms[i]))[:count]
    return [waveforms[i] for i in shortest], [texts[i] for i in shortest]


def make_model(vocabulary):
    """The same weights every time; in training."""
    torch.manual_seed(0)
    return train_parakeet.build_model(vocabulary).train()


def loss_and_gradients(model, batch):
    """The output of the model, and what its loss leaves at the parameters."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours, theirs, rounding=1e-6):
    total = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm()
        # What the softmax or the batch norm behind it cancels has gradient 0, but for rounding.
        cancelled = name.endswith(("k_proj.bias", "depthwise_conv.bias"))
        assert error <= (rounding * total if cancelled else 1e-5 * gradient.norm()), name
