"""Train transformers' Parakeet without the logits of its joint network, the largest tensor of a training step.

    from fused_parakeet import use_fused_loss

    model = ParakeetForTDT.from_pretrained("nvidia/parakeet-tdt-0.6b-v3")
    use_fused_loss(model, get_kernel("kernels-community/tdt-loss", version=1))
    model(**batch).loss.backward()  # same loss, same gradients, no (B, T, U + 1, V + D) logits

`ParakeetForTDT` and `ParakeetForRNNT` compute `joint.head(joint.activation(encoder + decoder))` at every node of the
lattice and hand the result to their `loss_function`. Here the loss takes the head's weights and what goes in instead.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from transformers import ParakeetForRNNT, ParakeetForTDT
from transformers.models.parakeet.modeling_parakeet import ParakeetRNNTOutput


def fused_loss(
    model: ParakeetForRNNT,  # or ParakeetForTDT, which is one
    kernel: ModuleType,
    encoder_states: torch.Tensor,  # (B, T, H), the encoder's pooler_output
    decoder_states: torch.Tensor,  # (B, U + 1, H)
    logit_lengths: torch.Tensor,  # (B,)
    labels: torch.Tensor,  # (B, U), padded as the model pads or with -100
    num_items_in_batch: torch.Tensor | int | None = None,  # what the Trainer counted: the labels of accumulated batches
    **options: object,
) -> torch.Tensor:
    """The loss that the model's own `forward` gives, with its defaults; options as `tdt_loss_fused_joint` takes them.

    `num_items_in_batch` counts with `reduction="mean_volume"`, as in `parakeet_tdt_loss`: pad with -100 then.
    """
    config, head, tdt = model.config, model.joint.head, isinstance(model, ParakeetForTDT)
    inputs = (encoder_states, decoder_states, head.weight, head.bias)
    options.setdefault("activation", config.hidden_act)
    reduction = options.pop("reduction", "mean" if tdt else "mean_volume")

    def loss(targets: torch.Tensor, target_lengths: torch.Tensor, reduction: str) -> torch.Tensor:
        labelling = (targets, logit_lengths, target_lengths, config.blank_token_id)
        if tdt:
            durations = list(config.durations)
            return kernel.tdt_loss_fused_joint(*inputs, *labelling, durations, reduction=reduction, **options)
        return kernel.rnnt_loss_fused_joint(*inputs, *labelling, reduction=reduction, **options)

    label_lengths = (labels != (config.pad_token_id if tdt else config.blank_token_id)).sum(-1)
    return kernel.transformers_loss.reduce_accumulated(loss, labels, label_lengths, reduction, num_items_in_batch)


def use_fused_loss(model: ParakeetForRNNT, kernel: ModuleType, **options: object) -> None:
    """Let `model(..., labels=...)` compute its loss without logits: `output.logits` is None then.

    Without labels, as in `generate`, nothing changes. `options`, such as `occupancy_threshold`, go to every call of the loss.
    """
    own_forward = model.forward

    @functools.wraps(own_forward)  # the Trainer looks at the names of the arguments
    def forward(
        input_features=None,
        attention_mask=None,
        decoder_input_ids=None,
        *args,
        labels=None,
        encoder_outputs=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        if labels is None:
            return own_forward(
                input_features, attention_mask, decoder_input_ids, *args, encoder_outputs=encoder_outputs, **kwargs
            )
        if encoder_outputs is None:
            encoder_outputs = model.get_audio_features(input_features, attention_mask)
        decoder_states = model.decoder(decoder_input_ids)
        logit_lengths = encoder_outputs.attention_mask.sum(-1)
        states = (encoder_outputs.pooler_output, decoder_states)
        loss = fused_loss(model, kernel, *states, logit_lengths, labels, num_items_in_batch, **options)
        return ParakeetRNNTOutput(
            loss=loss,
            last_hidden_state=encoder_outputs.last_hidden_state,
            pooler_output=encoder_outputs.pooler_output,
            hidden_states=encoder_outputs.hidden_states,
            attentions=encoder_outputs.attentions,
        )

    model.forward = forward
