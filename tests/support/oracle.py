"""The loss in float64, written from the equations alone; it shares nothing with the code under test.

Sizes of one sample: T frames, U labels, V tokens, D durations. x (T, U+1, V) are the token logits, z (T, U+1, D) the duration logits.

    blank_lp(t,u) = x[blank] - lse(x) - sigma,  label_lp(t,u) = x[y_{u+1}] - lse(x) - sigma,  dur_lp_i(t,u) = z_i - lse(z)     (1-3)

and a delay penalty adds delay_penalty * ((T - 1) / 2 - t) to label_lp. RNN-T is written as no durations at all: D = 0, one blank arc of one frame and
one label arc of none.

A lattice is a list of arcs. An arc knows how far it goes (dt frames, du labels) and its log-weight at every node it can leave, -inf where it may
not be taken. The exit is one more node, (T, U). alpha and beta (eqs. 4, 5) then are one logsumexp per node over the arcs, whatever the arcs are: TDT's
2 D, or RNN-T's two. Every arc raises n = t + u, so the nodes of one anti-diagonal are computed together: arrays are stored skewed, [n, u] = [t + u, u].

`enumerate_alignments` walks every alignment of a tiny lattice one by one; `test_oracle.py` holds the two against each other.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class LogProbs(NamedTuple):
    """Equations 1 to 3 at every node of one sample; for RNN-T, D = 0."""

    blank: np.ndarray  # (T, U+1)
    label: np.ndarray  # (T, U+1), -inf at u = U
    dur: np.ndarray  # (T, U+1, D)


class Arc(NamedTuple):
    dt: int
    du: int
    weight: np.ndarray  # (T, U+1) log-weight at the source, -inf where the arc may not be taken


class Lattice(NamedTuple):
    ll: float
    alpha: np.ndarray  # (T, U+1)
    beta: np.ndarray  # (T, U+1)
    occ: list[np.ndarray]  # one (T, U+1) per arc, eq. 7


class Term(NamedTuple):
    """One lattice of a sample's loss: it counts `weight` times."""

    weight: float
    is_rnnt: bool
    nodes: Lattice
    blank_occ: np.ndarray  # (T, U+1, D), or D = 1 for RNN-T
    label_occ: np.ndarray


@dataclass
class Result:
    """What the oracle says about a batch; padding holds zeros. L = 2 lattices, TDT and RNN-T, where omega mixes them, else 1."""

    losses: torch.Tensor  # (B,)
    grad_tokens: torch.Tensor  # (B, max_T, max_U1, V)
    grad_durations: torch.Tensor  # (B, max_T, max_U1, D)
    ll: torch.Tensor  # (L, B)
    alpha_beta: torch.Tensor  # (L, 2, B, max_T, max_U1)
    blank_occ: torch.Tensor  # (B, max_T, max_U1, D), of the first lattice; (B, max_T, max_U1) for RNN-T
    label_occ: torch.Tensor
    condition: torch.Tensor  # (B,), see the function of that name


def logsumexp(values, axis):
    """logsumexp that gives -inf for a sum over nothing but -inf. What is added to the largest value is exact however small it is: log1p of the others."""
    top = np.max(values, axis=axis, keepdims=True)
    shift = np.where(np.isneginf(top), 0.0, top)
    below = values - shift
    is_top = below == 0
    others = np.sum(np.exp(below, where=~is_top, out=np.zeros_like(below)), axis=axis)
    with np.errstate(divide="ignore"):
        return np.squeeze(shift, axis) + np.log1p((np.sum(is_top, axis=axis) - 1) + others)


def top_and_log_sum(x):
    """The largest entry of every row and the logarithm of the sum of exp(x - top): lse(x) in two parts, because their sum is rounded to the size of x."""
    if x.shape[-1] == 0:
        return x.sum(dim=-1), x.sum(dim=-1)
    top = x.amax(dim=-1, keepdim=True)
    is_top = x == top
    others = (x - top).exp_().masked_fill_(is_top & top.isfinite(), 0.0).sum(dim=-1)
    return top.squeeze(-1), torch.log1p((is_top.sum(dim=-1) - 1) + others)


def log_probs(x, z, target, blank, sigma=0.0, delay_penalty=0.0):
    """Equations 1 to 3. x (T, U+1, V), z (T, U+1, D), target (U,)."""
    x, z = x.double(), z.double()
    T, U1, _ = x.shape
    top, log_sum = top_and_log_sum(x)
    label = torch.full_like(top, -torch.inf)
    for_labels = target.to(x.device, torch.int64)[None, :, None].expand(T, -1, -1)  # (T, U, 1)
    labelled = x[:, : U1 - 1].gather(-1, for_labels).squeeze(-1)
    label[:, : U1 - 1] = labelled - top[:, : U1 - 1] - log_sum[:, : U1 - 1] - sigma
    label += delay_penalty * ((T - 1) / 2 - torch.arange(T, dtype=torch.float64, device=x.device)[:, None])
    top_z, log_sum_z = (part[..., None] for part in top_and_log_sum(z))
    parts = (x[..., blank] - top - log_sum - sigma, label, z - top_z - log_sum_z)
    return LogProbs(*(part.cpu().numpy() for part in parts))


def tdt_arcs(lp, durations):
    """The arcs of TDT: a blank arc for every positive duration (None for a duration of 0), then a label arc for every duration."""
    T, U1 = lp.blank.shape
    t, u = np.indices((T, U1))
    blanks, labels = [], []
    for i, d in enumerate(durations):
        may_land = (t + d < T) | ((t + d == T) & (u == U1 - 1))  # inside the lattice, or the final blank
        blanks.append(Arc(d, 0, np.where(may_land, lp.blank + lp.dur[..., i], -np.inf)) if d > 0 else None)
        labels.append(Arc(d, 1, np.where(t + d < T, lp.label + lp.dur[..., i], -np.inf)))
    return blanks, labels


def rnnt_arcs(lp):
    """The two arcs of RNN-T, in the same form: [blank], [label]."""
    T, U1 = lp.blank.shape
    t, u = np.indices((T, U1))
    may_land = (t + 1 < T) | (u == U1 - 1)
    return [Arc(1, 0, np.where(may_land, lp.blank, -np.inf))], [Arc(0, 1, lp.label)]


def _skew(values, n_rows):
    T, U1 = values.shape
    t, u = np.indices((T, U1))
    skewed = np.full((n_rows, U1), -np.inf)
    skewed[t + u, u] = values
    return skewed


def lattice(arcs, T, U):
    """alpha, beta, LL and the occupancy of every arc (eqs. 4-7)."""
    if T == 0:
        empty = np.zeros((0, U + 1))
        return Lattice(-np.inf, empty, empty, [empty for _ in arcs])
    t, u = np.indices((T, U + 1))
    exit_n = T + U  # the exit (T, U) is alone on its anti-diagonal
    weights = [_skew(arc.weight, exit_n + 1) for arc in arcs]

    alpha = np.full((exit_n + 1, U + 1), -np.inf)
    alpha[0, 0] = 0.0
    for n in range(1, exit_n + 1):
        entering = np.full((len(arcs), U + 1), -np.inf)
        for arc, weight, into in zip(arcs, weights, entering):
            source = n - arc.dt - arc.du
            if source >= 0:
                into[arc.du :] = (alpha[source] + weight[source])[: U + 1 - arc.du]
        alpha[n] = logsumexp(entering, axis=0)

    beta = np.full((exit_n + 1, U + 1), -np.inf)
    beta[exit_n, U] = 0.0
    for n in range(exit_n - 1, -1, -1):
        leaving = np.full((len(arcs), U + 1), -np.inf)
        for arc, weight, out in zip(arcs, weights, leaving):
            target = n + arc.dt + arc.du
            if target <= exit_n:
                out[: U + 1 - arc.du] = weight[n, : U + 1 - arc.du] + beta[target, arc.du :]
        beta[n] = logsumexp(leaving, axis=0)

    ll = beta[0, 0]
    occ = []
    for arc, weight in zip(arcs, weights):
        n, to_n, to_u = t + u, t + u + arc.dt + arc.du, u + arc.du
        inside = (to_n <= exit_n) & (to_u <= U)
        to_beta = np.where(inside, beta[np.minimum(to_n, exit_n), np.minimum(to_u, U)], -np.inf)
        score = alpha[n, u] + weight[n, u] + to_beta
        occ.append(np.zeros((T, U + 1)) if np.isneginf(ll) else np.exp(score - ll))
    return Lattice(float(ll), alpha[t + u, u], beta[t + u, u], occ)


def _with_occupancies(blanks, labels, T, U1):
    """The lattice of these arcs, and their occupancies as blank_occ, label_occ, each (T, U+1, D)."""
    result = lattice([arc for arc in blanks + labels if arc is not None], T, U1 - 1)
    remaining = iter(result.occ)
    blank_occ = [np.zeros((T, U1)) if arc is None else next(remaining) for arc in blanks]
    label_occ = [next(remaining) for _ in labels]
    return result, np.stack(blank_occ, axis=-1), np.stack(label_occ, axis=-1)


def tdt_lattice(lp, durations):
    """The TDT lattice, and its occupancies as blank_occ, label_occ, each (T, U+1, D)."""
    return _with_occupancies(*tdt_arcs(lp, durations), *lp.blank.shape)


def rnnt_lattice(lp):
    """The RNN-T lattice over the same tokens, and its occupancies, each (T, U+1, 1)."""
    return _with_occupancies(*rnnt_arcs(lp), *lp.blank.shape)


def terms(lp, durations, omega=0.0):
    """The lattices of a loss. The first is the one whose occupancies a user sees."""
    if not durations:
        return [Term(1.0, True, *rnnt_lattice(lp))]
    tdt = Term(1.0 - omega, False, *tdt_lattice(lp, durations))
    return [tdt, Term(omega, True, *rnnt_lattice(lp))] if omega > 0 else [tdt]


def condition(lp, term, penalty):
    """How far rounding carries. Where the log-weight of every arc is off at random by about e for every nat in it and one nat more, LL and occupancies
    are off by about e times this: the root of the expected sum of those numbers' squares along an alignment. `penalty`: nats beside the log-probabilities.
    """
    dur, total = 0.0 if term.is_rnnt else np.abs(lp.dur), 0.0
    for occ, token_lp in ((term.blank_occ, lp.blank), (term.label_occ, lp.label)):
        nats = 1.0 + np.abs(token_lp)[..., None] + dur + penalty
        total += np.sum(occ * np.where(occ > 0, nats, 0.0) ** 2)
    return float(np.sqrt(total))


def token_gradient(x, target, blank, G_blank, G_label):
    """Equation 8. G_blank and G_label (T, U+1)."""
    x, G_blank, G_label = x.double(), torch.from_numpy(G_blank).to(x.device), torch.from_numpy(G_label).to(x.device)
    grad_x = torch.softmax(x, dim=-1) * (G_blank + G_label)[..., None]
    grad_x[..., blank] -= G_blank
    for u in range(x.shape[1] - 1):
        grad_x[:, u, int(target[u])] -= G_label[:, u]
    return grad_x


def duration_gradient(z, blank_occ, label_occ):
    """Equation 9. blank_occ and label_occ (T, U+1, D)."""
    G_i = torch.from_numpy(blank_occ + label_occ).to(z.device)
    return torch.softmax(z.double(), dim=-1) * G_i.sum(-1, keepdim=True) - G_i


def tdt_loss(
    token_logits,
    duration_logits,
    targets,
    logit_lengths,
    target_lengths,
    blank,
    durations,
    sigma=0.0,
    *,
    omega=0.0,
    fastemit_lambda=0.0,
    clamp=0.0,
    delay_penalty=0.0,
):
    """Loss and gradients of a batch, sample by sample, each from its own valid nodes only. No durations: RNN-T.

    loss_b = (1 - omega) TDT + omega RNN-T, where a lattice of weight 0 does not count and one without alignment makes the loss infinite and the gradient 0.
    The gradient is that of loss_b, but for two changes: FastEmit weighs the occupancy of every label arc by 1 + fastemit_lambda, and a positive clamp
    then limits every entry to [-clamp, clamp].
    """
    B, max_T, max_U1, V = token_logits.shape
    D, L, device = len(durations), 2 if len(durations) and omega > 0 else 1, token_logits.device

    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.float64, device=device)

    occ_shape = (B, max_T, max_U1, D) if D else (B, max_T, max_U1)
    result = Result(
        losses=zeros(B),
        grad_tokens=zeros(B, max_T, max_U1, V),
        grad_durations=zeros(B, max_T, max_U1, D),
        ll=zeros(L, B),
        alpha_beta=zeros(L, 2, B, max_T, max_U1),
        blank_occ=zeros(*occ_shape),
        label_occ=zeros(*occ_shape),
        condition=zeros(B),
    )
    for b in range(B):
        T, U = int(logit_lengths[b]), int(target_lengths[b])
        valid = (b, slice(T), slice(U + 1))
        x, z, target = token_logits[valid].detach(), duration_logits[valid].detach(), targets[b, :U].cpu()
        lp = log_probs(x, z, target, blank, sigma, delay_penalty)
        lattices = terms(lp, durations, omega)
        for k, term in enumerate(lattices):
            result.ll[k, b] = term.nodes.ll
            result.alpha_beta[(k, 0, *valid)] = torch.from_numpy(term.nodes.alpha).to(device)
            result.alpha_beta[(k, 1, *valid)] = torch.from_numpy(term.nodes.beta).to(device)
        occ = (result.blank_occ, lattices[0].blank_occ), (result.label_occ, lattices[0].label_occ)
        for all_samples, own in occ:
            all_samples[valid] = torch.from_numpy(own if D else own[..., 0]).to(device)

        counting = [term for term in lattices if term.weight > 0]
        result.losses[b] = sum(-term.weight * term.nodes.ll for term in counting)
        penalty = abs(sigma) + abs(delay_penalty) * max(T - 1, 0) / 2
        result.condition[b] = sum(term.weight * condition(lp, term, penalty) for term in counting)
        if any(term.nodes.ll == -np.inf for term in counting):
            continue
        for term in counting:
            label_occ = (1 + fastemit_lambda) * term.label_occ
            G_blank, G_label = term.blank_occ.sum(-1), label_occ.sum(-1)
            result.grad_tokens[valid] += term.weight * token_gradient(x, target, blank, G_blank, G_label)
            if not term.is_rnnt:
                result.grad_durations[valid] += term.weight * duration_gradient(z, term.blank_occ, label_occ)
    if clamp > 0:
        result.grad_tokens.clamp_(-clamp, clamp)
        result.grad_durations.clamp_(-clamp, clamp)
    return result


def enumerate_alignments(T, U, durations):
    """Every alignment of a tiny lattice, as a list of arcs (t, u, is_label, i). No durations: RNN-T."""
    steps = [(i, d, is_label) for i, d in enumerate(durations) for is_label in (False, True) if is_label or d > 0]
    if not durations:
        steps = [(0, 1, False), (0, 0, True)]

    def walk(t, u, path):
        for i, d, is_label in steps:
            longer = [*path, (t, u, is_label, i)]
            if not is_label and t + d == T and u == U:
                yield longer
            if t + d < T and u + is_label <= U:
                yield from walk(t + d, u + is_label, longer)

    if T > 0:
        yield from walk(0, 0, [])


def brute_force(lp, durations):
    """LL, blank_occ and label_occ as sums over all alignments; the occupancy of an arc is the probability of the alignments that use it."""
    T, U1 = lp.blank.shape
    paths = list(enumerate_alignments(T, U1 - 1, durations))
    occ = np.zeros((2, T, U1, max(len(durations), 1)))
    if not paths:
        return -np.inf, occ[0], occ[1]

    def weight(t, u, is_label, i):
        return (lp.label if is_label else lp.blank)[t, u] + (lp.dur[t, u, i] if durations else 0.0)

    scores = np.array([sum(weight(*arc) for arc in path) for path in paths])
    ll = logsumexp(scores, axis=0)
    for path, score in zip(paths, scores):
        for t, u, is_label, i in path:
            occ[int(is_label), t, u, i] += np.exp(score - ll)
    return float(ll), occ[0], occ[1]
