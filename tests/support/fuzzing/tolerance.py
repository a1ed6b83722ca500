"""The part of the valid fuzzer that is about the tolerance of the fused losses: what is drawn, and what must hold."""

from math import inf, sqrt

import torch

from support.lattices import TOLERANCE, band_constants, expected, fused, peaked

TOLERANCES = (1e-8, 1e-6, 1e-4, 1e-2, 1e-1)


def check_tolerance(kernel, draw, problem, upstream, *, dropout, factors, seed, **extra):
    """Calls with a drawn tolerance, sometimes on logits as of a trained model; returns what was drawn.

    The loss is that of all rows within gap and rounding, and so is the gradient: an occupancy is off by rho = 1 - exp(-gap)
    at most, so those of a sample by 2 (T + U) rho, and the ones left out by no more than half of `dropped_mass`."""
    tolerance = draw.choice(TOLERANCES)
    constants = {"_FREQUENT": draw.choice([2, 8, 128]), "_GROUPS": draw.choice([1, 3, 8])}
    constants |= {"_MOST": draw.choice([0.6, 2.0]), "_PILOTS": draw.choice([1, 5, 1024]), "LEAST_OPERATIONS": 0}
    trained = draw.maybe(0.5)
    if trained:
        problem = peaked(problem, draw.getrandbits(30), strength=draw.choice([0.2, 1.0, 2.0]))
    torch.manual_seed(seed)
    with band_constants(kernel, **constants):
        outcome = fused(kernel, problem, upstream=upstream, dropout=dropout, tolerance=tolerance, **extra)
    text = f"{tolerance=} {constants} {trained=} rows={outcome.stats.forward_rows} of {outcome.stats.valid_rows}"
    try:
        compare(problem, outcome, upstream.double().cpu(), factors, tolerance, extra["zero_infinity"])
    except AssertionError as error:
        raise AssertionError(f"{error}; {text}") from error
    return text


def compare(problem, outcome, upstream, factors, tolerance, zero_infinity):
    reference = expected(problem, upstream, factors)
    stats, dtype = outcome.stats, problem.encoder.dtype
    encoder, decoder, weight, bias = (None if x is None else x.double().cpu() for x in problem.operands)
    largest_hidden = (encoder.abs().amax((0, 1)) + decoder.abs().amax((0, 1))) if encoder.numel() else weight[0] * 0
    if factors is not None and factors.numel():
        largest_hidden = largest_hidden * factors.max()
    terms = 1 + (weight.abs() @ largest_hidden).max().item() + (0.0 if bias is None else bias.abs().max().item())
    unit = torch.finfo(dtype).eps * 4 if dtype.itemsize == 2 else TOLERANCE[dtype]
    steps = (problem.logit_lengths + problem.target_lengths).double().cpu()
    delay = abs(problem.options.get("delay_penalty", 0.0)) * problem.encoder.shape[1] / 2
    rounding = unit * (terms + delay) * (1 + steps)
    loss, gap, exact = outcome.loss.double().cpu(), stats.gap.cpu(), reference.loss
    exact = torch.where(exact == inf, 0.0, exact) if zero_infinity else exact
    finite = exact.isfinite()
    assert torch.equal(finite, loss.isfinite()), f"finite losses: {loss.tolist()}, not {exact.tolist()}"
    below, above = (exact - loss)[finite], (loss - exact - gap)[finite]
    rounding_of_loss = (rounding + unit * exact.abs())[finite]
    assert (below <= rounding_of_loss).all(), f"loss too small by {(below - rounding_of_loss).max():.3g}"
    assert (above <= rounding_of_loss).all(), f"loss above its gap by {(above - rounding_of_loss).max():.3g}"
    assert (gap >= 0).all() and (gap <= tolerance * (1 + 1e-9)).all(), f"gap {gap.tolist()}"
    assert stats.live_rows <= stats.forward_rows <= stats.valid_rows == problem.nodes

    # Every gradient is linear in those of the logits: what is missing there, times the largest factor on the way.
    strength = (1 + problem.options.get("fastemit_lambda", 0.0)) * upstream.abs()
    missing = (
        (strength * 4 * steps * -torch.expm1(-gap)).sum() + 2 * strength.max() * stats.dropped_mass.item()
        if len(upstream)
        else torch.zeros(())
    )
    scale = 1.0 if factors is None or not factors.numel() else factors.max().item()
    ways = {
        "encoder": weight.abs().max().item() * scale * sqrt(weight.shape[1]),
        "decoder": weight.abs().max().item() * scale * sqrt(weight.shape[1]),
        "weight": largest_hidden.norm().item() if problem.activation == "relu" else scale * sqrt(weight.shape[1]),
        "bias": 1.0,
    }
    for name, wanted in reference.grads.items():
        error = (outcome.grads[name].double().cpu() - wanted).norm().item()
        rounded = (rounding.max().item() if len(rounding) else 0.0) * sqrt(problem.nodes + 1)
        allowed = ways[name] * missing.item() + 4 * rounded * (ways[name] * (1 + strength.sum().item()) + 1)
        assert error <= allowed + unit * wanted.norm().item(), f"{name}: error {error:.3g}, allowed {allowed:.3g}"
