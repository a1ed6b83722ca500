"""Losses and gradients that are known without any implementation: closed forms for equal logits, and published numbers.

With all logits zero every arc has the probability q = exp(-sigma) / (V D), or exp(-sigma) / V for RNN-T, so a loss counts alignments.
"""

from math import comb, exp, inf, lgamma, log

# durations [0, 1, 2], sigma 0.05; B, T, U, V = 1, 3, 1, 4; blank 3, target [0], all logits 0.
PUBLISHED_LOSS = 4.155739
PUBLISHED_GRADIENT = {  # (t, u): token logits, then duration logits
    (0, 0): [-0.64962804, 0.25, 0.25, 0.14962798, 0.2672583, -0.16792619, -0.09933221],
    (2, 1): [0.13388914, 0.13388914, 0.13388914, -0.40166742, 0.17851885, -0.35703772, 0.17851885],
}

# durations [0, 1]: T, U, V, sigma, loss
DURATIONS_0_1 = [
    (5, 3, 7, 0.05, 11.600568),
    (4, 2, 5, 0.0, 7.751725),
    (3, 1, 5, 0.0, 6.074846),
    (4, 0, 5, 0.0, 9.210340),
    (1, 3, 7, 0.0, 10.556229),
]

# RNN-T; T, U, V = 2, 1, 4; blank 0, target [1], all logits 0: the gradient at (t, u).
RNNT_GRADIENT = [
    [[-0.25, -0.25, 0.25, 0.25], [-0.375, 0.125, 0.125, 0.125]],
    [[0.125, -0.375, 0.125, 0.125], [-0.75, 0.25, 0.25, 0.25]],
]


def log_comb(n, k):
    """Exact for small numbers; for large ones to about 1e-15 of the largest logarithm in it."""
    return log(comb(n, k)) if n < 3000 else lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def loss_of_rnnt(T, U, V, sigma=0.0):
    """T blanks and U labels, of which the last is a blank."""
    return (T + U) * (log(V) + sigma) - log_comb(T + U - 1, U)


def loss_of_durations_1(T, U, V, sigma=0.0):
    """The final blank is forced; the labels take U of the other T - 1 frames."""
    return T * (log(V) + sigma) - log_comb(T - 1, U) if U <= T - 1 else inf


def loss_of_durations_0_1(T, U, V, sigma=0.0):
    """k of the labels take no frame: T + k arcs, of which the last is the final blank and U of the others are labels."""
    log_q = -sigma - log(2 * V)
    ks = [k for k in range(U + 1) if T + k - 1 >= U]
    terms = [log_comb(T + k - 1, U) + log_comb(U, k) + (T + k) * log_q for k in ks]
    return -max(terms) - log(sum(exp(term - max(terms)) for term in terms))


def loss_without_labels(T, V, D):
    """Durations [0 .. D-1] with T < D: blanks cut T frames into any number of pieces."""
    q = 1 / (V * D)
    return -log(q * (1 + q) ** (T - 1))
