"""The best alignment of a sample from the records of its nodes: by a float64 recursion over arcs, and over all alignments one by one.

Both sum in the order of best(t, u) = weight + best(target), as the op does, so scores can be compared bit by bit. No durations: RNN-T.
"""

from typing import NamedTuple

import numpy as np
import torch

from support import oracle
from support.batches import BLANK_LP, DUR_LP, LABEL_LP


class Alignment(NamedTuple):
    frames: list
    durations: list
    score: float


NO_ALIGNMENT = Alignment([], [], -np.inf)


def arcs_of(durations):
    """(is_label, d, i) of all arcs, the preferred ones first."""
    if not durations:
        return [(True, 0, 0), (False, 1, 0)]
    arcs = [(is_label, d, i) for i, d in enumerate(durations) for is_label in (True, False) if is_label or d > 0]
    return sorted(arcs, key=lambda arc: (not arc[0], arc[1], arc[2]))


def weight_of(record, is_label, i, durations):
    """Log-weight of an arc from a node's record: blank_lp, label_lp, dur_lp."""
    return record[LABEL_LP if is_label else BLANK_LP] + (record[DUR_LP + i] if durations else 0.0)


def alignment_of(path, durations, score):
    """What is said about a path of arcs (t, u, is_label, i)."""
    labels = [(t, durations[i] if durations else 0) for t, _, is_label, i in path if is_label]
    return Alignment([t for t, _ in labels], [d for _, d in labels], score)


def best_by_recursion(records, durations):
    """The best alignment of one sample, from its records (T, U+1, R) in float64."""
    T, U1, _ = records.shape
    if T == 0:
        return NO_ALIGNMENT
    best, choice = {}, {}
    for t in reversed(range(T)):
        for u in reversed(range(U1)):
            best[t, u], choice[t, u] = -np.inf, None
            for is_label, d, i in arcs_of(durations):
                to = (t + d, u + is_label)
                if to[0] < T and to[1] < U1:
                    onward = best[to]
                elif not is_label and to == (T, U1 - 1):
                    onward = 0.0
                else:
                    continue
                score = weight_of(records[t, u], is_label, i, durations) + onward
                if score > best[t, u]:
                    best[t, u], choice[t, u] = score, (is_label, d, i)
    if best[0, 0] == -np.inf:
        return NO_ALIGNMENT
    path, t, u = [], 0, 0
    while t < T:
        is_label, d, i = choice[t, u]
        path.append((t, u, is_label, i))
        t, u = t + d, u + is_label
    return alignment_of(path, durations, best[0, 0])


def best_by_enumeration(records, durations):
    """The same, over all alignments one by one."""
    T, U1, _ = records.shape

    def score_of(path):
        score = 0.0
        for t, u, is_label, i in reversed(path):
            score = weight_of(records[t, u], is_label, i, durations) + score
        return score

    def preference(path):
        return [(not is_label, durations[i] if durations else 0, i) for _, _, is_label, i in path]

    paths = list(oracle.enumerate_alignments(T, U1 - 1, durations))
    scores = [score_of(path) for path in paths]
    top = max(scores, default=-np.inf)
    if top == -np.inf:
        return NO_ALIGNMENT
    return alignment_of(min((p for p, s in zip(paths, scores) if s == top), key=preference), durations, top)


def make_node_lp(batch, dtype=torch.float64):
    """The records of the batch in `dtype`, 0 in the padding."""
    return batch.expected_node_lp.to(dtype, copy=True)


def records_of(batch, node_lp, b):
    T, U = int(batch.logit_lengths[b]), int(batch.target_lengths[b])
    return node_lp[b, :T, : U + 1].double().cpu().numpy()
