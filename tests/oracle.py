"""The loss in float64, written from the equations alone; it shares nothing with the code under test.

Sizes of one sample: T frames, U labels, V tokens, D durations. x (T, U+1, V) are the token logits, z (T, U+1, D) the duration logits.

    blank_lp(t,u) = x[blank] - lse(x) - sigma,  label_lp(t,u) = x[y_{u+1}] - lse(x) - sigma,  dur_lp_i(t,u) = z_i - lse(z)     (1-3)

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
    """Equations 1 to 3 at every node of one sample."""

    lse: np.ndarray  # (T, U+1) logsumexp of the token logits
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


@dataclass
class Result:
    """What the oracle says about a batch; padding holds zeros."""

    losses: torch.Tensor  # (B,)
    grad_tokens: torch.Tensor  # (B, max_T, max_U1, V)
    grad_durations: torch.Tensor  # (B, max_T, max_U1, D)
    ll: torch.Tensor  # (B,)
    alpha: torch.Tensor  # (B, max_T, max_U1)
    beta: torch.Tensor  # (B, max_T, max_U1)


def logsumexp(values, axis):
    """logsumexp that gives -inf for a sum over nothing but -inf."""
    top = np.max(values, axis=axis, keepdims=True)
    shift = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(values - shift), axis=axis)) + np.squeeze(shift, axis)


def log_probs(x, z, target, blank, sigma=0.0):
    """Equations 1 to 3. x (T, U+1, V), z (T, U+1, D), target (U,)."""
    x, z = x.double(), z.double()
    T, U1, _ = x.shape
    lse = torch.logsumexp(x, dim=-1)
    label = torch.full_like(lse, -torch.inf)
    for_labels = target.to(x.device, torch.int64)[None, :, None].expand(T, -1, -1)  # (T, U, 1)
    label[:, : U1 - 1] = x[:, : U1 - 1].gather(-1, for_labels).squeeze(-1) - lse[:, : U1 - 1] - sigma
    dur = z - torch.logsumexp(z, dim=-1, keepdim=True)
    parts = (lse, x[..., blank] - lse - sigma, label, dur)
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


def tdt_lattice(lp, durations):
    """The TDT lattice, and its occupancies as blank_occ, label_occ, each (T, U+1, D)."""
    T, U1 = lp.blank.shape
    blanks, labels = tdt_arcs(lp, durations)
    arcs = [arc for arc in blanks + labels if arc is not None]
    result = lattice(arcs, T, U1 - 1)
    remaining = iter(result.occ)
    blank_occ = [np.zeros((T, U1)) if arc is None else next(remaining) for arc in blanks]
    label_occ = [next(remaining) for _ in labels]
    return result, np.stack(blank_occ, axis=-1), np.stack(label_occ, axis=-1)


def gradient(x, z, target, blank, blank_occ, label_occ):
    """Equations 8 and 9. blank_occ and label_occ are (T, U+1, D); the result is (grad_x, grad_z)."""
    x, z = x.double(), z.double()
    T, U1, _ = x.shape
    blank_occ = torch.from_numpy(blank_occ).to(x.device)
    label_occ = torch.from_numpy(label_occ).to(x.device)
    G_blank, G_label = blank_occ.sum(-1), label_occ.sum(-1)
    G = (G_blank + G_label)[..., None]
    grad_x = torch.softmax(x, dim=-1) * G
    grad_x[..., blank] -= G_blank
    for u in range(U1 - 1):
        grad_x[:, u, int(target[u])] -= G_label[:, u]
    grad_z = torch.softmax(z, dim=-1) * G - (blank_occ + label_occ)
    return grad_x, grad_z


def tdt_loss(token_logits, duration_logits, targets, logit_lengths, target_lengths, blank, durations, sigma=0.0):
    """Loss and gradients of a batch, sample by sample, each from its own valid nodes only."""
    B, max_T, max_U1, V = token_logits.shape
    D, device = len(durations), token_logits.device
    double = {"dtype": torch.float64, "device": device}
    result = Result(
        losses=torch.zeros(B, **double),
        grad_tokens=torch.zeros(B, max_T, max_U1, V, **double),
        grad_durations=torch.zeros(B, max_T, max_U1, D, **double),
        ll=torch.zeros(B, **double),
        alpha=torch.zeros(B, max_T, max_U1, **double),
        beta=torch.zeros(B, max_T, max_U1, **double),
    )
    for b in range(B):
        T, U = int(logit_lengths[b]), int(target_lengths[b])
        x, z = token_logits[b, :T, : U + 1].detach(), duration_logits[b, :T, : U + 1].detach()
        target = targets[b, :U].cpu()
        lp = log_probs(x, z, target, blank, sigma)
        nodes, blank_occ, label_occ = tdt_lattice(lp, durations)
        grad_x, grad_z = gradient(x, z, target, blank, blank_occ, label_occ)
        feasible = nodes.ll != -np.inf
        result.ll[b] = nodes.ll
        result.losses[b] = -nodes.ll
        result.alpha[b, :T, : U + 1] = torch.from_numpy(nodes.alpha).to(device)
        result.beta[b, :T, : U + 1] = torch.from_numpy(nodes.beta).to(device)
        if feasible:
            result.grad_tokens[b, :T, : U + 1] = grad_x
            result.grad_durations[b, :T, : U + 1] = grad_z
    return result


def enumerate_alignments(T, U, durations):
    """Every alignment of a tiny lattice, as a list of arcs (t, u, is_label, i)."""

    def walk(t, u, path):
        for i, d in enumerate(durations):
            if d > 0 and t + d == T and u == U:
                yield [*path, (t, u, False, i)]
            if d > 0 and t + d < T:
                yield from walk(t + d, u, [*path, (t, u, False, i)])
            if u < U and t + d < T:
                yield from walk(t + d, u + 1, [*path, (t, u, True, i)])

    if T > 0:
        yield from walk(0, 0, [])


def brute_force(lp, durations):
    """LL, blank_occ and label_occ as sums over all alignments; the occupancy of an arc is the probability of the alignments that use it."""
    T, U1 = lp.blank.shape
    paths = list(enumerate_alignments(T, U1 - 1, durations))
    occ = np.zeros((2, T, U1, len(durations)))
    if not paths:
        return -np.inf, occ[0], occ[1]
    scores = np.array(
        [sum((lp.label if label else lp.blank)[t, u] + lp.dur[t, u, i] for t, u, label, i in path) for path in paths]
    )
    ll = logsumexp(scores, axis=0)
    for path, score in zip(paths, scores):
        for t, u, label, i in path:
            occ[int(label), t, u, i] += np.exp(score - ll)
    return float(ll), occ[0], occ[1]
