"""The arguments of the op ``loss`` by name, so that none travels by its position."""

import operator
from typing import NamedTuple, Optional

from torch import Tensor

from .checks import Options

# What the gradient depends on beside tensors, in the order of its ops.
_of_gradient = operator.attrgetter("blank", "durations", "omega", "fastemit_lambda", "clamp")


class LossArguments(
    NamedTuple(
        "LossArguments",
        [
            ("logits", Tensor),
            ("duration_logits", Optional[Tensor]),
            ("targets", Tensor),
            ("logit_lengths", Tensor),
            ("target_lengths", Tensor),
            ("blank", int),
            ("durations", list[int]),
            *Options.__annotations__.items(),
            ("need_grad", bool),
            ("inplace_grad", bool),
            ("reduction", int),
        ],
    )
):
    """The arguments of the op ``loss``, in its order, the options among them as :class:`Options` has them."""

    __slots__ = ()

    @property
    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.targets, self.logit_lengths, self.target_lengths

    @property
    def gradient_options(self) -> tuple:
        """What the ops of the gradient take behind the tensors."""
        return _of_gradient(self)
