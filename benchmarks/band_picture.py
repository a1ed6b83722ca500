#!/usr/bin/env python3
"""Draw docs/band.png: occupancies of an utterance by a trained model, and the nodes that forward computes for a tolerance.

    LOCAL_KERNELS=kernels-community/tdt-loss=$PWD python benchmarks/band_picture.py [--lattices other.npz --prefix train_]

Without a file it draws the excerpt of the tests, tests/data/trained_joint.npz. Another one holds encoder (B, T, H), decoder
(B, U + 1, H), targets, logit_lengths and target_lengths, each behind the prefix, and weight, bias, durations.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from kernels import get_kernel
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from records import REPO

sys.path.insert(0, str(REPO / "tests"))

from support.lattices import Problem, inputs_of, trained_lattice

BLANK_LP, LEAST = 1, 1e-8  # field of a record; occupancy that is still drawn


def problem_of(path: Path | None, prefix: str, sample: int) -> Problem:
    if path is None:
        return trained_lattice(torch.float32, samples=slice(sample, sample + 1))
    with np.load(path) as file:
        own = {name: torch.from_numpy(file[prefix + name][sample : sample + 1]) for name in ("encoder", "decoder")}
        labels = {
            name: torch.from_numpy(file[prefix + name][sample : sample + 1]).long()
            for name in ("targets", "logit_lengths", "target_lengths")
        }
        weight, bias = (torch.from_numpy(file[name]).float() for name in ("weight", "bias"))
        durations = tuple(file["durations"].tolist())
    blank = len(weight) - len(durations) - 1
    operands = {name: x.float() for name, x in own.items()} | {"weight": weight, "bias": bias}
    return Problem(**operands, **labels, blank=blank, durations=durations, sigma=0.02)


def computed_and_occupancy(kernel, problem: Problem, tolerance: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(T, U1) whether forward computes a node's row; the occupancy of each node by all rows; and the gap."""
    inputs, p = inputs_of(kernel, problem, tolerance)
    forward = kernel.fused_passes.fused_forward(inputs, p, True)
    computed = forward.outputs[1][0, :, :, BLANK_LP] > -torch.inf
    inputs, p = inputs_of(kernel, problem, 0.0)
    _, node_lp, _, ll, alpha_beta, _ = kernel.fused_passes.fused_forward(inputs, p, True).outputs
    occupancy = kernel.loss.ops.node_occupancy(node_lp, ll, alpha_beta, *inputs.labels, p.durations, p.vocab, 0.0, 0.0)
    T, U = int(problem.logit_lengths[0]), int(problem.target_lengths[0])
    return computed[:T, : U + 1], occupancy[0, :T, : U + 1], forward.gap[0].item()


def draw(computed: torch.Tensor, occupancy: torch.Tensor, title: str, path: Path) -> None:
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    visible = np.ma.masked_less(occupancy.T.numpy(), LEAST)
    image = axes.imshow(
        visible, origin="lower", aspect="auto", cmap="inferno_r", norm=LogNorm(LEAST, 1.0), interpolation="nearest"
    )
    axes.contour(computed.T.double().numpy(), levels=[0.5], colors="tab:blue", linewidths=1)
    axes.set(title=title, xlabel="frames t", ylabel="labels u")
    figure.colorbar(image, label="occupancy")
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lattices", type=Path, help="an npz file (default: the excerpt of the tests)")
    parser.add_argument("--prefix", default="", help="of the names in the file")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--output", type=Path, default=REPO / "docs" / "band.png")
    options = parser.parse_args()
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    problem = problem_of(options.lattices, options.prefix, options.sample)
    computed, occupancy, gap = computed_and_occupancy(kernel, problem, options.tolerance)
    share = computed.double().mean().item()
    title = f"{share:.0%} of the rows for a tolerance of {options.tolerance:g} nats (outlined); gap {gap:.1e}"
    draw(computed, occupancy, title, options.output)
    print(f"written to {options.output}: {title}")


if __name__ == "__main__":
    main()
