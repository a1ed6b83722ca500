"""The one table of tolerances, and what it allows for a batch."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest error against float64, from the same (rounded) logits.

    `log_prob` is of a log-probability, for every nat in it and one nat more. `loss` and `grad` are times the condition of a sample, which says how far
    such errors carry (oracle.condition), `loss` beside that relative to the loss: see `loss_limit` and `grad_limit`. None of them knows how large the
    logits are. `lattice` is the relative error of alpha, beta and LL from given log-probabilities; `rounding`, relative too, is the one rounding of a
    gradient to the dtype of the logits. test_logprobs.py and test_loss.py measure plain torch beside it: in float32 it errs as much or more.
    """

    log_prob: float
    lattice: float
    loss: float
    grad: float
    rounding: float


_DOUBLE = Tolerance(log_prob=2e-15, lattice=1e-13, loss=2e-15, grad=2e-15, rounding=0.0)
_SINGLE = Tolerance(log_prob=5e-7, lattice=2e-7, loss=2.5e-7, grad=2.5e-7, rounding=0.0)  # 2**-24 is 6e-8
TOLERANCE = {
    torch.float64: _DOUBLE,
    torch.float32: _SINGLE,
    torch.bfloat16: replace(_SINGLE, rounding=2**-8),
    torch.float16: replace(_SINGLE, rounding=2**-11),
}

DTYPES = list(TOLERANCE)


def loss_limit(batch):
    """(B,) the largest error of each loss."""
    losses, tolerance = batch.expected.losses, TOLERANCE[batch.token_logits.dtype].loss
    own = losses.abs().nan_to_num(posinf=0.0)
    return tolerance * (batch.expected.condition + own) + oracle_limit(batch)


def grad_limit(batch):
    """(B,) the largest error of a gradient or an occupancy of each sample, before it is rounded to the dtype of the logits."""
    return TOLERANCE[batch.token_logits.dtype].grad * batch.expected.condition + 2 * oracle_limit(batch)


def oracle_limit(batch):
    """(B,) of the oracle's LL, a sum in float64 of as many log-weights as an alignment has arcs, each time rounded to its size."""
    losses, arcs = batch.expected.losses, (batch.logit_lengths.cpu() + batch.target_lengths.cpu()).double()
    return 2**-53 * arcs.to(losses.device) * losses.abs().nan_to_num(posinf=0.0)
