"""Peak memory and time of Nemotron 3.5's joint network and loss at 16 x 20 s: without logits, and from them.

    make build && LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python benchmarks/nemotron.py --output nemotron.json

Needs an NVIDIA GPU. The joint network is that of the released model, H = 640 and V = 13,088, in bfloat16; the encoder gives a
frame in 80 ms. Encoder and decoder states are leaves, so that the memory is that of the joint network, the loss and their
gradients, beyond weights and inputs. Losses of both ways are compared before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from kernels import get_kernel

B, T, U, H, V = 16, 250, 99, 640, 13_088
REPEATS = 10


def inputs(device: str) -> tuple[list[torch.Tensor], torch.nn.Linear, tuple[torch.Tensor, ...]]:
    """States that need a gradient, the head, and labels with their lengths, which lie on the host."""
    torch.manual_seed(0)
    states = [torch.randn(B, n, H, device=device, dtype=torch.bfloat16).requires_grad_() for n in (T, U + 1)]
    head = torch.nn.Linear(H, V, device=device, dtype=torch.bfloat16)
    labels = (torch.randint(0, V - 1, (B, U), device=device), torch.full((B,), T), torch.full((B,), U))
    return states, head, labels


def fused(kernel, states, head, labels) -> torch.Tensor:
    return kernel.rnnt_loss_fused_joint(*states, head.weight, head.bias, *labels, V - 1, "mean_volume")


def dense(kernel, states, head, labels) -> torch.Tensor:
    hidden = torch.relu(states[0][:, :, None] + states[1][:, None])
    return kernel.rnnt_loss(head(hidden), *labels, V - 1, "mean_volume")


def measure(kernel, loss, device: str) -> dict[str, float]:
    """GiB beyond weights and inputs, and milliseconds, of forward and backward: the median of a few after a warm-up."""
    states, head, labels = inputs(device)
    peaks, times = [], []
    for repeat in range(REPEATS + 3):
        for tensor in (*states, *head.parameters()):
            tensor.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        value = loss(kernel, states, head, labels)
        value.backward()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            times.append(start.elapsed_time(end))
    return {
        "loss": value.item(),
        "gib": max(peaks),
        "ms": statistics.median(times),
        "ms_spread": max(times) - min(times),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this needs an NVIDIA GPU", file=sys.stderr)
        return 1
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "build": kernel.info()["build"]}
    result["shape"] = {"B": B, "T": T, "U": U, "H": H, "V": V, "dtype": "bfloat16"}
    result["logits_gib"] = B * T * (U + 1) * V * 2 / 2**30
    for name, loss in (("fused", fused), ("dense", dense)):
        try:
            result[name] = measure(kernel, loss, "cuda")
        except torch.cuda.OutOfMemoryError as error:
            result[name] = {"error": str(error).splitlines()[0]}
        torch.cuda.empty_cache()
    if all("loss" in result[name] for name in ("fused", "dense")):
        difference = abs(result["fused"]["loss"] / result["dense"]["loss"] - 1)
        result["loss_difference"] = difference
        if difference > 1e-3:  # the tiles round hidden units and logits to bfloat16 as the dense products do
            print(f"the losses differ by {difference:.1e}", file=sys.stderr)
            return 1
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
