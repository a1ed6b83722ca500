"""transformers: ParakeetForTDT, ParakeetForRNNT, NemotronAsrStreamingForRNNT and Nemotron3_5AsrForRNNT.

The model's own ``forward`` computes features, prompts and decoder states as ever. Its joint network is exchanged for one that
hands on what goes in (fused), and its ``loss_function`` for the losses of this package. transformers is not imported: models
are known by the names of their classes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..fused import rnnt_loss_fused_joint, tdt_loss_fused_joint
from ..report import report
from ..transformers_loss import _OF_THE_MODEL, _PADDING, parakeet_rnnt_loss, parakeet_tdt_loss, reduce_accumulated
from .heads import ACTIVATIONS, Head
from .patch import FUSED_OPTIONS, SETTINGS, Patched, UnformedLogits, checked_options, fused_or_dense, patch, view_of

MODELS = ("ParakeetForTDT", "ParakeetForRNNT", "NemotronAsrStreamingForRNNT", "Nemotron3_5AsrForRNNT")
JOINTS = (
    "ParakeetTDTJointNetwork",
    "ParakeetRNNTJointNetwork",
    "NemotronAsrStreamingRNNTJointNetwork",
    "Nemotron3_5AsrRNNTJointNetwork",
)
# Keyword arguments that the models take beside the named ones of their forward: transformers', and those of the encoders.
PASSED_ON = _OF_THE_MODEL | {"num_lookahead_tokens", "padding_cache", "past_key_values"}


def model_name(module: nn.Module) -> str | None:
    """Which of the models it is, or a subclass of; None for any other module."""
    for cls in type(module).__mro__:
        if cls.__name__ in MODELS and cls.__module__.startswith("transformers."):
            return cls.__name__
    return None


def use(model: nn.Module, fused: bool, options: dict[str, Any]) -> None:
    """Patch the model; see ``use_fused_loss`` and ``use_loss``."""
    name = model_name(model)
    tdt = name == "ParakeetForTDT"
    options = checked_options(f"{'use_fused_loss' if fused else 'use_loss'}({name})", options, tdt, fused)
    patch(model, PatchedTransducer, {"fused": fused, "tdt": tdt, "options": options})


class PatchedTransducer(Patched):
    """The mixin of patched models."""

    def patched_forward(self, base, *args, labels=None, num_items_in_batch=None, **kwargs):
        settings = vars(self).get(SETTINGS)
        if labels is not None:
            kwargs["labels"] = labels
        elif args and "labels" in self._parameters_of_patch:
            position = self._parameters_of_patch.index("labels") - 1  # self is not among the arguments
            labels = args[position] if len(args) > position else None
        if settings is None or labels is None:
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return base.forward(self, *args, **kwargs)
        for name in kwargs:
            if name not in PASSED_ON and name not in self._names_of_patch:
                raise TypeError(
                    f"{base.__name__}.forward() got an unknown argument {name!r}; options of the loss go to use_loss or "
                    "use_fused_loss"
                )
        loss = functools.partial(_loss, self, settings, num_items_in_batch)
        exchanged = {"_loss_function": loss}
        head = Head(self.joint, getattr(self.joint, "activation", None), getattr(self.joint, "head", None))
        if fused_or_dense(self, settings, _reason_against(self.joint, head), labels):
            exchanged["joint"] = functools.partial(_unformed, head)
        return _without_logits(base.forward(view_of(self, **exchanged), *args, **kwargs))


def _reason_against(joint: nn.Module, head: Head) -> str:
    """Why the joint network is not one whose logits can be left out, or nothing."""
    owner = next((cls for cls in type(joint).__mro__ if "forward" in vars(cls)), nn.Module)
    if owner.__name__ not in JOINTS or not owner.__module__.startswith("transformers."):
        return f"its joint network's forward is that of {owner.__module__}.{owner.__name__}"
    return head.reason_against()


def _unformed(head: Head, decoder_hidden_states: Tensor, encoder_hidden_states: Tensor) -> UnformedLogits:
    """In the joint network's place: (B, 1, U+1, H) and (B, T, 1, H) as (B, U+1, H) and (B, T, H)."""
    return UnformedLogits(head, encoder_hidden_states[:, :, 0], decoder_hidden_states[:, 0])


def _without_logits(output: Any) -> Any:
    """The model's output; logits that were never made are left out, as None or of the tuple."""
    if isinstance(output, tuple):
        return tuple(x for x in output if not isinstance(x, UnformedLogits))
    if isinstance(output.logits, UnformedLogits):
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return output


def _loss(
    model: nn.Module,
    settings: dict[str, Any],
    num_items_in_batch: Tensor | int | None,
    *,
    labels: Tensor,
    logits: Tensor | UnformedLogits | None = None,
    token_logits: Tensor | UnformedLogits | None = None,
    duration_logits: Tensor | None = None,
    logit_lengths: Tensor | None = None,
    label_lengths: Tensor | None = None,
    encoder_outputs: Any = None,
    **passed_on: Any,
) -> Tensor:
    """In the place of the model's ``loss_function``, with the arguments that the models give it."""
    options, config = dict(settings["options"]), model.config
    logits = token_logits if logits is None else logits
    reduction = options.pop("reduction", "mean" if settings["tdt"] else "mean_volume")
    if logit_lengths is None:  # the Nemotron models hand their encoder's output on instead
        logit_lengths = _frames(encoder_outputs, logits)
    if label_lengths is None:
        label_lengths = _label_lengths(labels, config)
    if isinstance(logits, UnformedLogits):
        loss = functools.partial(_fused, logits, logit_lengths, config, settings["tdt"], options)
        return reduce_accumulated(loss, labels, label_lengths, reduction, num_items_in_batch)
    for name in FUSED_OPTIONS:
        options.pop(name, None)
    arguments = {"labels": labels, "logit_lengths": logit_lengths, "label_lengths": label_lengths}
    arguments.update(blank_token_id=config.blank_token_id, reduction=reduction, num_items_in_batch=num_items_in_batch)
    report(f"use_loss({type(model).__name__})", logits)
    if settings["tdt"]:
        durations = list(config.durations)
        return parakeet_tdt_loss(token_logits, duration_logits, durations=durations, **arguments, **options)
    return parakeet_rnnt_loss(logits, **arguments, **options)


def _fused(
    logits: UnformedLogits,
    logit_lengths: Tensor,
    config: Any,
    tdt: bool,
    options: dict[str, Any],
    targets: Tensor,
    target_lengths: Tensor,
    reduction: str,
) -> Tensor:
    activation = ACTIVATIONS[type(logits.head.activation)]

    def loss(encoder: Tensor, decoder: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        labelling = (targets, logit_lengths, target_lengths, config.blank_token_id)
        arguments = {"reduction": reduction, "activation": activation, **options}
        if tdt:
            durations = list(config.durations)
            return tdt_loss_fused_joint(encoder, decoder, weight, bias, *labelling, durations, **arguments)
        return rnnt_loss_fused_joint(encoder, decoder, weight, bias, *labelling, **arguments)

    return logits.head.call(loss, logits.encoder, logits.decoder)


def _frames(encoder_outputs: Any, logits: Tensor | UnformedLogits) -> Tensor:
    """The encoder frames of each sample: all where there was no attention mask."""
    mask = getattr(encoder_outputs, "attention_mask", None)
    if mask is not None:
        return mask.sum(-1)
    hidden = encoder_outputs.pooler_output
    return torch.full((hidden.shape[0],), hidden.shape[1], dtype=torch.int64)


def _label_lengths(labels: Tensor, config: Any) -> Tensor:
    """The labels of each sample up to the last that is not padding: neither -100, nor the blank, nor ``pad_token_id``.

    The Nemotron models do not say what pads their labels. Their pad token is a token like any other inside a sentence, so it
    counts there.
    """
    padding = (labels == _PADDING) | (labels == config.blank_token_id) | (labels == config.pad_token_id)
    positions = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    return torch.where(padding, 0, positions).amax(-1) if labels.shape[1] else positions.new_zeros(len(labels))
