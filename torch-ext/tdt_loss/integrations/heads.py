"""Which joint networks the fused losses can stand in for, and how their last layer's weights are reached.

A fused loss multiplies by the weights of the last layer itself, so that whatever else a call of that layer would do, an
adapter, a hook, a quantised product, would be left out. ``reason_against`` finds what there is; the dense loss is taken then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FSDP = "torch.distributed.fsdp"
ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh"}


class Head(NamedTuple):
    """The end of a joint network: ``linear(dropout(activation(encoder + decoder)))``."""

    joint: nn.Module  # the joint network that holds the rest
    activation: nn.Module
    linear: nn.Module
    dropout: float = 0.0  # as it is now: 0 in evaluation

    @property
    def columns(self) -> int:
        return self.linear.out_features

    def reason_against(self) -> str:
        """Why the fused loss would not be this head's, or nothing."""
        if torch.nn.modules.module._has_any_global_hook():
            return "there are global hooks on modules"
        if type(self.activation) not in ACTIVATIONS:
            return f"its joint network's activation is {type(self.activation).__name__}, neither ReLU nor Tanh"
        for what, module in (("joint network", self.joint), ("activation", self.activation), ("head", self.linear)):
            if "forward" in vars(module):
                return f"the forward of its {what} has been replaced"
            if has_hooks(module):
                return f"its {what} has hooks"
        return self._reason_against_linear()

    def _reason_against_linear(self) -> str:
        linear = self.linear
        if getattr(type(linear), "forward", None) is not nn.Linear.forward:
            return f"its head is a {type(linear).__module__}.{type(linear).__name__}, not a torch.nn.Linear"
        if nn.utils.parametrize.is_parametrized(linear):
            return ""  # weight is then what the layer multiplies by, and has its gradient
        in_unit = any(_is_fsdp(hook) for module in (self.joint, linear) for hook in _hooks(module))
        for name in ("weight", "bias"):
            parameter = getattr(linear, name)
            if parameter is not None and type(parameter) not in (Tensor, nn.Parameter) and not in_unit:
                return f"the {name} of its head is a {type(parameter).__name__}, not a plain parameter"
            if parameter is not None and parameter.device.type == "meta":
                return f"the {name} of its head is on the meta device, as when it is offloaded"
        return ""

    def call(self, loss: Callable[[Tensor, Tensor, Tensor, Any], Tensor], encoder: Tensor, decoder: Tensor) -> Tensor:
        """``loss(encoder, decoder, weight, bias)``, inside the FSDP units that shard the weights, if there are any."""

        def compute(encoder: Tensor, decoder: Tensor) -> Tensor:
            return loss(encoder, decoder, self.linear.weight, self.linear.bias)

        units = [unit for unit in (self.joint, self.linear) if any(map(_is_fsdp, _hooks(unit)))]
        return _inside(units, compute, encoder, decoder)


def _hooks(module: nn.Module) -> Iterator[Callable]:
    for name in _HOOKS:
        yield from (getattr(module, name, None) or {}).values()


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody but FSDP watches or changes what the module computes."""
    return any(not _is_fsdp(hook) for hook in _hooks(module))


def _is_fsdp(hook: Callable) -> bool:
    """FSDP2 gathers and frees a unit's weights in hooks of its own; they do not change what the unit computes."""
    return (getattr(hook, "__module__", None) or "").startswith(_FSDP)


def _inside(units: list[nn.Module], compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``compute(*tensors)`` as if it were the forward of each of the units, outermost first."""
    if not units:
        return compute(*tensors)
    unit = units[0]
    vars(unit)["forward"] = lambda *inner: _inside(units[1:], compute, *inner)
    try:
        return unit(*tensors)
    finally:
        del vars(unit)["forward"]
