"""What the patches of all frameworks share.

A patched module gets a class of its own, between the module and the class that it had. Nothing that belongs to one module is
captured: the new ``forward`` finds everything through ``self``, so a deep copy, an average or a pickle of a patched module
works on its own parameters. The framework's own ``forward`` runs as it is, on a view of the module in which the joint network
and the loss are exchanged: the joint network returns :class:`UnformedLogits`, and the loss takes what these hold.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from torch import Tensor, nn

from ..checks import Options, check_reduction, check_tiling
from ..report import report
from .heads import Head

FUSED_OPTIONS = ("max_tile_bytes", "occupancy_threshold", "tolerance")
SETTINGS = "_tdt_loss_settings"  # the attribute of a patched module; without it the module does as it did before


class Patched:
    """The mixin of all patched classes. A ``patched_forward(base, ...)`` in it takes the place of ``base.forward``."""

    def __reduce_ex__(self, protocol):
        state = self.__getstate__() if hasattr(self, "__getstate__") else dict(vars(self))
        return _rebuild, (_own_base(type(self)), _own_mixin(type(self))), state


def patch(module: nn.Module, mixin: type, settings: dict[str, Any]) -> None:
    """Give the module a class with the mixin; where it has one already, only the settings change."""
    if "forward" in vars(module):
        raise ValueError(
            f"{type(module).__name__}.forward has been replaced on the instance (as accelerate's prepare does, and hooks that "
            "offload): patch the model before that"
        )
    if not isinstance(module, mixin):
        module.__class__ = _patched_class(type(module), mixin)
    vars(module)[SETTINGS] = settings


def unpatch(module: nn.Module) -> None:
    """Undo :func:`patch`; a module that is not patched stays as it is."""
    vars(module).pop(SETTINGS, None)
    if "_base_of_patch" in vars(type(module)):  # not where another class, such as FSDP's, has come on top
        module.__class__ = _own_base(type(module))


def view_of(module: nn.Module, **exchanged: Any) -> nn.Module:
    """The same module, parameters and submodules shared, but with some attributes exchanged; the module is not touched."""
    view = object.__new__(type(module))
    vars(view).update(vars(module))
    vars(view).update(exchanged)  # found before parameters and submodules of the name
    return view


def _own_base(cls: type) -> type:
    return cls._base_of_patch


def _own_mixin(cls: type) -> type:
    return cls._mixin_of_patch


@functools.cache
def _patched_class(base: type, mixin: type) -> type:
    """The class of patched modules: the base in name and signature, so that whoever looks at these sees no difference."""

    body = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    signatures = [inspect.signature(cls.forward) for cls in base.__mro__ if "forward" in vars(cls)]
    body.update(_base_of_patch=base, _mixin_of_patch=mixin)
    body.update(
        _parameters_of_patch=tuple(signatures[0].parameters),  # of forward, self first
        _names_of_patch=frozenset(name for signature in signatures for name in signature.parameters),
    )
    if hasattr(mixin, "patched_forward"):

        def forward(self, *args, **kwargs):
            return self.patched_forward(base, *args, **kwargs)

        # Not functools.wraps: accelerate unwraps __wrapped__ until nothing is left, and would find the unpatched function.
        forward.__signature__ = inspect.signature(base.forward)
        forward.__doc__ = base.forward.__doc__
        body["forward"] = forward
    return type(base)(base.__name__, (mixin, base), body)


def _rebuild(base: type, mixin: type) -> nn.Module:
    """An empty module of the patched class, for copies and pickles."""
    return object.__new__(_patched_class(base, mixin))


class UnformedLogits:
    """The joint network's logits (B, T, U+1, columns) that nobody computes: what goes in, and the head that would.

    It has the few methods that the frameworks call between joint network and loss. Any other use is an error rather than a
    silent difference.

    Args:
        head: the activation, dropout and linear layer.
        encoder: (B, T, H).
        decoder: (B, U+1, H).
    """

    def __init__(self, head: Head, encoder: Tensor, decoder: Tensor):
        self.head, self.encoder, self.decoder = head, encoder, decoder

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.encoder.shape[:2], self.decoder.shape[1], self.head.columns)

    @property
    def dtype(self):
        return self.encoder.dtype

    def squeeze(self, dim: int) -> UnformedLogits:
        if dim != 2:
            self._refuse(f"squeeze({dim})")
        return self

    def __getitem__(self, key: Any) -> UnformedLogits:
        """Frames or columns cut off: the loss reads the lengths and knows the columns."""
        first = key[0] if isinstance(key, tuple) else key
        if first is not Ellipsis and first != slice(None):
            self._refuse(f"[{key}]")
        return self

    def narrow(self, dim: int, start: int, length: int) -> UnformedLogits:
        if dim != 1 or start != 0:
            self._refuse(f"narrow({dim}, {start}, {length})")
        return UnformedLogits(self.head, self.encoder[:, : int(length)], self.decoder)

    def contiguous(self) -> UnformedLogits:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "neural_type":  # what copies, and NeMo's checks of types, ask for
            raise AttributeError(f"UnformedLogits has no attribute {name!r}")
        return self._refuse(f".{name}")

    def _refuse(self, use: str) -> Any:
        raise NotImplementedError(
            f"with use_fused_loss the logits of the joint network are never computed, but {use} of them is asked for: "
            "take use_loss for this model"
        )


def fused_or_dense(module: nn.Module, settings: dict[str, Any], reason: str, tensor: Tensor) -> bool:
    """Whether the loss without logits may be taken; a reason against it is warned of once for each module, and logged."""
    if not settings["fused"]:
        return False
    if not reason:
        return True
    name = f"use_fused_loss({type(module).__name__})"
    if settings.get("warned") != reason:
        settings["warned"] = reason
        warnings.warn(
            f"{name}: {reason}, so the loss is computed from the joint network's logits, which takes more memory",
            stacklevel=2,
        )
    report(name, tensor, reason=reason)
    return False


def checked_options(call: str, options: dict[str, Any], tdt: bool, fused: bool) -> dict[str, Any]:
    """The options as they were given; a wrong name or value is an error now rather than in the first step.

    Args:
        call: what the user called, for the message.
        options: by name.
        tdt: whether the loss is TDT, else RNN-T.
        fused: whether the options of the fused losses are among them.
    """
    of_loss = [name for name in Options._fields if tdt or name != "omega"]
    allowed = ("reduction", *of_loss, *(FUSED_OPTIONS if fused else ()))
    for name in options:
        if name not in allowed:
            raise TypeError(f"{call} got an unknown option {name!r}; there are {', '.join(allowed)}")
    check_reduction(options.get("reduction", "none"))
    Options.checked(**{name: value for name, value in options.items() if name in of_loss})
    check_tiling(
        options.get("max_tile_bytes", 1), options.get("occupancy_threshold", 0.0), options.get("tolerance", 0.0)
    )
    return dict(options)
