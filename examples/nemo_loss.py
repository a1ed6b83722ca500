"""The TDT and RNN-T losses of this package behind the interface of NeMo's losses.

    LOCAL_KERNELS="kernels-community/tdt-loss=$PWD" python examples/nemo_loss.py

A NeMo transducer model holds in `model.loss` a wrapper, `RNNTLoss`, and in `model.loss._loss` the loss itself: a module with
the forward signature `(acts, labels, act_lens, label_lens)` and an attribute `reduction`, which the wrapper sets to None
around each call in order to reduce the batch itself. The classes here are such modules; README.md shows how one is put in place.

What differs from NeMo's `TDTLossNumba` (read in the source of nemo_toolkit 3.0.0):

    omega            NeMo draws, for each batch, the RNN-T loss with probability omega, else the TDT loss. Here the loss is
                     (1 - omega) TDT + omega RNN-T: what NeMo's draws average to, but that sigma here counts in both terms.
    fastemit_lambda  NeMo also multiplies the loss that it reports by 1 + lambda, and leaves the gradient of the duration logits
                     without it. Here the loss is reported as it is, and label arcs count 1 + lambda times in all gradients.
    clamp            NeMo bounds the gradient of the token logits; here that of the duration logits is bounded too.
    reduction        "mean" of NeMo's Numba classes is the mean over the batch, whatever their docstring says; here "mean" is what
                     it is in the wrapper and in NeMo's PyTorch losses: each loss over its target length, then the mean.
    target length 0  "mean" and "mean_volume" count it as 1 instead of dividing by 0.
    CPU              NeMo's TDT loss in Numba needs a GPU; this one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from kernels import get_kernel
from torch import Tensor, nn

# NeMo's names on the left; None is what its wrapper sets.
REDUCTIONS = {
    None: "none",  # (B,)
    "none": "none",
    "mean_batch": "mean_batch",  # mean over the batch
    "mean": "mean",  # each loss over its target length, then the mean over the batch
    "sum": "sum",
    "mean_volume": "mean_volume",  # sum of the losses over the sum of target lengths
}


@cache
def load_kernel() -> ModuleType:
    """The kernel; not an attribute of the modules, which would then not be copied or pickled."""
    return get_kernel("kernels-community/tdt-loss", version=1)


def our_reduction(reduction: str | None) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    return REDUCTIONS[reduction]


class TDTLossNeMo(nn.Module):
    """The TDT loss with the constructor and forward of NeMo's `TDTLossNumba`.

    Args:
        blank: the blank's column; in NeMo it follows the vocabulary and is followed by the durations.
        durations: in frames, in the order of the last columns.
        reduction: None, "none", "mean_batch", "mean", "sum" or "mean_volume"; read at every call.
        fastemit_lambda: weight of FastEmit's term in the gradient; 0 is without.
        clamp: bound of each sample's gradient before reduction and upstream gradient; 0 or less is without.
        sigma: logit under-normalisation in nats.
        omega: share of the RNN-T loss, in [0, 1].
    """

    def __init__(
        self,
        blank: int,
        durations: Sequence[int],
        reduction: str | None = "mean",
        fastemit_lambda: float = 0.0,
        clamp: float = -1.0,
        sigma: float = 0.0,
        omega: float = 0.0,
    ) -> None:
        super().__init__()
        our_reduction(reduction)
        self.blank = blank
        self.durations = [int(duration) for duration in durations]
        self.reduction = reduction
        self.fastemit_lambda = fastemit_lambda
        self.clamp = clamp
        self.sigma = sigma
        self.omega = omega

    def forward(
        self,
        acts: Tensor,  # (B, T, U + 1, V + D), the joint network's output
        labels: Tensor,  # (B, U)
        act_lens: Tensor,  # (B,)
        label_lens: Tensor,  # (B,)
    ) -> Tensor:
        """The loss: (B,) where `reduction` is None or "none", else a scalar."""
        return load_kernel().tdt_loss_joint(
            acts,
            labels,
            act_lens,
            label_lens,
            self.blank,
            self.durations,
            self.sigma,
            our_reduction(self.reduction),
            omega=self.omega,
            fastemit_lambda=self.fastemit_lambda,
            clamp=self.clamp,
        )


class RNNTLossNeMo(nn.Module):
    """The RNN-T loss with the constructor and forward of NeMo's `RNNTLossNumba`; arguments as in `TDTLossNeMo`."""

    def __init__(
        self, blank: int, reduction: str | None = "mean", fastemit_lambda: float = 0.0, clamp: float = -1.0
    ) -> None:
        super().__init__()
        our_reduction(reduction)
        self.blank = blank
        self.reduction = reduction
        self.fastemit_lambda = fastemit_lambda
        self.clamp = clamp

    def forward(
        self,
        acts: Tensor,  # (B, T, U + 1, V)
        labels: Tensor,  # (B, U)
        act_lens: Tensor,  # (B,)
        label_lens: Tensor,  # (B,)
    ) -> Tensor:
        """The loss: (B,) where `reduction` is None or "none", else a scalar."""
        return load_kernel().rnnt_loss(
            acts,
            labels,
            act_lens,
            label_lens,
            self.blank,
            our_reduction(self.reduction),
            fastemit_lambda=self.fastemit_lambda,
            clamp=self.clamp,
        )


def main() -> None:
    """One call of each, as NeMo's wrapper makes it."""
    torch.manual_seed(0)
    B, T, U, V, durations = 2, 50, 12, 1025, [0, 1, 2, 3, 4]
    joint = torch.randn(B, T, U + 1, V + len(durations), requires_grad=True)
    batch = {
        "labels": torch.randint(0, V - 1, (B, U)),
        "act_lens": torch.tensor([50, 40]),
        "label_lens": torch.tensor([12, 9]),
    }
    losses = TDTLossNeMo(V - 1, durations, reduction=None, sigma=0.02, omega=0.1)(acts=joint, **batch)
    losses.mean().backward()
    print(f"TDT with 0.1 of RNN-T: {losses.tolist()}, norm of the gradient {joint.grad.norm():.4f}")
    losses = RNNTLossNeMo(V - 1, reduction=None)(acts=joint[..., :V], **batch)
    print(f"RNN-T: {losses.tolist()}")


if __name__ == "__main__":
    main()
