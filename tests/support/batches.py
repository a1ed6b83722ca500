"""`make_batch`: the inputs of one call, in the form that each function, each op and the oracle takes them."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan

import torch

from support import oracle

# Durations of every kind.
DURATIONS = {
    "RNN-T": (),
    "one frame": (1,),
    "zero and one": (0, 1),
    "parakeet": (0, 1, 2, 3, 4),
    "no zero": (1, 2),
    "even only": (2, 4),
    "a gap": (0, 4),
    "descending": (4, 3, 2, 1, 0),
    "shuffled": (2, 0, 3, 1),
    "duplicates": (1, 0, 1, 2, 2),
    "duplicated zero": (0, 0, 1),
    "long": (0, 1, 9, 17),
    "beyond every frame": (0, 1, 1000, 2**31 - 1, 2**40),
    "64 of them": tuple(range(63, -1, -1)),
}

# Fields of a node's record, from the op log_probs.
ROW_SUM, BLANK_LP, LABEL_LP, DUR_LP = 0, 1, 2, 3


def record_size(D):
    """Fields of a node's record, rounded up to 4."""
    return (3 + D + 3) // 4 * 4


@dataclass(frozen=True)
class Batch:
    """Inputs of one call. Without durations (D = 0) it is a batch of rnnt_loss."""

    token_logits: torch.Tensor  # (B, max_T, max_U1, V)
    duration_logits: torch.Tensor  # (B, max_T, max_U1, D)
    targets: torch.Tensor  # (B, max_U)
    logit_lengths: torch.Tensor  # (B,)
    target_lengths: torch.Tensor  # (B,)
    blank: int
    durations: tuple[int, ...]
    sigma: float
    options: dict = field(default_factory=dict)  # omega, fastemit_lambda, clamp, delay_penalty

    replace = replace

    @property
    def lengths(self):
        return self.targets, self.logit_lengths, self.target_lengths

    @property
    def rest(self):
        """What follows the logits in both functions, up to sigma."""
        return *self.lengths, self.blank, list(self.durations), self.sigma

    @property
    def args(self):
        """The arguments of tdt_loss."""
        return self.token_logits, self.duration_logits, *self.rest

    @property
    def joint_args(self):
        """The arguments of tdt_loss_joint."""
        return self.joint, *self.rest

    @property
    def rnnt_args(self):
        """The arguments of rnnt_loss, up to the blank; sigma is a keyword there."""
        return self.token_logits, *self.lengths, self.blank

    def option(self, name):
        return float(self.options.get(name, 0.0))

    def without_durations(self):
        """The RNN-T batch of the same tokens."""
        options = {name: value for name, value in self.options.items() if name != "omega"}
        return self.replace(durations=(), duration_logits=self.duration_logits[..., :0], options=options)

    def op_logits(self, api="separate"):
        """The two logits arguments of an op."""
        if not self.durations:
            return self.token_logits, None
        return (self.token_logits, self.duration_logits) if api == "separate" else (self.joint, None)

    @property
    def op_arcs(self):
        return self.blank % self.token_logits.shape[-1], list(self.durations)

    def loss_op_args(self, api="separate", *, zero_infinity=False, need_grad=True, inplace_grad=False, reduction=0):
        """The arguments of the op loss."""
        options = map(self.option, ("delay_penalty", "omega", "fastemit_lambda", "clamp"))
        flags = (zero_infinity, need_grad, inplace_grad, reduction)
        return (*self.op_logits(api), *self.lengths, *self.op_arcs, self.sigma, *options, *flags)

    def gradient_op_args(self, api, grad_loss, weights, *saved):
        """The arguments of the op gradient; `saved`: node_lp, row_max, ll, alpha_beta."""
        options = map(self.option, ("omega", "fastemit_lambda", "clamp"))
        return (grad_loss, weights, *self.op_logits(api), *self.lengths, *saved, *self.op_arcs, *options)

    def leaves(self):
        """Copies of both logits that require grad."""
        return self.token_logits.clone().requires_grad_(), self.duration_logits.clone().requires_grad_()

    @cached_property
    def joint(self):
        return torch.cat([self.token_logits, self.duration_logits], dim=-1)

    @cached_property
    def valid(self):
        """(B, max_T, max_U1) True at the nodes of the lattice, False in the padding."""
        _, max_T, max_U1, _ = self.token_logits.shape
        t = torch.arange(max_T)[None, :, None] < self.logit_lengths.cpu()[:, None, None]
        u = torch.arange(max_U1)[None, None, :] <= self.target_lengths.cpu()[:, None, None]
        return (t & u).to(self.token_logits.device)

    @cached_property
    def expected(self):
        """Losses, gradients, alpha, beta, LL and occupancies of the oracle."""
        return oracle.tdt_loss(*self.args, **self.options)

    @cached_property
    def expected_node_lp(self):
        """(B, max_T, max_U1, R) float64, the first result of the op log_probs: sum of exp(x - max), blank_lp, label_lp, dur_lp; R is 3 + D, rounded up to 4."""
        D = len(self.durations)
        node_lp = torch.zeros(*self.token_logits.shape[:3], record_size(D), dtype=torch.float64)
        for b, (T, U) in enumerate(zip(self.logit_lengths.tolist(), self.target_lengths.tolist())):
            x, z = self.token_logits[b, :T, : U + 1], self.duration_logits[b, :T, : U + 1]
            lp = oracle.log_probs(x, z, self.targets[b, :U], self.blank, self.sigma, self.option("delay_penalty"))
            record = node_lp[b, :T, : U + 1]
            record[..., BLANK_LP], record[..., LABEL_LP] = torch.from_numpy(lp.blank), torch.from_numpy(lp.label)
            record[..., DUR_LP : DUR_LP + D] = torch.from_numpy(lp.dur)
            x = x.double().cpu()
            record[..., ROW_SUM] = (x - x.amax(-1, keepdim=True)).exp().sum(-1)
        return node_lp.to(self.token_logits.device)

    @cached_property
    def expected_row_max(self):
        """(B, max_T, max_U1) float64, its second result: the largest token logit of each row; NaN in the padding."""
        return self.token_logits.double().amax(-1).masked_fill(~self.valid, nan)

    @cached_property
    def penalty(self):
        """What sigma and the delay penalty add to an arc at most, in nats."""
        return abs(self.sigma) + abs(self.option("delay_penalty")) * max(self.valid.shape[1] - 1, 0) / 2


def make_batch(
    B=1,
    T=5,
    U=3,
    V=7,
    durations=(0, 1, 2),
    *,
    logit_lengths=None,
    target_lengths=None,
    blank=0,
    sigma=0.0,
    scale=1.0,
    dtype=torch.float32,
    index_dtype=torch.int64,
    device="cpu",
    seed=0,
    **options,
):
    """Normal logits times `scale` (0: all logits zero), random labels other than blank, full lengths unless given. No durations: RNN-T."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, U + 1, V + len(durations), generator=generator) * scale
    targets = torch.randint(0, max(V - 1, 1), (B, U), generator=generator)
    targets += (targets >= blank % V) & (V > 1)
    token_logits, duration_logits = logits.to(dtype).split([V, len(durations)], dim=-1)
    return Batch(
        token_logits=token_logits.contiguous().to(device),
        duration_logits=duration_logits.contiguous().to(device),
        targets=targets.to(device, index_dtype),
        logit_lengths=torch.tensor([T] * B if logit_lengths is None else logit_lengths, dtype=index_dtype).to(device),
        target_lengths=torch.tensor([U] * B if target_lengths is None else target_lengths, dtype=index_dtype).to(
            device
        ),
        blank=blank,
        durations=tuple(durations),
        sigma=sigma,
        options=options,
    )


def zero_batch(**arguments):
    """All logits 0: every arc of a node is as likely as any other."""
    return make_batch(**{"scale": 0.0, "durations": (0, 1), "V": 5, **arguments})
