"""Calls of the fused losses: a problem, the kernel's outcome, and what is right.

Right is the oracle's loss and gradient of the float64 logits `act(f + g) W^T + b`, taken on by torch's autograd in float64.
"""

from dataclasses import dataclass, field, replace

import torch

from support import oracle
from support.comparisons import same_bits

NAMES = ("encoder", "decoder", "weight", "bias")
# Largest norm of the error of a gradient, of the norm of the gradient.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
RAGGED = {"logit_lengths": [9, 6, 4, 5], "target_lengths": [4, 2, 0, 3]}


@dataclass(frozen=True)
class Problem:
    """The arguments of a fused loss. No durations: RNN-T."""

    encoder: torch.Tensor  # (B, T, H)
    decoder: torch.Tensor  # (B, U1, H)
    weight: torch.Tensor  # (V + D, H)
    bias: torch.Tensor | None  # (V + D,)
    targets: torch.Tensor
    logit_lengths: torch.Tensor
    target_lengths: torch.Tensor
    blank: int
    durations: tuple[int, ...]
    sigma: float = 0.0
    activation: str = "relu"
    options: dict = field(default_factory=dict)

    replace = replace

    @property
    def operands(self):
        return self.encoder, self.decoder, self.weight, self.bias

    @property
    def labels(self):
        return self.targets, self.logit_lengths, self.target_lengths

    @property
    def vocab(self):
        return len(self.weight) - len(self.durations)

    @property
    def nodes(self):
        return int((self.logit_lengths * (self.target_lengths + 1)).sum())

    @property
    def tile_bytes(self):
        """What one row of a tile takes."""
        padded = (len(self.weight) + 7) // 8 * 8
        return (padded + self.weight.shape[1]) * self.encoder.dtype.itemsize

    def to(self, where):
        moved = {name: x.to(where) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        if isinstance(where, torch.dtype):
            moved = {name: x for name, x in moved.items() if name in NAMES}
        return self.replace(**moved)


def make_problem(
    B=4, T=9, U=4, V=21, H=24, durations=(0, 1, 2, 3), *, dtype=torch.float32, device="cpu", seed=0, scale=1.0, **rest
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N = V + len(durations)
    lengths = [
        torch.tensor(rest.pop(name, [n] * B), dtype=torch.int64)
        for name, n in (("logit_lengths", T), ("target_lengths", U))
    ]
    problem = Problem(
        encoder=normal(B, T, H),
        decoder=normal(B, U + 1, H),
        weight=normal(N, H) * scale / H**0.5,
        bias=normal(N) if rest.pop("bias", True) else None,
        targets=torch.randint(0, V - 1, (B, U), generator=generator),
        logit_lengths=lengths[0],
        target_lengths=lengths[1],
        blank=V - 1,
        durations=durations,
        **rest,
    )
    return problem.to(dtype).to(device)


@dataclass
class Outcome:
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    stats: object = None


def fused(kernel, problem, reduction="none", *, upstream=None, **options):
    """Forward and backward through the kernel, as a user would, over all rows unless a tolerance is given."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in problem.operands]
    options = {"activation": problem.activation, "tolerance": 0.0, **problem.options, **options}
    if problem.durations:
        rest = (*problem.labels, problem.blank, list(problem.durations), problem.sigma, reduction)
        loss, stats = kernel.tdt_loss_fused_joint(*leaves, *rest, return_stats=True, **options)
    else:
        options["sigma"] = problem.sigma
        rest = (*problem.labels, problem.blank, reduction)
        loss, stats = kernel.rnnt_loss_fused_joint(*leaves, *rest, return_stats=True, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return Outcome(loss.detach(), {name: x.grad for name, x in zip(NAMES, leaves) if x is not None}, stats)


def unfused(kernel, problem):
    """The usual pipeline in the dtype of the problem, through the dense loss."""
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    logits = logits_of(leaves, problem.activation)
    loss = kernel.tdt_loss_joint(logits, *problem.labels, problem.blank, list(problem.durations), reduction="none")
    loss.sum().backward()
    return Outcome(loss.detach(), {name: x.grad for name, x in zip(NAMES, leaves)})


def logits_of(operands, activation, factors=None):
    encoder, decoder, weight, bias = operands
    hidden = getattr(torch, activation)(encoder[:, :, None] + decoder[:, None])
    return torch.nn.functional.linear(hidden if factors is None else hidden * factors, weight, bias)


def expected(problem, upstream=1.0, factors=None):
    """Losses and gradients of the oracle, in float64. factors: of every hidden unit, (B, T, U1, H)."""
    leaves = [None if x is None else x.detach().double().cpu().requires_grad_() for x in problem.operands]
    logits = logits_of(leaves, problem.activation, factors)
    x, z = logits.detach().split([problem.vocab, len(problem.durations)], dim=-1)
    labels = [label.cpu() for label in problem.labels]
    result = oracle.tdt_loss(x, z, *labels, problem.blank, problem.durations, problem.sigma, **problem.options)
    upstream = torch.as_tensor(upstream, dtype=torch.float64).reshape(-1, 1, 1, 1)
    logits.backward(torch.cat([result.grad_tokens, result.grad_durations], dim=-1) * upstream)
    return Outcome(result.losses, {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None})


def errors(outcome, reference):
    return {
        name: ((outcome.grads[name].double().cpu() - grad).norm() / grad.norm().clamp(min=1e-30)).item()
        for name, grad in reference.grads.items()
    }


def assert_matches(outcome, reference, problem):
    tolerance = TOLERANCE[problem.encoder.dtype]
    torch.testing.assert_close(outcome.loss.double().cpu(), reference.loss, rtol=tolerance, atol=tolerance)
    for name, x in zip(NAMES, problem.operands):
        if x is not None:
            assert outcome.grads[name].dtype == x.dtype and outcome.grads[name].shape == x.shape
    assert all(error <= tolerance for error in errors(outcome, reference).values()), errors(outcome, reference)


def assert_same_bits(first, second):
    assert same_bits(first.loss, second.loss)
    for name, grad in first.grads.items():
        assert same_bits(grad, second.grads[name]), name


def dropout_factors(kernel, dropout, seed, B=2, T=10, U1=5, H=64, dtype=torch.float32, device="cpu"):
    """The factors of all hidden units, (B, T, U1, H)."""
    ones, zeros = torch.ones(B, T, H, dtype=dtype, device=device), torch.zeros(B, U1, H, dtype=dtype, device=device)
    nodes = torch.arange(B * T * U1, dtype=torch.int32, device=device)
    hidden = torch.empty(len(nodes), H, dtype=dtype, device=device)
    kernel.loss.ops.joint_hidden_(hidden, ones, zeros, nodes, 0, dropout, seed, 0)
    return hidden.view(B, T, U1, H)
