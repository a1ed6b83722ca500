"""A transducer of three layers: what stands around the loss in a training step."""

import torch

FUNCTIONS = ("tdt_loss", "tdt_loss_joint", "rnnt_loss", "tdt_loss_fused_joint", "rnnt_loss_fused_joint")
FEATURES, VOCAB, DURATIONS = 6, 11, (0, 1, 2, 4)
BLANK = VOCAB - 1


class Transducer(torch.nn.Module):
    """Linear encoder, embedding, linear joint network, and the loss that `function` names."""

    def __init__(self, kernel, function, *, durations=DURATIONS, hidden=16, dropout=0.0, **options):
        super().__init__()
        self.kernel, self.function, self.dropout, self.options = kernel, function, dropout, options
        self.durations = [] if function.startswith("rnnt") else list(durations)
        self.encoder = torch.nn.Linear(FEATURES, hidden)
        self.decoder = torch.nn.Embedding(VOCAB, hidden)
        self.head = torch.nn.Linear(hidden, VOCAB + len(self.durations))

    def forward(self, features, targets, logit_lengths, target_lengths, reduction="mean"):
        encoded, decoded = self.encode(features, targets)
        return self.joint_and_loss(encoded, decoded, targets, logit_lengths, target_lengths, reduction)

    def encode(self, features, targets):
        return self.encoder(features), self.decoder(torch.nn.functional.pad(targets, (1, 0), value=BLANK))

    def joint_and_loss(self, encoded, decoded, targets, logit_lengths, target_lengths, reduction="mean"):
        labels = (targets, logit_lengths, target_lengths, BLANK)
        options = {"reduction": reduction, **self.options}
        if self.durations:
            options["durations"] = self.durations
        loss = getattr(self.kernel, self.function)
        if self.function.endswith("fused_joint"):
            head = (self.head.weight, self.head.bias)
            return loss(encoded, decoded, *head, *labels, dropout=self.dropout if self.training else 0.0, **options)
        hidden = torch.relu(encoded[:, :, None] + decoded[:, None])
        logits = self.head(torch.nn.functional.dropout(hidden, self.dropout, self.training))
        if self.function == "tdt_loss":
            return loss(logits[..., :VOCAB], logits[..., VOCAB:], *labels, **options)
        return loss(logits, *labels, **options)


def make_model(kernel, function, *, device="cpu", dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Transducer(kernel, function, **options).to(device, dtype)


def make_speech(B=4, T=9, U=4, *, logit_lengths=None, target_lengths=None, device="cpu", dtype=torch.float32, seed=0):
    """(features, targets, logit_lengths, target_lengths), lengths drawn unless given: the first sample has the longest."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(given, least, most):
        if given is None:
            given = torch.randint(least, most + 1, (B,), generator=generator)
            given[:1] = most
        return torch.as_tensor(given, dtype=torch.int64).to(device)

    features = torch.randn(B, T, FEATURES, generator=generator, dtype=torch.float64).to(device, dtype)
    targets = torch.randint(0, BLANK, (B, U), generator=generator).to(device)
    return features, targets, lengths(logit_lengths, (T + 1) // 2, T), lengths(target_lengths, 0, U)


def loss_and_gradients(model, *inputs, **options):
    """The loss, and the gradient of every parameter by name."""
    model.zero_grad(set_to_none=True)
    loss = model(*inputs, **options)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
