"""The transducers of transformers with a handful of weights and a batch to go with them: what the tests of the integrations share."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

V, PAD, BLANK, DURATIONS = 13, 0, 12, [0, 1, 2, 3]
PARAKEETS = ("ParakeetForTDT", "ParakeetForRNNT")
NEMOTRONS = ("NemotronAsrStreamingForRNNT", "Nemotron3_5AsrForRNNT")
MODELS = tuple(name for name in PARAKEETS + NEMOTRONS if hasattr(transformers, name))
PROMPTS = 4

_ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "subsampling_conv_channels": 4,
    "num_mel_bins": 16,
    "initializer_range": 0.2,
    "dropout": 0.0,
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
}


def make_transducer(name, *, hidden_act="relu", seed=0, **changes):
    """A model in training, the same weights every time; in evaluation where batch norm would couple the samples is up to the test."""
    shared = {"vocab_size": V, "decoder_hidden_size": 16, "num_decoder_layers": 1, "hidden_act": hidden_act}
    shared.update(pad_token_id=PAD, blank_token_id=BLANK, decoder_start_token_id=BLANK, **changes)
    if name in PARAKEETS:
        config = getattr(
            transformers, name.replace("For", "").replace("RNNT", "RNNTConfig").replace("TDT", "TDTConfig")
        )
        shared["encoder_config"] = transformers.ParakeetEncoderConfig(**_ENCODER)
        if name == "ParakeetForTDT":
            shared["durations"] = list(DURATIONS)
    else:
        config = getattr(transformers, name.replace("ForRNNT", "Config"))
        streaming = {"sliding_window": 5, "default_num_lookahead_tokens": 2}
        shared["encoder_config"] = transformers.NemotronAsrStreamingEncoderConfig(**_ENCODER, **streaming)
        if name == "Nemotron3_5AsrForRNNT":
            shared.update(num_prompts=PROMPTS, prompt_intermediate_size=16, default_prompt_id=1)
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config(**shared)).train()
    with torch.no_grad():  # large enough that every argument shows in the loss
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and not key.startswith("encoder."):
                parameter.mul_(5)
    return model


def make_batch(name, *, B=3, frames=88, U=4, device="cpu"):
    """Arguments of `forward`: labels padded as the model pads them."""
    generator = torch.Generator().manual_seed(1)
    lengths, sizes = torch.tensor([frames, frames - 16, frames - 40][:B]), [U, 2, 3][:B]
    labels = torch.randint(1, BLANK, (B, U), generator=generator)
    inside = torch.arange(U) < torch.tensor(sizes)[:, None]
    padding = BLANK if name == "ParakeetForRNNT" else PAD
    batch = {
        "input_features": torch.randn(B, frames, _ENCODER["num_mel_bins"], generator=generator),
        "attention_mask": torch.arange(frames) < lengths[:, None],
        "labels": torch.where(inside, labels, padding),
        "decoder_input_ids": torch.nn.functional.pad(torch.where(inside, labels, PAD), (1, 0), value=BLANK),
    }
    return {key: value.to(device) for key, value in batch.items()}


def loss_and_gradients(model, batch, **kwargs):
    """The output, and what its loss leaves at the parameters that have a gradient."""
    model.zero_grad(set_to_none=True)
    output = model(**batch, **kwargs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of_logits(kernel, model, batch, reduction=None, **kwargs):
    """The loss by the functions of the package, of the logits that the unpatched model gives, and its gradients."""
    model.zero_grad(set_to_none=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs, **kwargs)
    labels, tdt = batch["labels"], hasattr(model.config, "durations")
    mask = output_mask(model, batch)
    lengths = ((labels != PAD) & (labels != BLANK) & (labels != -100)).sum(-1)
    if tdt:
        labelling = (labels, mask, lengths, BLANK, list(model.config.durations))
        loss = kernel.tdt_loss_joint(output.logits, *labelling, reduction=reduction or "mean")
    else:
        loss = kernel.rnnt_loss(output.logits, labels, mask, lengths, BLANK, reduction or "mean_volume")
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def output_mask(model, batch):
    """The encoder frames of each sample."""
    with torch.no_grad():
        was_training = model.training
        model.eval()
        outputs = model.get_audio_features(batch["input_features"], batch["attention_mask"])
        model.train(was_training)
    return outputs.attention_mask.sum(-1)


def assert_same_gradients(ours, theirs, rounding=1e-6):
    assert ours.keys() == theirs.keys()
    total = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm()
    for name, gradient in theirs.items():
        error = (ours[name].double() - gradient.double()).norm()
        assert error <= 1e-5 * gradient.double().norm() + rounding * total, name
