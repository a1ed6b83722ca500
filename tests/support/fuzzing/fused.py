"""Calls of the fused losses, drawn and held against the oracle."""

from math import inf, sqrt

import torch

from support import fused
from support.comparisons import assert_close
from support.fused import NAMES, dropout_factors, expected, logits_of, make_problem
from support.fuzzing.draws import Draw, draw_durations, draw_lengths, draw_sizes, within_budget
from support.fuzzing.logits import draw_layout
from support.fuzzing.tolerance import check_tolerance
from support.tolerances import TOLERANCE


def check_fused(kernel, draw: Draw, function: str, device: str) -> str:
    sizes = draw_sizes(draw)
    durations = () if function.startswith("rnnt") else draw_durations(draw, sizes["T"])
    sizes = within_budget(sizes, len(durations))
    B, T, U, V = (sizes[name] for name in "BTUV")
    H = draw.choice([1, 3, 8, 24, 64])
    dtype = draw.choices(list(TOLERANCE), [2, 4, 1, 1])[0]
    narrow = dtype.itemsize == 2
    options = {}
    if not narrow:
        for name, values in (
            ("fastemit_lambda", [0.01, 0.5]),
            ("clamp", [0.01, 0.2]),
            ("delay_penalty", [0.1, -2.0]),
            ("omega", [0.3, 1.0]),
        ):
            if draw.maybe(0.25) and (durations or name != "omega"):
                options[name] = draw.choice(values)
    problem = make_problem(
        max(B, 0),
        T,
        U,
        max(V, 2),
        H,
        tuple(min(d, T + 1) for d in durations),
        dtype=dtype,
        device=device,
        seed=draw.getrandbits(62),
        scale=draw.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        bias=draw.maybe(0.8),
        logit_lengths=draw_lengths(draw, B, T),
        target_lengths=draw_lengths(draw, B, U),
        activation=draw.choice(["relu", "tanh"]),
        sigma=0.0 if narrow else draw.choice([0.0, 0.05]),
        options=options,
    )
    problem = problem.replace(blank=draw.randint(-problem.vocab, problem.vocab - 1))
    dropout = draw.choice([0.0, 0.0, 0.3]) if not narrow else 0.0
    extra = {
        "max_tile_bytes": draw.choice(
            [1 if problem.nodes < 200 else 1 << 14, problem.tile_bytes * draw.randint(8, 60), 1 << 20]
        ),
        "zero_infinity": draw.maybe(0.2),
        "tolerance": 0.0,  # tolerance.py draws others
    }
    changes = [draw_layout(draw, dims, False) for dims in (3, 3, 2, 1)]
    laid_out = problem.replace(
        **{name: None if x is None else change(x) for name, x, change in zip(NAMES, problem.operands, changes)}
    )
    upstream = torch.randn(B, generator=draw.generator(), dtype=torch.float64)
    seed = draw.getrandbits(30)
    text = (
        f"{function} B,T,U,V,H={B, T, U, problem.vocab, H} {durations=} blank={problem.blank} {dtype} "
        f"T={problem.logit_lengths.tolist()[:8]} U={problem.target_lengths.tolist()[:8]} {problem.activation} {options} {extra} {dropout=}"
    )
    try:
        torch.manual_seed(seed)
        outcome = fused.fused(
            kernel, laid_out, upstream=upstream.to(device, _sum_dtype(dtype)), dropout=dropout, **extra
        )
        factors = None
        if dropout and B * T:
            torch.manual_seed(seed)
            drawn = int(torch.randint(2**63 - 1, ()))
            factors = dropout_factors(
                kernel, dropout, drawn, B=B, T=T, U1=U + 1, H=H, dtype=torch.float64, device=device
            ).cpu()
        compare_fused(kernel, problem, outcome, upstream, factors, extra)
        del extra["tolerance"]
        upstream = upstream.to(device, _sum_dtype(dtype))
        call = {"dropout": dropout, "factors": factors, "seed": seed, **extra}
        text += f" {check_tolerance(kernel, draw, problem, upstream, **call)}"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    return text


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compare_fused(kernel, problem, outcome, upstream, factors, extra) -> None:
    """Loss by sample, gradients in norm; 16-bit ones beside those of the dense pipeline, whose logits are rounded as often."""
    reference = expected(problem, upstream, factors)
    operands = [None if x is None else x.double().cpu() for x in problem.operands]
    B, T, U1 = len(problem.logit_lengths), problem.encoder.shape[1], problem.decoder.shape[1]
    hidden = getattr(torch, problem.activation)(operands[0][:, :, None] + operands[1][:, None])
    logits = logits_of(operands, problem.activation, factors)
    largest = max([1.0, *(x.abs().max().item() for x in (logits, hidden) if x.numel())])
    largest = max(largest, abs(problem.options.get("delay_penalty", 0.0)) * T / 2)
    path = max(1.0, sqrt(T + U1) / 8)
    dtype = problem.encoder.dtype
    narrow = dtype.itemsize == 2
    unit = torch.finfo(dtype).eps * 4 if narrow else fused.TOLERANCE[dtype]
    losses = torch.where(reference.loss == inf, 0.0, reference.loss) if extra["zero_infinity"] else reference.loss
    assert outcome.loss.dtype == _sum_dtype(dtype)
    assert_close("loss", outcome.loss, losses, unit * (losses.abs() + largest * path))
    assert outcome.stats.valid_rows == problem.nodes
    # The size of what is summed: a gradient may cancel to nothing, and its error does not.
    sizes = {
        "encoder": operands[2].norm().item(),
        "decoder": operands[2].norm().item(),
        "weight": hidden.norm().item(),
        "bias": sqrt(problem.nodes),
    }
    summed = 2**-50 * losses[losses.isfinite()].abs().max().item() if losses.isfinite().any() else 0.0
    strength = (1 + problem.options.get("fastemit_lambda", 0.0)) * (upstream.abs().max().item() if B else 0.0)
    for name, wanted in reference.grads.items():
        actual = outcome.grads[name].double().cpu()
        assert outcome.grads[name].dtype == dtype and actual.shape == wanted.shape
        error, size = (actual - wanted).norm().item(), wanted.norm().item()
        allowed = (unit * largest + summed) * path * (size + strength * max(1.0, sizes[name])) * 2
        assert error <= allowed, f"gradient of {name}: error {error:.3g} of {size:.3g}, allowed {allowed:.3g}"
