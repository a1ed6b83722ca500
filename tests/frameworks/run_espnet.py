"""ESPnet: an ASR model with its transducer decoder, its loss from `integrations.espnet.install`, trained on five recordings.

The package that ESPnet asks for, warprnnt_pytorch, has to be compiled; ESPnet's own loss in Numba stands beside ours.
"""

import espnet
import torch
from speech import (
    Run,
    gradient_error,
    gradients_of,
    greedy,
    kernel,
    load_speech,
    log_mel,
    padded,
    relative,
    train_and_transcribe,
)

k = kernel()
k.integrations.espnet.install()

from espnet2.asr.ctc import CTC  # noqa: E402
from espnet2.asr.decoder.transducer_decoder import TransducerDecoder  # noqa: E402
from espnet2.asr.encoder.rnn_encoder import RNNEncoder  # noqa: E402
from espnet2.asr.espnet_model import ESPnetASRModel  # noqa: E402
from espnet2.asr.transducer.rnnt_multi_blank.rnnt_multi_blank import RNNTLossNumba  # noqa: E402
from espnet2.asr_transducer.joint_network import JointNetwork  # noqa: E402


def make_model(tokens):
    torch.manual_seed(0)
    encoder = RNNEncoder(320, num_layers=1, hidden_size=96, output_size=96, dropout=0.0, subsample=None)
    decoder = TransducerDecoder(len(tokens), hidden_size=96, dropout=0.0, dropout_embed=0.0)
    joint = JointNetwork(len(tokens), 96, 96, joint_space_size=96)
    return ESPnetASRModel(
        vocab_size=len(tokens),
        token_list=tokens,
        frontend=None,
        specaug=None,
        normalize=None,
        preencoder=None,
        encoder=encoder,
        postencoder=None,
        decoder=decoder,
        ctc=CTC(len(tokens), 96),
        joint_network=joint,
        ctc_weight=0.0,
        report_cer=False,
        report_wer=False,
        extract_feats_in_collect_stats=False,
    ).train()


def main():
    run = Run()
    run.note("version", espnet.__version__)
    # The longest first, as ESPnet's loader sorts them.
    waveforms, texts = zip(*sorted(zip(*load_speech()), key=lambda pair: -len(pair[0])))
    characters = sorted(set("".join(texts)))
    tokens = ["<blank>", "<unk>", *characters, "<sos/eos>"]
    features, lengths = padded(log_mel(waveforms, stack=8))
    labels, sizes = padded([[tokens.index(c) for c in text] for text in texts], value=-1)
    batch = {"speech": features, "speech_lengths": lengths, "text": labels, "text_lengths": sizes}
    model = make_model(tokens)
    run.note("loss", f"{type(model.criterion_transducer).__module__}.{type(model.criterion_transducer).__name__}")

    def step():
        model.zero_grad(set_to_none=True)
        loss, *_ = model(**batch)
        loss.backward()
        return loss.item(), gradients_of(model)

    ours = step()
    own = model.criterion_transducer
    model.criterion_transducer = RNNTLossNumba(blank=0)
    theirs = step()
    model.criterion_transducer = own
    run.expect("loss, relative, to ESPnet's in Numba", relative(ours[0], theirs[0]), 1e-6)
    run.expect("gradients, relative", gradient_error(ours[1], theirs[1]), 1e-4)

    def decode(tokens_so_far):
        return model.decoder(torch.tensor([[0, *tokens_so_far]]))[0, -1]

    def score(frame, state):
        return model.joint_network(frame[None, None, None], state[None, None, None])[0, 0, 0]

    def read():
        encoded = [model.encode(row[None, :length], length[None])[0][0] for row, length in zip(features, lengths)]
        return ["".join(tokens[i] for i in greedy(row, decode, score, 0)) for row in encoded]

    train_and_transcribe(run, model, lambda: model(**batch)[0], read, texts, enough=0.05)
    run.finish()


if __name__ == "__main__":
    main()
