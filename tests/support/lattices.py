"""Joint networks whose lattices are hard for a band: drawn ones of every kind, and an excerpt of a trained model's."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from support import fused as fused_calls
from support.fused import NAMES, TOLERANCE, Outcome, Problem, errors, expected, make_problem

__all__ = [
    "KINDS",
    "NAMES",
    "SMALL_BAND",
    "TOLERANCE",
    "Outcome",
    "band_constants",
    "errors",
    "expected",
    "fused",
    "inputs_of",
    "make_lattice",
    "peaked",
    "trained_lattice",
]

# Few frequent tokens and groups, so that narrow rows pay off with small vocabularies too, and no share of the rows at which
# the band is given up: the guarantee must hold without the help of either.
SMALL_BAND = {"_FREQUENT": 6, "_GROUPS": 3, "_MOST": 2.0, "LEAST_OPERATIONS": 0}


def fused(kernel, problem, **options):
    """Forward and backward with the default tolerance, unless another is given."""
    return fused_calls.fused(kernel, problem, **{"tolerance": 1e-6, **options})


@contextmanager
def band_constants(kernel, **values):
    """Other constants of band.py for a while; hypothesis does not allow monkeypatch, which lasts for all of its examples."""
    before = {name: getattr(kernel.band, name) for name in values}
    try:
        for name, value in values.items():
            setattr(kernel.band, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(kernel.band, name, value)


def _spoken(problem, generator, strength, emissions=1):
    """Encoder frames that ask for the labels, each at some frames of its own, and for the blank elsewhere."""
    H = problem.encoder.shape[2]
    codes = torch.randn(len(problem.weight), H, generator=generator, dtype=torch.float64)
    encoder = codes[problem.blank].expand(problem.encoder.shape).clone()
    B, T, _ = encoder.shape
    U = problem.targets.shape[1]
    for b in range(B if T > 0 else 0):
        for u in range(U):
            for k in range(emissions):
                encoder[b, (u + k * (T // 2)) * T // max(U, 1) % T] = codes[problem.targets[b, u]]
    encoder += 0.1 * torch.randn(encoder.shape, generator=generator, dtype=torch.float64)
    return problem.replace(encoder=encoder, decoder=0.3 * problem.decoder, weight=codes * strength)


def peaked(problem, seed, strength=1.0):
    """A problem of the same sizes, with logits like those of a trained model."""
    single = problem.to(torch.float64).to("cpu")
    spoken = _spoken(single, torch.Generator().manual_seed(seed), strength)
    return spoken.to(problem.encoder.dtype).to(problem.encoder.device)


def _peaked(problem, generator):
    return _spoken(problem, generator, strength=1.0)


def _broad(problem, generator):
    """Next to no node is without occupancy, next to none has much."""
    return _spoken(problem, generator, strength=0.15)


def _two_ways(problem, generator):
    """Each label is asked for twice, half an utterance apart: alignments far from each other are as likely."""
    return _spoken(problem, generator, strength=0.5, emissions=2)


def _flat(problem, generator):
    return problem.replace(weight=problem.weight * 0, bias=None if problem.bias is None else problem.bias * 0)


def _ties(problem, generator):
    """Small whole numbers: logits, and so nodes, that are equal to the last bit."""
    rounded = {name: x.round().clamp(-1, 1) for name, x in zip(NAMES, problem.operands) if x is not None}
    return problem.replace(**rounded)


def _huge(problem, generator):
    size = 10 ** (3 + 2 * torch.rand((), generator=generator, dtype=torch.float64).item())
    return problem.replace(weight=problem.weight * size)


def _masked(problem, generator):
    """Some tokens cannot be: half of those that are no labels, and not the blank."""
    bias = torch.zeros(len(problem.weight), dtype=torch.float64) if problem.bias is None else problem.bias.clone()
    others = torch.ones(problem.vocab, dtype=torch.bool)
    others[problem.targets.flatten()] = False
    others[problem.blank] = False
    bias[: problem.vocab][others & (torch.rand(problem.vocab, generator=generator) < 0.5)] = -torch.inf
    return problem.replace(bias=bias)


def _hidden(problem, generator):
    """One frame asks for a token that nothing else asks for: few pilot rows, or none, know of it."""
    problem = _peaked(problem, generator)
    weight, encoder = problem.weight.clone(), problem.encoder.clone()
    if encoder.shape[1] > 0:
        weight[problem.vocab // 2, 0] = 30.0
        encoder[:, encoder.shape[1] // 2, 0] = 10.0
    return problem.replace(weight=weight, encoder=encoder)


KINDS = {
    "random": lambda problem, generator: problem,
    "peaked": _peaked,
    "broad": _broad,
    "two ways": _two_ways,
    "flat": _flat,
    "ties": _ties,
    "huge": _huge,
    "masked": _masked,
    "hidden": _hidden,
}


def make_lattice(kind, *, seed=0, labels="random", dtype=torch.float64, device="cpu", **rest):
    """A problem of a kind. ``labels``: random, one label over and over ("same"), or the blank among them ("blank").

    ``rest``: the sizes and options of make_problem."""
    problem = make_problem(seed=seed, dtype=torch.float64, **{"B": 2, "T": 12, "U": 5, "V": 64, "H": 12, **rest})
    if labels == "same":
        problem.targets.fill_(1)
    elif labels == "blank":
        problem.targets[:, ::2] = problem.blank
    return KINDS[kind](problem, torch.Generator().manual_seed(seed + 1)).to(dtype).to(device)


_EXCERPT = Path(__file__).resolve().parent.parent / "data" / "trained_joint.npz"


def trained_lattice(dtype=torch.float64, device="cpu", samples=slice(None), **rest):
    """Beginnings of two utterances that a small TDT model was trained on, and of two that it was not (data/README.md)."""
    with np.load(_EXCERPT) as file:
        stored = {name: torch.from_numpy(file[name]) for name in file.files}
    encoder, decoder, weight = (
        stored[name].double() * stored[f"{name}_scale"].double()[..., None] for name in ("encoder", "decoder", "weight")
    )
    durations = tuple(stored["durations"].tolist())
    problem = Problem(
        encoder=encoder[samples],
        decoder=decoder[samples],
        weight=weight,
        bias=stored["bias"].double(),
        targets=stored["targets"].long()[samples],
        logit_lengths=stored["logit_lengths"].long()[samples],
        target_lengths=stored["target_lengths"].long()[samples],
        blank=len(weight) - len(durations) - 1,
        durations=durations,
        **{"sigma": 0.02, **rest},
    )
    return problem.to(dtype).to(device)


def inputs_of(kernel, problem, tolerance, **options):
    """What the public function makes of a problem: the tensors and the rest, for calls of a stage of its own."""
    given = {**problem.options, **options}
    nodes = (*problem.encoder.shape[:2], problem.decoder.shape[1])
    labels = kernel.checks.Labels(nodes, problem.encoder.device, problem.vocab, *problem.labels).tensors
    inputs = kernel.tiles.Inputs(*problem.operands, *labels, *problem.labels[1:], None)
    checked = kernel.tiles.Problem(
        blank=problem.blank,
        vocab=problem.vocab,
        durations=list(problem.durations),
        sigma=problem.sigma,
        delay_penalty=given.get("delay_penalty", 0.0),
        omega=given.get("omega", 0.0),
        fastemit_lambda=given.get("fastemit_lambda", 0.0),
        clamp=given.get("clamp", 0.0),
        zero_infinity=False,
        reduction=0,
        activation=kernel.tiles.ACTIVATIONS.index(problem.activation),
        dropout=0.0,
        max_tile_bytes=1 << 24,
        occupancy_threshold=0.0,
        tolerance=tolerance,
        dtype=problem.encoder.dtype,
    )
    return inputs, checked
