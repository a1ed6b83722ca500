"""ESPnet: the module ``warprnnt_pytorch`` that its transducer models import, on the kernels of this package.

ESPnet (read and run in 202511) takes its transducer loss from a package ``warprnnt_pytorch`` that has to be compiled.
``install()`` puts a module of that name in its place, before the model is built; ``uninstall()`` undoes it.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch import Tensor, nn

from ..rnnt import rnnt_loss

__all__ = ["RNNTLoss", "install", "uninstall"]

_NAME = "warprnnt_pytorch"
_REDUCTIONS = {"mean": "mean_batch", "sum": "sum", "none": "none"}


class RNNTLoss(nn.Module):
    """The RNN-T loss with the constructor and forward of ``warprnnt_pytorch.RNNTLoss``.

    Args:
        blank: the blank's column, 0 in ESPnet.
        reduction: ``"mean"``, over the batch, ``"sum"`` or ``"none"``.
        fastemit_lambda: as in :func:`rnnt_loss`; the reported loss does not change.

    Raises:
        ValueError: the reduction is none of the three.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.integrations.espnet.RNNTLoss()
        >>> round(loss(torch.zeros(1, 2, 2, 4), torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1])).item(), 4)
        3.4657
    """

    def __init__(self, blank: int = 0, reduction: str = "mean", fastemit_lambda: float = 0.0):
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.blank, self.reduction, self.fastemit_lambda = blank, reduction, fastemit_lambda

    def forward(
        self,
        acts: Tensor,  # (B, T, U+1, V)
        labels: Tensor,  # (B, U)
        act_lens: Tensor,  # (B,)
        label_lens: Tensor,  # (B,)
    ) -> Tensor:
        """The loss: (B,) for "none", else a scalar."""
        labelling = (labels, act_lens, label_lens, self.blank, _REDUCTIONS[self.reduction])
        return rnnt_loss(acts, *labelling, fastemit_lambda=self.fastemit_lambda)


def install() -> None:
    """Let ``from warprnnt_pytorch import RNNTLoss``, which ESPnet does when a model is built, find :class:`RNNTLoss`.

    It changes one entry of ``sys.modules``, in this process; :func:`uninstall` takes it out again. A model that is built keeps
    the loss that it was built with.

    Raises:
        RuntimeError: the real ``warprnnt_pytorch`` has been imported already.

    Example:
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> kernel.integrations.espnet.install()  # before the model is built
        >>> from warprnnt_pytorch import RNNTLoss
        >>> kernel.integrations.espnet.uninstall()
    """
    there = sys.modules.get(_NAME)
    if there is not None and getattr(there, "RNNTLoss", None) is not RNNTLoss:
        raise RuntimeError(f"{_NAME} is imported already, from {getattr(there, '__file__', None)}")
    module = ModuleType(_NAME, "The transducer loss of the tdt-loss kernel, for ESPnet.")
    module.RNNTLoss = RNNTLoss
    sys.modules[_NAME] = module


def uninstall() -> None:
    """Undo :func:`install`; without it nothing happens.

    Example:
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> kernel.integrations.espnet.uninstall()
    """
    if getattr(sys.modules.get(_NAME), "RNNTLoss", None) is RNNTLoss:
        del sys.modules[_NAME]
