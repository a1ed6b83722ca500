"""`parakeet_tdt_loss` and `parakeet_rnnt_loss`: a Parakeet model of transformers trains with them as its `loss_function`."""

import inspect
from functools import partial

import pytest
import torch
from support.batches import make_batch
from support.calls import transformers_rnnt_loss
from support.example_model import EXAMPLES, make_model, train_parakeet
from support.memory import PaddedSlices
from transformers import ParakeetForRNNT, ParakeetRNNTConfig
from transformers.loss import loss_tdt

loss_rnnt = pytest.importorskip("transformers.loss.loss_rnnt", reason="needs a transformers with the RNN-T loss")

PAD = train_parakeet.PAD


@pytest.fixture(scope="module")
def speech():
    """Three pieces of a recording, 1.2 s and less, and text of different lengths to go with them."""
    waveforms, texts = train_parakeet.load_speech(EXAMPLES / "speech")
    lengths, letters = (19_200, 12_000, 16_000), (9, 3, 6)
    return [waveforms[0][:n] for n in lengths], [text[:n] for text, n in zip(texts, letters)]


@pytest.fixture(scope="module")
def vocabulary(speech):
    return train_parakeet.Vocabulary.of(speech[1])


@pytest.fixture(scope="module")
def batch(speech, vocabulary):
    return train_parakeet.make_batch(*speech, vocabulary)


@pytest.fixture
def tdt_model(vocabulary):
    return make_model(vocabulary)


@pytest.fixture
def rnnt_model(tdt_model):
    fields = ("vocab_size", "decoder_hidden_size", "num_decoder_layers", "encoder_config", "blank_token_id")
    config = ParakeetRNNTConfig(**{name: getattr(tdt_model.config, name) for name in fields}, pad_token_id=PAD)
    torch.manual_seed(0)
    return ParakeetForRNNT(config).train()


@pytest.fixture
def rnnt_batch(batch, vocabulary):
    labels = batch["labels"].masked_fill(batch["labels"] == PAD, vocabulary.blank)  # how this model marks padding
    return {**batch, "labels": labels}


def loss_and_gradients(model, batch, loss_function=None, **kwargs):
    if loss_function is not None:
        model.loss_function = loss_function
    model.zero_grad(set_to_none=True)
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, theirs):
    (our_loss, our_gradients), (their_loss, their_gradients) = ours, theirs
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-6, atol=0)
    total = torch.stack([gradient.norm() for gradient in their_gradients.values()]).norm()
    for name, gradient in their_gradients.items():
        error = (our_gradients[name] - gradient).norm()
        # What the softmax or the batch norm behind it cancels has gradient 0, but for rounding.
        cancelled = name.endswith(("k_proj.bias", "depthwise_conv.bias"))
        assert error <= (1e-6 * total if cancelled else 1e-5 * gradient.norm()), name


def plain_rnnt_loss(logits, labels, logit_lengths, label_lengths, blank_token_id, **kwargs):
    """RNN-T node by node in torch, for its gradient by autograd; "mean_volume", the model's default."""
    log_probs, losses = logits.double().log_softmax(-1), []
    for lp, y, T, U in zip(log_probs, labels, logit_lengths.tolist(), label_lengths.tolist()):
        alpha = {(0, 0): lp.new_zeros(())}
        for t in range(T):
            for u in range(U + 1):
                ways = []
                if t > 0:
                    ways.append(alpha[t - 1, u] + lp[t - 1, u, blank_token_id])
                if u > 0:
                    ways.append(alpha[t, u - 1] + lp[t, u - 1, y[u - 1]])
                if ways:
                    alpha[t, u] = torch.stack(ways).logsumexp(0)
        losses.append(-(alpha[T - 1, U] + lp[T - 1, U, blank_token_id]))
    return (torch.stack(losses).sum() / label_lengths.sum()).float()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("parakeet_tdt_loss", loss_tdt.ParakeetForTDTLoss),
        ("parakeet_rnnt_loss", loss_rnnt.ParakeetForRNNTLoss),
    ],
)
def test_arguments_are_those_of_transformers(kernel, ours, theirs):
    their_parameters = list(inspect.signature(theirs).parameters.values())
    our_parameters = list(inspect.signature(getattr(kernel, ours)).parameters.values())
    named = len(their_parameters) - 1
    assert [(p.name, p.default) for p in our_parameters[:named]] == [
        (p.name, p.default) for p in their_parameters[:named]
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in our_parameters[named:-1])
    assert our_parameters[-1].kind is their_parameters[-1].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.kernels_ci
def test_tdt_loss_and_gradients_of_the_model(kernel, tdt_model, batch):
    theirs = loss_and_gradients(tdt_model, batch)
    assert_same(loss_and_gradients(tdt_model, batch, kernel.parakeet_tdt_loss), theirs)


def test_rnnt_loss_and_gradients_of_the_model(kernel, rnnt_model, rnnt_batch):
    theirs = loss_and_gradients(rnnt_model, rnnt_batch, plain_rnnt_loss)
    assert_same(loss_and_gradients(rnnt_model, rnnt_batch, kernel.parakeet_rnnt_loss), theirs)


def test_rnnt_loss_and_gradients_of_transformers(kernel, rnnt_model, rnnt_batch):
    transformers_rnnt_loss()  # skips where it cannot run
    theirs = loss_and_gradients(rnnt_model, rnnt_batch)
    assert_same(loss_and_gradients(rnnt_model, rnnt_batch, kernel.parakeet_rnnt_loss), theirs)


def test_one_gradient_for_both_logits(kernel, tdt_model, batch, device):
    """The joint network's output gets its gradient from the loss, not from two tensors of zeros around the slices' gradients."""
    tdt_model.to(device)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    features = tdt_model.get_audio_features(inputs["input_features"], inputs["attention_mask"])
    features.pooler_output = features.pooler_output.detach()  # the encoder has slices of its own
    padded, grads = [], []
    for loss_function in (loss_tdt.ParakeetForTDTLoss, kernel.parakeet_tdt_loss):
        tdt_model.loss_function = loss_function
        labels = {name: inputs[name] for name in ("decoder_input_ids", "labels")}
        tdt_model.zero_grad()
        loss = tdt_model(encoder_outputs=features, **labels).loss
        with PaddedSlices() as mode:
            loss.backward()
        padded.append(mode.count)
        grads.append(tdt_model.joint.head.weight.grad)
    assert padded[0] >= 2 and padded[1] == 0
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_what_else_the_model_is_given_is_ignored(kernel, tdt_model, batch):
    tdt_model.loss_function = kernel.parakeet_tdt_loss
    plain = tdt_model(**batch).loss
    assert torch.equal(tdt_model(**batch, output_hidden_states=True, num_items_in_batch=7).loss, plain)


def test_a_misspelt_option_is_an_error(kernel, device):
    """It must not pass for a keyword of the model's forward pass."""
    losses, labels, lengths = calls(kernel, device)
    for loss, name in zip(losses, ("parakeet_tdt_loss", "parakeet_rnnt_loss")):
        for keyword in ("fast_emit_lambda", "reductions", "inplace_grad", "use_caches"):
            with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{keyword}'"):
                loss(labels, label_lengths=lengths, **{keyword: 0.1})


def test_reduction_and_options(kernel, tdt_model, rnnt_model, batch, rnnt_batch):
    tdt_model.loss_function = partial(kernel.parakeet_tdt_loss, reduction="sum", sigma=0.1, omega=0.5)
    output = tdt_model(**batch)
    lengths = (batch["labels"] != PAD).sum(-1)
    T = tdt_model.get_audio_features(batch["input_features"], batch["attention_mask"]).attention_mask.sum(-1)
    config = tdt_model.config
    expected = kernel.tdt_loss_joint(
        output.logits, batch["labels"], T, lengths, config.blank_token_id, config.durations, 0.1, "sum", omega=0.5
    )
    torch.testing.assert_close(output.loss, expected)

    rnnt_model.loss_function = partial(kernel.parakeet_rnnt_loss, reduction="none", delay_penalty=0.01)
    output = rnnt_model(**rnnt_batch)
    expected = kernel.rnnt_loss(
        output.logits, rnnt_batch["labels"], T, lengths, config.blank_token_id, "none", delay_penalty=0.01
    )
    torch.testing.assert_close(output.loss, expected)


def test_labels_padded_with_minus_100(kernel, tdt_model, rnnt_model, batch, rnnt_batch):
    for model, model_batch, loss, padding in (
        (tdt_model, batch, kernel.parakeet_tdt_loss, PAD),
        (rnnt_model, rnnt_batch, kernel.parakeet_rnnt_loss, rnnt_model.config.blank_token_id),
    ):
        expected = loss_and_gradients(model, model_batch, loss)
        labels = model_batch["labels"].masked_fill(model_batch["labels"] == padding, -100)
        assert (labels == -100).any()
        actual = loss_and_gradients(model, {**model_batch, "labels": labels})
        assert torch.equal(actual[0], expected[0])
        assert_same(actual, expected)


def calls(kernel, device):
    """Both losses as functions of (labels, label_lengths, ...), and labels padded with -100 beside their lengths."""
    batch = make_batch(B=3, T=7, U=4, V=9, blank=8, target_lengths=[4, 2, 3], device=device)
    labels, lengths = batch.targets, batch.target_lengths
    labels = labels.masked_fill(torch.arange(4, device=device) >= lengths.unsqueeze(1), -100)
    shared = {"logit_lengths": batch.logit_lengths, "blank_token_id": 8}
    tdt = partial(kernel.parakeet_tdt_loss, batch.token_logits, batch.duration_logits, **shared)
    rnnt = partial(kernel.parakeet_rnnt_loss, batch.token_logits, **shared)
    return [partial(tdt, durations=list(batch.durations)), rnnt], labels, lengths


def test_mean_volume_over_all_batches_of_a_step(kernel, device):
    losses, labels, lengths = calls(kernel, device)
    for loss in losses:
        total = loss(labels, label_lengths=lengths, reduction="sum")
        for items in (9, 20, torch.tensor(20, device=device), torch.tensor([[20]], device=device)):
            actual = loss(labels, label_lengths=lengths, reduction="mean_volume", num_items_in_batch=items)
            torch.testing.assert_close(actual, total / int(items))


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "sum", "none"])
def test_other_reductions_have_no_use_for_the_number_of_items(kernel, device, reduction):
    losses, labels, lengths = calls(kernel, device)
    for loss in losses:
        loss = partial(loss, labels, label_lengths=lengths, reduction=reduction)
        assert torch.equal(loss(num_items_in_batch=20), loss())


def test_padding_that_the_number_of_items_counts(kernel, device):
    """Known, and left out, where one batch is all there is; an error where other batches have some as well."""
    losses, labels, lengths = calls(kernel, device)
    padded = labels.masked_fill(labels == -100, 0)
    for loss in losses:
        loss = partial(loss, label_lengths=lengths, reduction="mean_volume")
        torch.testing.assert_close(loss(padded, num_items_in_batch=12), loss(labels))
        with pytest.raises(ValueError, match=r"padded with -100 .* \(24\) .* got 12 of these for 9 labels"):
            loss(padded, num_items_in_batch=24)


def test_no_labels_at_all(kernel, tdt_model, rnnt_model, batch):
    """The models then squeeze the label positions away."""
    silent = {**batch, "labels": batch["labels"][:, :0], "decoder_input_ids": batch["decoder_input_ids"][:, :1]}
    for model, loss in ((tdt_model, kernel.parakeet_tdt_loss), (rnnt_model, kernel.parakeet_rnnt_loss)):
        model.loss_function = loss
        for items in ({}, {"num_items_in_batch": 0}):
            output = model(**silent, **items)
            assert output.loss.isfinite() and output.loss > 0
            output.loss.backward()


def test_compiled(kernel, device):
    losses, labels, lengths = calls(kernel, device)
    items = torch.tensor(20, device=device)
    for loss in losses:
        loss = partial(loss, labels, label_lengths=lengths, reduction="mean_volume", num_items_in_batch=items)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(), loss())
