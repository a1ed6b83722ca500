"""SpeechBrain: its layers and transducer joint, trained on five recordings with `integrations.speechbrain.transducer_loss`.

SpeechBrain's own loss is a kernel in Numba for CUDA. Numba's simulator runs it on the CPU, on a small batch; it is slow.
"""

import os

os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # read when numba is imported

import speechbrain
import torch
from speech import Run, gradient_error, greedy, kernel, load_speech, log_mel, padded, relative, train_and_transcribe
from speechbrain.nnet.embedding import Embedding
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.RNN import GRU, LSTM
from speechbrain.nnet.transducer.transducer_joint import Transducer_joint

BLANK, WIDTH = 0, 96


class Transducer(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.encoder = LSTM(hidden_size=WIDTH, input_size=160, num_layers=1, bidirectional=True)
        self.project = Linear(input_size=2 * WIDTH, n_neurons=WIDTH)
        self.embedding = Embedding(num_embeddings=columns, consider_as_one_hot=False, embedding_dim=32, blank_id=BLANK)
        self.decoder = GRU(hidden_size=WIDTH, input_size=32, num_layers=1)
        self.joint = Transducer_joint(joint="sum", nonlinearity=torch.nn.Tanh)
        self.head = Linear(input_size=WIDTH, n_neurons=columns)

    def forward(self, features, tokens):
        encoded = self.project(self.encoder(features)[0])
        started = torch.nn.functional.pad(tokens, (1, 0), value=BLANK)
        decoded = self.decoder(self.embedding(started))[0]
        return self.head(self.joint(encoded.unsqueeze(2), decoded.unsqueeze(1)))


def their_loss(logits, tokens, frames, labels, reduction):
    """What `transducer_loss` hands to its kernel; the simulator wants numpy's arrays behind plain tensors, so alone."""
    from speechbrain.nnet.losses import transducer_loss

    return transducer_loss(logits, tokens.int(), frames, labels, BLANK, reduction)


def main():
    run, k = Run(), kernel()
    run.note("version", speechbrain.__version__)
    torch.manual_seed(0)
    for reduction in ("mean", "sum"):
        logits = torch.randn(2, 5, 4, 6)
        tokens, frames, labels = torch.randint(1, 6, (2, 3)), torch.tensor([1.0, 0.8]), torch.tensor([1.0, 2 / 3])
        pairs = []
        for loss in (k.integrations.speechbrain.transducer_loss, their_loss):
            leaf = logits.clone().requires_grad_()
            value = (
                loss(leaf, tokens, frames, labels, reduction)
                if loss is their_loss
                else loss(leaf, tokens, frames, labels, BLANK, reduction)
            )
            value.backward()
            pairs.append((float(value), {"logits": leaf.grad}))
        run.expect(
            f"{reduction}: loss, relative, to SpeechBrain's in numba's simulator",
            relative(pairs[0][0], pairs[1][0]),
            1e-6,
        )
        run.expect(f"{reduction}: gradient, relative", gradient_error(pairs[0][1], pairs[1][1]), 1e-4)

    waveforms, texts = load_speech()
    characters = sorted(set("".join(texts)))
    features, lengths = padded(log_mel(waveforms))
    tokens, sizes = padded([[characters.index(c) + 1 for c in text] for text in texts])
    model = Transducer(len(characters) + 1)

    def loss_of_step():
        return k.integrations.speechbrain.transducer_loss(
            model(features, tokens), tokens, lengths / features.shape[1], sizes / tokens.shape[1], BLANK
        )

    def decode(tokens_so_far):
        return model.decoder(model.embedding(torch.tensor([[BLANK, *tokens_so_far]])))[0][0, -1]

    def score(frame, state):
        return model.head(model.joint(frame[None, None, None], state[None, None, None]))[0, 0, 0]

    def read():
        encoded = [model.project(model.encoder(row[None, :n])[0])[0] for row, n in zip(features, lengths)]
        return ["".join(characters[i - 1] for i in greedy(row, decode, score, BLANK)) for row in encoded]

    train_and_transcribe(run, model, loss_of_step, read, texts, enough=0.004)
    run.finish()


if __name__ == "__main__":
    main()
