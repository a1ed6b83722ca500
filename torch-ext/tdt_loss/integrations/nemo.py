"""NeMo: the transducer models, EncDecRNNTModel, EncDecRNNTBPEModel, their hybrids with CTC and their subclasses.

NeMo's own steps run as they are, with its wrapper ``model.loss``, which reduces. Exchanged are the loss inside the wrapper,
``model.loss._loss``, and, for the loss without logits, what the joint network's ``forward`` hands to it. Name, options, blank
and reduction are read from the model's config, again after ``change_vocabulary``, which makes a new wrapper and a new joint
network. NeMo is not imported.

What differs from NeMo's ``TDTLossNumba`` (read in the source of nemo_toolkit 3.0.0):

    omega            NeMo draws, for each batch, the RNN-T loss with probability omega, else the TDT loss. Here the loss is
                     (1 - omega) TDT + omega RNN-T: what NeMo's draws average to, but that sigma here counts in both terms.
    fastemit_lambda  NeMo also multiplies the loss that it reports by 1 + lambda, and leaves the gradient of the duration logits
                     without it. Here the loss is reported as it is, and label arcs count 1 + lambda times in all gradients.
    clamp            NeMo bounds the gradient of the token logits; here that of the duration logits is bounded too.
    reduction        "mean" of NeMo's Numba classes is the mean over the batch, whatever their docstring says; here "mean" is what
                     it is in the wrapper and in NeMo's PyTorch losses: each loss over its target length, then the mean.
    float32          NeMo's wrapper casts 16-bit logits to float32 first; here they are read as they are, summed in float32.
    CPU              NeMo's losses in Numba need a GPU; these do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..fused import rnnt_loss_fused_joint, tdt_loss_fused_joint
from ..loss import tdt_loss_joint
from ..rnnt import rnnt_loss
from .heads import ACTIVATIONS, Head, has_hooks
from .patch import FUSED_OPTIONS, SETTINGS, Patched, UnformedLogits, checked_options, fused_or_dense, patch, view_of

__all__ = ["RNNTLoss", "TDTLoss"]

TDT_NAMES = ("tdt", "tdt_pytorch")
RNNT_NAMES = ("warprnnt", "warprnnt_numba", "pytorch", "graph_rnnt")
# NeMo's names on the left; None is what its wrapper sets.
REDUCTIONS = {
    None: "none",  # (B,)
    "none": "none",
    "mean_batch": "mean_batch",
    "mean": "mean",
    "sum": "sum",
    "mean_volume": "mean_volume",
}


def _our_reduction(reduction: str | None) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    return REDUCTIONS[reduction]


class _Loss(nn.Module):
    """What a wrapper of NeMo holds as ``_loss``."""

    def __init__(self, blank: int, durations: Sequence[int] | None, reduction: str | None, options: dict[str, Any]):
        super().__init__()
        _our_reduction(reduction)
        self.blank = blank
        self.durations = None if durations is None else [int(duration) for duration in durations]
        self.reduction = reduction
        self.options = options

    def forward(
        self,
        acts: Tensor | UnformedLogits,  # (B, T, U+1, columns), the joint network's output
        labels: Tensor,  # (B, U)
        act_lens: Tensor,  # (B,)
        label_lens: Tensor,  # (B,)
    ) -> Tensor:
        """The loss: (B,) where ``reduction`` is None or "none", else a scalar."""
        labelling = (labels, act_lens, label_lens, self.blank)
        reduction = _our_reduction(self.reduction)
        if isinstance(acts, UnformedLogits):
            return acts.head.call(
                functools.partial(self._fused, acts.head, labelling, reduction), acts.encoder, acts.decoder
            )
        options = {name: value for name, value in self.options.items() if name not in FUSED_OPTIONS}
        if self.durations is None:
            return rnnt_loss(acts, *labelling, reduction, **options)
        return tdt_loss_joint(acts, *labelling, self.durations, reduction=reduction, **options)

    def _fused(self, head, labelling, reduction, encoder, decoder, weight, bias) -> Tensor:
        options = {"activation": ACTIVATIONS[type(head.activation)], "dropout": head.dropout, **self.options}
        if self.durations is None:
            return rnnt_loss_fused_joint(encoder, decoder, weight, bias, *labelling, reduction, **options)
        labelling = (*labelling, self.durations)
        return tdt_loss_fused_joint(encoder, decoder, weight, bias, *labelling, reduction=reduction, **options)


class TDTLoss(_Loss):
    """The TDT loss with the constructor and forward of NeMo's ``TDTLossNumba``, to be put in ``model.loss._loss``.

    Args:
        blank: the blank's column; in NeMo it follows the vocabulary and is followed by the durations.
        durations: in frames, in the order of the last columns.
        reduction: None, "none", "mean_batch", "mean", "sum" or "mean_volume"; read at every call.
        fastemit_lambda, clamp, sigma, omega, options: as in :func:`tdt_loss`; a clamp of 0 or less is none.

    Raises:
        ValueError: the reduction is unknown.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.integrations.nemo.TDTLoss(blank=3, durations=[0, 1, 2], sigma=0.05)
        >>> round(loss(torch.zeros(1, 3, 2, 7), torch.tensor([[0]]), torch.tensor([3]), torch.tensor([1])).item(), 4)
        4.1557
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
        **options: Any,
    ):
        given = {"fastemit_lambda": fastemit_lambda, "clamp": clamp, "sigma": sigma, "omega": omega, **options}
        super().__init__(blank, durations, reduction, given)


class RNNTLoss(_Loss):
    """The RNN-T loss with the constructor and forward of NeMo's ``RNNTLossNumba``; arguments as in :class:`TDTLoss`."""

    def __init__(
        self,
        blank: int,
        reduction: str | None = "mean",
        fastemit_lambda: float = 0.0,
        clamp: float = -1.0,
        **options: Any,
    ):
        super().__init__(blank, None, reduction, {"fastemit_lambda": fastemit_lambda, "clamp": clamp, **options})


def is_transducer(module: nn.Module) -> bool:
    """Whether it is a transducer model of NeMo."""
    if not any(cls.__module__.startswith("nemo.") for cls in type(module).__mro__):
        return False
    return all(hasattr(module, name) for name in ("extract_rnnt_loss_cfg", "joint", "decoder", "loss", "cfg"))


def use(model: nn.Module, fused: bool, options: dict[str, Any]) -> None:
    """Patch the model; see ``use_fused_loss`` and ``use_loss``."""
    tdt = _name_and_options(model)[0] in TDT_NAMES
    call = f"{'use_fused_loss' if fused else 'use_loss'}({type(model).__name__})"
    options = checked_options(call, options, tdt, fused)
    undo = vars(model).get(SETTINGS, {}).get("undo_nemo")
    patch(model, PatchedModel, {"fused": fused, "options": options, "undo_nemo": undo})
    _apply(model)


def undo(model: nn.Module, settings: dict[str, Any]) -> None:
    """Put NeMo's own loss back into the wrapper."""
    if isinstance(model.loss._loss, _Loss):
        model.loss._loss, model.loss._force_float32, model.loss.reduction = settings["undo_nemo"]


def _name_and_options(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Which loss the config asks for, with what options."""
    name, options = model.extract_rnnt_loss_cfg(model.cfg.get("loss", None))
    if name not in TDT_NAMES + RNNT_NAMES:
        raise ValueError(
            f"loss_name must be one of {', '.join(TDT_NAMES + RNNT_NAMES)}, got {name!r}: the package has no such loss"
        )
    return name, {str(key): value for key, value in (options or {}).items()}


def _apply(model: nn.Module) -> None:
    """Put the loss where the model's settings and config say; again after each change of the vocabulary."""
    settings = vars(model)[SETTINGS]
    name, options = _name_and_options(model)
    options.update(settings["options"])
    reduction = options.pop("reduction", model.cfg.get("rnnt_reduction", "mean_batch"))
    blank = model.joint.num_classes_with_blank - 1 - model.joint.num_extra_outputs
    if not isinstance(model.loss._loss, _Loss):
        settings["undo_nemo"] = (model.loss._loss, model.loss._force_float32, model.loss.reduction)
    durations = options.pop("durations", None)
    if name in TDT_NAMES:
        model.loss._loss = TDTLoss(blank, durations, **options)
    else:
        model.loss._loss = RNNTLoss(blank, **options)
    model.loss._force_float32 = False
    model.loss.reduction = reduction
    patch(model.joint, PatchedJoint, {"fused": settings["fused"]})


class PatchedModel(Patched):
    """The mixin of patched models, whose loss outlives a change of vocabulary."""

    def change_vocabulary(self, *args, **kwargs):
        super().change_vocabulary(*args, **kwargs)
        if SETTINGS in vars(self):
            _apply(self)


class PatchedJoint(Patched):
    """The mixin of patched joint networks. Decoding calls their other methods, which stay as they are."""

    def patched_forward(self, base, *args, **kwargs):
        settings = vars(self).get(SETTINGS)
        if settings is None:
            return base.forward(self, *args, **kwargs)
        head = _head(self)
        tensor = next(self.parameters())
        if not fused_or_dense(self, settings, _reason_against(self, head), tensor):
            return base.forward(self, *args, **kwargs)
        view = view_of(self, joint=functools.partial(_unformed, self, head))
        result = base.forward(view, *args, **kwargs)
        self.hypotheses = view.hypotheses  # the one attribute that forward sets
        return result


def _head(joint: nn.Module) -> Head:
    layers = list(joint.joint_net)
    dropout = sum(layer.p for layer in layers if isinstance(layer, nn.Dropout) and layer.training)
    return Head(joint, layers[0], layers[-1], dropout)


def _reason_against(joint: nn.Module, head: Head) -> str:
    """Why the joint network is not one whose logits can be left out, or nothing."""
    for name in ("forward", "joint", "joint_after_projection"):
        owner = next(_owners(joint, name)).__name__
        if owner not in ("RNNTJoint", "AbstractRNNTJoint"):
            return f"its joint network has the {name} of {owner}"
    layers = list(joint.joint_net)
    if not 2 <= len(layers) <= 3 or not all(isinstance(layer, nn.Dropout) for layer in layers[1:-1]):
        return f"the layers of its joint network are {', '.join(type(layer).__name__ for layer in layers)}"
    if any(has_hooks(module) for module in (joint.joint_net, *layers[1:-1])):
        return "its joint network has hooks"
    if joint.is_adapter_available():
        return "its joint network has adapters"
    if joint.training and joint.masking_prob > 0:
        return "its joint network masks the decoder's output (masking_prob)"
    if joint.temperature != 1.0 and joint.log_softmax is not False:
        return f"its joint network has the temperature {joint.temperature}"
    return head.reason_against()


def _owners(module: nn.Module, name: str) -> Iterator[type]:
    """The classes that define the method, without the patched ones."""
    for cls in type(module).__mro__:
        if name in vars(cls) and "_base_of_patch" not in vars(cls):
            yield cls


def _unformed(joint: nn.Module, head: Head, f: Tensor, g: Tensor) -> UnformedLogits:
    """In the place of ``joint.joint``: (B, T, D) of the encoder and (B, U+1, D) of the decoder, projected to (.., H)."""
    return UnformedLogits(head, joint.project_encoder(f), joint.project_prednet(g))
