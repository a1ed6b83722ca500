"""Valid calls of every public function, each drawn from its seed alone, held against the float64 oracle.

`check(kernel, seed, device)` draws one and raises AssertionError where the kernel is wrong. Most calls are small; a tail has one large dimension, or
all that `ELEMENTS` and `ORACLE_STEPS` of draws.py allow: the oracle, not the kernel, is what takes the time.

Tolerances are those of support/tolerances.py, from the log-probabilities of the arcs that matter: how large the logits are does not count.

A case is what its draws make of it, in their order: what is new is drawn last, or in the place of something else, so that old seeds stay what they are.
"""

from support.fuzzing.dense import check_alignment, check_loss, draw_call
from support.fuzzing.draws import Draw
from support.fuzzing.fused import check_fused

FUNCTIONS = {
    "tdt_loss": 5,
    "tdt_loss_joint": 5,
    "rnnt_loss": 4,
    "TDTLoss": 1,
    "tdt_align": 1,
    "tdt_align_joint": 1,
    "rnnt_align": 1,
    "tdt_loss_fused_joint": 2,
    "rnnt_loss_fused_joint": 1,
}  # and how often each is drawn


def check(kernel, seed: str, device: str, skip_fused: bool = False) -> str:
    """Runs the case of a seed; returns what it is, raises AssertionError with that where the kernel is wrong."""
    draw = Draw(f"valid/{seed}")
    function = draw.choices(list(FUNCTIONS), list(FUNCTIONS.values()))[0]
    if "fused" in function:
        if skip_fused:
            return f"{function}, left out"
        return check_fused(kernel, draw, function, device)
    case = draw_call(draw, function)
    try:
        (check_alignment if "align" in function else check_loss)(kernel, case, device)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
    return str(case)
