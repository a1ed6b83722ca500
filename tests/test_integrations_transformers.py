"""`use_fused_loss` and `use_loss` on the transducers of transformers: the loss of the logits, whatever `forward` is given."""

import inspect
import warnings

import pytest
import torch
from support.tiny_transducers import (
    BLANK,
    MODELS,
    NEMOTRONS,
    PAD,
    PROMPTS,
    assert_same_gradients,
    loss_and_gradients,
    loss_of_logits,
    make_batch,
    make_transducer,
    output_mask,
)

BOTH = pytest.mark.parametrize("use", ["use_loss", "use_fused_loss"])
EACH = pytest.mark.parametrize("name", MODELS)
NEMOTRON_3_5 = "Nemotron3_5AsrForRNNT"
needs_nemotron = pytest.mark.skipif(NEMOTRON_3_5 not in MODELS, reason="needs a transformers with Nemotron 3.5")


@pytest.fixture(autouse=True)
def no_fallback_unnoticed():
    """A fallback to the dense loss fails the test that does not expect it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*so the loss is computed from")
        yield


def refuse(*args, **kwargs):
    raise AssertionError("the joint network was called")


@BOTH
@EACH
@pytest.mark.parametrize("hidden_act", ["relu", "tanh"])
def test_loss_and_gradients_are_those_of_the_logits(kernel, device, use, name, hidden_act, monkeypatch):
    model, batch = make_transducer(name, hidden_act=hidden_act).to(device), make_batch(name, device=device)
    expected, gradients = loss_of_logits(kernel, model, batch)
    getattr(kernel, use)(model)
    if use == "use_fused_loss":
        monkeypatch.setattr(type(model.joint), "forward", refuse)
    output, ours = loss_and_gradients(model, batch)
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(ours, gradients)
    assert (output.logits is None) == (use == "use_fused_loss")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NEMOTRONS])
def test_parakeets_keep_the_loss_that_they_had(kernel, name):
    """The default reductions are those of the models' own losses."""
    model, batch = make_transducer(name), make_batch(name)
    model.loss_function = kernel.parakeet_tdt_loss if name == "ParakeetForTDT" else kernel.parakeet_rnnt_loss
    expected, gradients = loss_and_gradients(model, batch)
    kernel.use_fused_loss(model)
    output, ours = loss_and_gradients(model, batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_same_gradients(ours, gradients)


@needs_nemotron
@BOTH
def test_prompts_give_their_own_losses(kernel, use):
    model, batch = make_transducer(NEMOTRON_3_5), make_batch(NEMOTRON_3_5)
    prompts = [torch.full((3,), i) for i in range(PROMPTS)] + [torch.tensor([0, 3, 2])]
    expected = [loss_of_logits(kernel, model, batch, prompt_ids=ids) for ids in prompts]
    getattr(kernel, use)(model)
    losses = []
    for ids, (loss, gradients) in zip(prompts, expected):
        output, ours = loss_and_gradients(model, batch, prompt_ids=ids)
        torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=0)
        assert_same_gradients(ours, gradients)
        losses.append(output.loss.item())
    assert len(set(losses)) == len(prompts)


@BOTH
@pytest.mark.parametrize("name", [name for name in MODELS if name in NEMOTRONS])
def test_lookahead_changes_the_loss_as_it_changes_the_logits(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    expected = [loss_of_logits(kernel, model, batch, num_lookahead_tokens=n)[0] for n in (0, 2)]
    getattr(kernel, use)(model)
    losses = [model(**batch, num_lookahead_tokens=n).loss.detach() for n in (0, 2)]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert losses[0] != losses[1]


@BOTH
@EACH
def test_encoder_outputs_and_return_types(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    expected, _ = loss_of_logits(kernel, model, batch)
    features = {key: batch.pop(key) for key in ("input_features", "attention_mask")}
    plain = model(**features, decoder_input_ids=batch["decoder_input_ids"], output_hidden_states=True)
    getattr(kernel, use)(model)
    outputs = model.get_audio_features(**features)
    torch.testing.assert_close(model(**batch, encoder_outputs=outputs).loss, expected, rtol=1e-6, atol=0)

    output = model(**features, **batch, output_hidden_states=True)
    assert len(output.hidden_states) == len(plain.hidden_states) > 0
    torch.testing.assert_close(output.pooler_output, plain.pooler_output)
    values = model(**features, **batch, return_dict=False)
    assert isinstance(values, tuple)
    torch.testing.assert_close(next(x for x in values if x.dim() == 0), expected, rtol=1e-6, atol=0)
    assert all(isinstance(x, torch.Tensor) for x in values if x is not None)


@BOTH
@EACH
def test_labels_by_position(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    names = [p for p in inspect.signature(model.forward).parameters if p != "kwargs"]
    output = model(*[batch.get(p) for p in names[: names.index("labels") + 1]])
    torch.testing.assert_close(output.loss, model(**batch).loss, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("name", [name for name in MODELS if name in NEMOTRONS])
def test_without_attention_mask_every_frame_counts(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    whole = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    expected, _ = loss_of_logits(kernel, model, whole)
    getattr(kernel, use)(model)
    del batch["attention_mask"]
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-5, atol=0)


@BOTH
@EACH
def test_padding_by_minus_100_the_blank_or_the_pad_token(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    expected = model(**batch).loss
    own = BLANK if name == "ParakeetForRNNT" else PAD
    for padding in (-100,) if name not in NEMOTRONS else (-100, BLANK, PAD):
        labels = batch["labels"].masked_fill(batch["labels"] == own, padding)
        assert (labels == padding).any()
        torch.testing.assert_close(model(**{**batch, "labels": labels}).loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if name in NEMOTRONS])
def test_the_pad_token_inside_a_sentence_is_a_label(kernel, name):
    model, batch = make_transducer(name), make_batch(name)
    kernel.use_loss(model, reduction="none")
    batch["labels"][0, 1] = PAD
    losses = model(**batch).loss
    output = model(**{key: value for key, value in batch.items() if key != "labels"})
    frames = output_mask(model, batch)
    expected = kernel.rnnt_loss(output.logits, batch["labels"], frames, torch.tensor([4, 2, 3]), BLANK, "none")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


@BOTH
@EACH
def test_no_labels_at_all(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    batch["labels"], batch["decoder_input_ids"] = batch["labels"][:, :0], batch["decoder_input_ids"][:, :1]
    output, gradients = loss_and_gradients(model, batch)
    assert output.loss.isfinite() and output.loss > 0
    assert gradients["joint.head.bias"].abs().sum() > 0


@BOTH
@EACH
def test_options_and_reductions(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    expected, gradients = loss_of_logits(kernel, model, batch, reduction="sum")
    getattr(kernel, use)(model, reduction="sum", fastemit_lambda=0.5)
    output, ours = loss_and_gradients(model, batch)
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
    assert (ours["joint.head.bias"] - gradients["joint.head.bias"]).norm() > 1e-3 * gradients["joint.head.bias"].norm()
    assert model(**batch).loss.dim() == 0
    getattr(kernel, use)(model, reduction="none")
    assert model(**batch).loss.shape == (3,)
    if name == "ParakeetForTDT":
        getattr(kernel, use)(model, omega=1.0)
        of_omega = model(**batch).loss
        getattr(kernel, use)(model)
        assert of_omega != model(**batch).loss


@BOTH
@EACH
def test_number_of_items_of_accumulated_batches(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    padding = BLANK if name == "ParakeetForRNNT" else PAD
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == padding, -100)
    getattr(kernel, use)(model, reduction="sum")
    total = model(**batch).loss
    getattr(kernel, use)(model, reduction="mean_volume")
    for items in (9, 20, torch.tensor(20)):
        torch.testing.assert_close(model(**batch, num_items_in_batch=items).loss, total / int(items))


@BOTH
def test_unknown_options_and_values_are_refused_when_patching(kernel, use):
    model = make_transducer(MODELS[0])
    patch = getattr(kernel, use)
    with pytest.raises(TypeError, match="unknown option 'omga'; there are reduction, sigma"):
        patch(model, omga=0.5)
    for options, error in (
        ({"omega": 2}, ValueError),
        ({"sigma": "0.1"}, TypeError),
        ({"reduction": "average"}, ValueError),
        ({"return_stats": True}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            patch(model, **options)
    if use == "use_loss":
        with pytest.raises(TypeError, match="max_tile_bytes"):
            patch(model, max_tile_bytes=1)
    else:
        with pytest.raises(ValueError, match="max_tile_bytes must be positive"):
            patch(model, max_tile_bytes=0)
        with pytest.raises(ValueError, match=r"tolerance must be in \[0, 1\], got 2"):
            patch(model, tolerance=2)
    assert "_tdt_loss_settings" not in vars(model)
    rnnt = make_transducer("ParakeetForRNNT")
    with pytest.raises(TypeError, match="unknown option 'omega'"):
        patch(rnnt, omega=0.5)


@BOTH
@EACH
def test_unknown_arguments_of_forward_are_refused(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    with pytest.raises(TypeError, match="unknown argument 'promt_ids'"):
        model(**batch, promt_ids=torch.zeros(3))
    if name != NEMOTRON_3_5:
        with pytest.raises(TypeError, match="unknown argument 'prompt_ids'"):
            model(**batch, prompt_ids=torch.zeros(3))


def test_other_models_are_refused(kernel):
    with pytest.raises(TypeError, match="must be, or hold, one of transformers' ParakeetForTDT, .* got Linear"):
        kernel.use_fused_loss(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got str"):
        kernel.use_loss("nvidia/parakeet-tdt-0.6b-v3")
    with pytest.raises(ValueError, match="must hold one transducer, got 2"):
        kernel.use_loss(torch.nn.ModuleList([make_transducer(MODELS[0]), make_transducer(MODELS[1])]))
    own = type("ParakeetForTDT", (torch.nn.Module,), {})()  # the name alone is not enough
    with pytest.raises(TypeError, match="got ParakeetForTDT"):
        kernel.use_loss(own)


@BOTH
@EACH
def test_without_labels_nothing_changes(kernel, use, name):
    model, batch = make_transducer(name).eval(), make_batch(name)
    del batch["labels"]
    with torch.no_grad():
        before = model(**batch).logits
        getattr(kernel, use)(model)
        torch.testing.assert_close(model(**batch).logits, before, rtol=0, atol=0)


@BOTH
@EACH
def test_generate_and_evaluation(kernel, use, name):
    model, batch = make_transducer(name).eval(), make_batch(name)
    if name == "ParakeetForTDT":
        model.generation_config.suppress_tokens = list(range(model.config.vocab_size, model.config.vocab_size + 4))
    inputs = {"input_features": batch["input_features"][:1], "max_new_tokens": 20}
    before = model.generate(**inputs).sequences
    expected, _ = loss_of_logits(kernel, model, batch)
    getattr(kernel, use)(model)
    assert torch.equal(model.generate(**inputs).sequences, before)
    with torch.no_grad():
        loss = model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert not loss.requires_grad


@BOTH
@EACH
def test_gradient_checkpointing(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    getattr(kernel, use)(model)
    _, gradients = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable()
    _, ours = loss_and_gradients(model, batch)
    assert_same_gradients(ours, gradients)


@BOTH
@EACH
def test_autocast(kernel, use, name):
    model, batch = make_transducer(name), make_batch(name)
    expected, gradients = loss_of_logits(kernel, model, batch)
    getattr(kernel, use)(model)
    own = model.decoder.forward
    # Not every CPU has an LSTM in bfloat16.
    model.decoder.forward = torch.autocast("cpu", enabled=False)(lambda *args, **kwargs: own(*args, **kwargs))
    with torch.autocast("cpu", torch.bfloat16):
        output, ours = loss_and_gradients(model, batch)
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected, rtol=0.02, atol=0)
    head = "joint.head.weight"
    assert (ours[head] - gradients[head]).norm() < 0.1 * gradients[head].norm()


def test_compiled(kernel):
    """Behind the encoder, whose tracing takes most of the time."""
    name = MODELS[0]
    model, batch = make_transducer(name), make_batch(name)
    kernel.use_fused_loss(model)
    features = {key: batch.pop(key) for key in ("input_features", "attention_mask")}
    with torch.no_grad():
        batch["encoder_outputs"] = model.get_audio_features(**features)
    expected, gradients = loss_and_gradients(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    output = compiled(**batch)
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    assert_same_gradients({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, gradients)
    assert output.logits is None


def test_a_subclass_with_a_forward_of_its_own(kernel):
    """What the user's forward adds is kept; the loss under it is ours."""

    class Twice(type(make_transducer(MODELS[0]))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.loss = output.loss * 2
            return output

    plain, batch = make_transducer(MODELS[0]), make_batch(MODELS[0])
    expected, _ = loss_of_logits(kernel, plain, batch)
    model = Twice(plain.config).train()
    model.load_state_dict(plain.state_dict())
    kernel.use_fused_loss(model)
    torch.testing.assert_close(model(**batch).loss, 2 * expected, rtol=1e-6, atol=0)


def test_a_forward_that_computes_with_the_logits_is_an_error(kernel):
    class Scaled(type(make_transducer(MODELS[0]))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            self.joint(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)).float()
            return output

    plain, batch = make_transducer(MODELS[0]), make_batch(MODELS[0])
    model = Scaled(plain.config).train()
    kernel.use_fused_loss(model)
    with pytest.raises(NotImplementedError, match="never computed, but .float .*use_loss"):
        model(**batch)
    kernel.use_loss(model)
    assert model(**batch).loss.isfinite()
