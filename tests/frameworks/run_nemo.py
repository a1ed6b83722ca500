"""NeMo: three kinds of transducer models beside NeMo's own losses, then one trained on five recordings by Lightning."""

import warnings

import lightning.pytorch as pl
import nemo
import torch
from nemo.collections.asr.losses.rnnt import resolve_rnnt_loss
from nemo.collections.asr.models import EncDecHybridRNNTCTCModel, EncDecRNNTModel
from nemo.utils import logging
from omegaconf import OmegaConf
from speech import Run, gradient_error, gradients_of, kernel, load_speech, padded, relative, word_errors

logging.setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
DURATIONS = [0, 1, 2, 3, 4]
if not torch.cuda.is_available():  # NeMo's TDT loss in PyTorch moves a tensor to a GPU that it otherwise has no need of
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor


def config(labels, loss, *, fuse=False, hybrid=False, activation="relu"):
    tdt = loss.startswith("tdt")
    hidden = 64
    joint = {"joint_hidden": hidden, "activation": activation, "dropout": 0.0}
    cfg = {
        "sample_rate": 16000,
        "labels": labels,
        "rnnt_reduction": "mean_volume",
        "model_defaults": {"enc_hidden": 96, "pred_hidden": hidden, "joint_hidden": hidden},
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 40,
            "n_fft": 512,
            "dither": 0.0,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_in": 40,
            "feat_out": -1,
            "n_layers": 2,
            "d_model": 96,
            "subsampling": "striding",
            "subsampling_factor": 4,
            "subsampling_conv_channels": 32,
            "ff_expansion_factor": 2,
            "self_attention_model": "rel_pos",
            "n_heads": 4,
            "conv_kernel_size": 9,
            "conv_norm_type": "layer_norm",
            "dropout": 0.0,
            "dropout_pre_encoder": 0.0,
            "dropout_emb": 0.0,
            "dropout_att": 0.0,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {"pred_hidden": hidden, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.0},
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": fuse,
            "fused_batch_size": 2 if fuse else -1,
            "jointnet": joint,
            **({"num_extra_outputs": len(DURATIONS)} if tdt else {}),
        },
        "decoding": {
            "strategy": "greedy",
            "greedy": {"max_symbols": 100},  # what is learnt by heart comes all at once
            **({"model_type": "tdt", "durations": DURATIONS} if tdt else {}),
        },
        "loss": {"loss_name": loss, f"{loss}_kwargs": {"durations": DURATIONS, "sigma": 0.02} if tdt else {}},
        "optim": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.0},
    }
    if tdt:
        cfg["model_defaults"]["tdt_durations"] = DURATIONS
    if hybrid:
        cfg["aux_ctc"] = {
            "ctc_loss_weight": 0.3,
            "use_cer": False,
            "ctc_reduction": "mean_batch",
            "decoder": {
                "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
                "feat_in": 96,
                "num_classes": len(labels),
                "vocabulary": labels,
            },
            "decoding": {"strategy": "greedy"},
        }
    return OmegaConf.create(cfg)


def make_model(labels, loss, *, hybrid=False, **options):
    torch.manual_seed(0)
    cls = EncDecHybridRNNTCTCModel if hybrid else EncDecRNNTModel
    model = cls(cfg=config(labels, loss, hybrid=hybrid, **options)).train()
    # NeMo's losses in Numba need a GPU, those in PyTorch do not; by the name of the latter NeMo would give TDT a wrong blank.
    kwargs = {"durations": DURATIONS, "sigma": 0.02} if loss == "tdt" else None
    model.loss._loss = resolve_rnnt_loss("tdt_pytorch" if loss == "tdt" else "pytorch", len(labels), kwargs)
    return model


def loss_of(model, batch):
    """As `training_step` computes it."""
    signal, signal_length, transcript, transcript_length = batch
    encoded, encoded_length = model.forward(input_signal=signal, input_signal_length=signal_length)
    decoded, target_length, _ = model.decoder(targets=transcript, target_length=transcript_length)
    if not model.joint.fuse_loss_wer:
        joint = model.joint(encoder_outputs=encoded, decoder_outputs=decoded)
        loss = model.loss(
            log_probs=joint, targets=transcript, input_lengths=encoded_length, target_lengths=target_length
        )
    else:
        loss, *_ = model.joint(
            encoder_outputs=encoded,
            decoder_outputs=decoded,
            encoder_lengths=encoded_length,
            transcripts=transcript,
            transcript_lengths=transcript_length,
            compute_wer=True,
        )
    return loss


def step(model, batch):
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients_of(model)


def compare(run, what, model, batch, k):
    theirs, gradients = step(model, batch)
    for use in ("use_loss", "use_fused_loss"):
        getattr(k, use)(model)
        ours, our_gradients = step(model, batch)
        run.expect(f"{what}, {use}: loss, relative", relative(ours, theirs), 1e-6)
        run.expect(f"{what}, {use}: gradients, relative", gradient_error(our_gradients, gradients), 1e-4)
    k.restore_loss(model)
    back, _ = step(model, batch)
    run.expect(f"{what}, restored: loss, relative", relative(back, theirs), 0.0)


def main():
    run, k = Run(), kernel()
    run.note("version", nemo.__version__)
    waveforms, texts = load_speech()
    labels = sorted(set("".join(texts)))
    signal, signal_length = padded(waveforms)
    transcript, transcript_length = padded([[labels.index(c) for c in text] for text in texts])
    batch = (signal, signal_length, transcript, transcript_length)
    short = (signal[:2, :24000], torch.tensor([24000, 20000]), transcript[:2, :12], torch.tensor([12, 9]))

    for what, loss, options in (
        ("TDT", "tdt", {}),
        ("TDT, tanh", "tdt", {"activation": "tanh"}),
        ("TDT, fuse_loss_wer", "tdt", {"fuse": True}),
        ("RNN-T", "warprnnt_numba", {}),
        ("hybrid with CTC", "tdt", {"hybrid": True}),
    ):
        compare(run, what, make_model(labels, loss, **options), short, k)

    # The blank moves with the vocabulary; NeMo itself puts another loss there.
    for use in ("use_loss", "use_fused_loss"):
        model = make_model(labels, "tdt")
        getattr(k, use)(model)
        changed = labels + ["#", "%"]
        model.change_vocabulary(new_vocabulary=changed)
        reference = make_model(changed, "tdt")
        reference.load_state_dict(model.state_dict())
        loss = relative(step(model, short)[0], step(reference, short)[0])
        run.expect(f"after change_vocabulary, {use}: loss, relative", loss, 1e-6)

    # Not every CPU has an LSTM in bfloat16 in oneDNN.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        model = make_model(labels, "tdt")
        theirs = loss_of(model, short)
        for use in ("use_loss", "use_fused_loss"):
            getattr(k, use)(model)
            run.expect(f"bfloat16 autocast, {use}: loss, relative", relative(loss_of(model, short), theirs), 1e-2)

    trainer_options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = pl.Trainer(max_steps=300, enable_model_summary=False, **trainer_options)
    model = make_model(labels, "tdt", fuse=True)
    k.use_fused_loss(model)
    model.set_trainer(trainer)
    model.setup_optimization(model.cfg.optim)
    first = float(loss_of(model, batch))
    trainer.fit(model, torch.utils.data.DataLoader([batch] * 300, batch_size=None))
    model.eval()
    with torch.no_grad():
        encoded, lengths = model.forward(input_signal=signal, input_signal_length=signal_length)
        # Not the hypotheses' text: for characters and TDT, NeMo 3.0.0 leaves the last len(durations) of the vocabulary out of it.
        found = model.decoding.rnnt_decoder_predictions_tensor(encoded, lengths)
        heard = ["".join(labels[int(i)] for i in hypothesis.y_sequence) for hypothesis in found]
    run.note("training: loss before and after", [round(first, 4), round(float(loss_of(model, batch)), 6)])
    run.note("training: steps", trainer.global_step)
    run.expect("training with use_fused_loss: word error rate", word_errors(texts, heard), 0.0)
    run.note("paths", k.info()["ran"])
    run.finish()


if __name__ == "__main__":
    main()
