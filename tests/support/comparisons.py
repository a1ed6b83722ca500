"""Assertions on losses, gradients and records, within the tolerances; equality of bits."""

import torch

from support.batches import DUR_LP, ROW_SUM
from support.tolerances import TOLERANCE, grad_limit, loss_limit


def assert_close(name, actual, expected, limit, excused=None):
    """Every entry within its own limit of the expected one; infinities and NaN where they are expected. `excused`: True where anything goes."""
    actual, expected = actual.detach().cpu().double(), expected.cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    limit = torch.as_tensor(limit, dtype=torch.float64).cpu().expand(expected.shape)
    right = (actual == expected) | (actual.isnan() & expected.isnan()) | ((actual - expected).abs() <= limit)
    if excused is not None:
        right |= excused.cpu()
    if not right.all():
        at = tuple((~right).nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int((~right).sum())} of {right.numel()} wrong, first at {list(at)}: {actual[at].item()!r}, "
            f"expected {expected[at].item()!r} within {limit[at].item():.3g}"
        )


def assert_losses_match(losses, batch):
    assert losses.dtype == (torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32)
    assert_close("loss", losses, batch.expected.losses, loss_limit(batch))


def assert_grads_match(outcome, batch, weights=1.0, atol=None):
    """Gradients against the oracle's times `weights`, within `atol` or else what the batch's condition allows; exactly 0 in the padding."""
    tolerance = TOLERANCE[batch.token_logits.dtype]
    weights = torch.as_tensor(weights, dtype=torch.float64, device=batch.token_logits.device).reshape(-1, 1, 1, 1)
    limit = grad_limit(batch).view(-1, 1, 1, 1) * (1 + batch.option("fastemit_lambda")) if atol is None else atol
    limit = limit * weights.abs()
    for name in ("grad_tokens", "grad_durations"):
        actual, expected = getattr(outcome, name), getattr(batch.expected, name) * weights
        assert actual.dtype == batch.token_logits.dtype
        assert (actual[~batch.valid] == 0).all(), f"{name}: not exactly 0 in the padding"
        subnormal = torch.finfo(actual.dtype).tiny * torch.finfo(actual.dtype).eps
        assert_close(name, actual, expected, limit + tolerance.rounding * expected.abs() + subnormal)


def assert_matches(outcome, batch):
    """Losses and gradients against the oracle."""
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch)


def assert_log_probs_match(node_lp, batch):
    """The first result of the op log_probs."""
    D, dtype, expected = len(batch.durations), batch.token_logits.dtype, batch.expected_node_lp
    assert node_lp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert node_lp.shape == expected.shape and node_lp.is_contiguous()
    nats = 1 + batch.penalty + expected.abs().nan_to_num(posinf=0.0)
    nats[..., ROW_SUM] = 2 * expected[..., ROW_SUM].nan_to_num()
    assert_close("log-probabilities", node_lp, expected, TOLERANCE[dtype].log_prob * nats)
    assert (node_lp[~batch.valid] == 0).all() and (node_lp[..., DUR_LP + D :] == 0).all()


def assert_row_max_match(row_max, batch):
    """The second."""
    dtype, expected = batch.token_logits.dtype, batch.expected_row_max[batch.valid]
    assert row_max.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert row_max.shape == batch.expected_row_max.shape and row_max.is_contiguous()
    assert_close("max of a row", row_max[batch.valid], expected, 0.0)


def same_bits(first, second):
    """Bitwise equality, NaN and the sign of zero included."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.contiguous().view(as_int), second.contiguous().view(as_int))
    )


def assert_same_bits(outcome, expected, samples=slice(None)):
    """Losses and gradients of these samples."""
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name)[samples], getattr(expected, name)[samples]), name
