"""transformers: Parakeet-TDT beside its own loss, and a small Nemotron 3.5 with two prompts, trained with `use_fused_loss`."""

import inspect
import logging
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
from speech import Run, gradient_error, gradients_of, kernel, load_speech, relative, word_errors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_parakeet

logging.disable(logging.WARNING)
STEPS = 600  # at most, of Nemotron's training


def step(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def make_nemotron(vocabulary):
    """A Nemotron 3.5 of the size of the training example, without dropout."""
    encoder = transformers.NemotronAsrStreamingEncoderConfig(
        hidden_size=144,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=576,
        subsampling_conv_channels=32,
        dropout=0.0,
        layerdrop=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        default_num_lookahead_tokens=6,
    )
    torch.manual_seed(0)
    config = transformers.Nemotron3_5AsrConfig(
        vocab_size=vocabulary.size,
        decoder_hidden_size=128,
        num_decoder_layers=1,
        max_symbols_per_step=100,  # what is learnt by heart comes all at once
        encoder_config=encoder,
        pad_token_id=train_parakeet.PAD,
        blank_token_id=vocabulary.blank,
        decoder_start_token_id=vocabulary.blank,
        num_prompts=4,
        prompt_intermediate_size=128,
        default_prompt_id=0,
    )
    model = transformers.Nemotron3_5AsrForRNNT(config)
    with (
        torch.no_grad()
    ):  # from the small initial weights of so narrow layers the audio hardly reaches the joint network
        for layer in (model.prompt_projector.linear_1, model.prompt_projector.linear_2, model.encoder_projector):
            layer.weight.mul_(5)
    return model


def hooks_for_the_loss():
    """Where the sources of transformers speak of this loss in the same breath as of kernels."""
    root = Path(transformers.__file__).parent
    found = re.findall(r".*(?:tdt|rnnt)[-_]?loss.*", (root / "integrations" / "hub_kernels.py").read_text(), re.I)
    for name in ("loss_tdt.py", "loss_rnnt.py"):
        path = root / "loss" / name
        if path.is_file():
            found += re.findall(r".*kernel.*", path.read_text())
    return found


def main():
    run, k = Run(), kernel()
    run.note("version", transformers.__version__)
    run.expect("hooks for kernels on the losses of transformers", len(hooks_for_the_loss()), 0)
    waveforms, texts = load_speech()
    vocabulary = train_parakeet.Vocabulary.of(texts)
    batch = train_parakeet.make_batch(waveforms, texts, vocabulary)

    short = train_parakeet.make_batch([w[:24000] for w in waveforms[:2]], [t[:12] for t in texts[:2]], vocabulary)
    torch.manual_seed(0)
    parakeet = train_parakeet.build_model(vocabulary).train()
    theirs, gradients = step(parakeet, short)
    for use in (k.use_loss, k.use_fused_loss):
        use(parakeet)
        ours, our_gradients = step(parakeet, short)
        run.expect(f"ParakeetForTDT, {use.__name__}: loss, relative", relative(ours, theirs), 1e-6)
        run.expect(
            f"ParakeetForTDT, {use.__name__}: gradients, relative", gradient_error(our_gradients, gradients), 1e-4
        )

    model = make_nemotron(vocabulary).train()
    accepted = "prompt_ids" in inspect.signature(model.forward).parameters
    run.note("Nemotron3_5AsrForRNNT takes prompts", accepted)
    prompts = torch.tensor([1, 2, 1, 2, 1])
    k.use_fused_loss(model)
    losses = []
    with torch.no_grad():
        for prompt in (1, 2):
            ids = torch.full((2,), prompt)
            losses.append(model(**short, prompt_ids=ids).loss.item())
            inputs = {key: value for key, value in short.items() if key != "labels"}
            logits = model(**inputs, prompt_ids=ids).logits
            frames = model.get_audio_features(short["input_features"], short["attention_mask"], prompt_ids=ids)
            lengths = (short["labels"] != train_parakeet.PAD).sum(-1)
            expected = k.rnnt_loss(logits, short["labels"], frames.attention_mask.sum(-1), lengths, vocabulary.blank)
            run.expect(
                f"Nemotron 3.5, prompt {prompt}: loss, relative, to rnnt_loss of the logits",
                relative(losses[-1], expected),
                1e-6,
            )
    run.note("Nemotron 3.5: losses of two prompts", losses)
    run.expect("Nemotron 3.5: prompts with the same loss", int(losses[0] == losses[1]), 0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # at 3e-3 the encoder stops hearing
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 10, 1.0, 2 * (STEPS - i) / STEPS))
    steps, history = 0, []
    while steps < STEPS and (not history or history[-1] > 0.003):
        # Each recording with either prompt in turn, or the prompts alone would tell most recordings apart.
        loss = model(**batch, prompt_ids=prompts if steps % 2 else 3 - prompts).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(loss.item())
        steps += 1
    model.eval()
    heard = []
    with torch.no_grad():
        for ids in (prompts, 3 - prompts):
            for row, mask, prompt in zip(batch["input_features"], batch["attention_mask"], ids):
                inputs = {"input_features": row[mask][None], "attention_mask": mask[mask][None]}
                output = model.generate(**inputs, prompt_ids=prompt[None], max_new_tokens=4 * int(mask.sum()))
                heard.append(vocabulary.decode(output.sequences[0].tolist()))
    run.note("Nemotron 3.5, training: loss before and after", [round(history[0], 4), round(history[-1], 6)])
    run.note("Nemotron 3.5, training: steps", steps)
    run.expect("Nemotron 3.5, trained with use_fused_loss: word error rate", word_errors(texts * 2, heard), 0.0)
    run.note("paths", k.info()["ran"])
    run.finish()


if __name__ == "__main__":
    main()
