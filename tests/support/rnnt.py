"""Batches of `rnnt_loss`."""

from support.batches import make_batch

RAGGED = {"B": 4, "T": 12, "U": 5, "logit_lengths": [12, 9, 5, 1], "target_lengths": [5, 2, 0, 3]}


def rnnt_batch(**arguments):
    return make_batch(**{"durations": (), **arguments})
