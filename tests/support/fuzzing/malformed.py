"""Malformed calls, each drawn from its seed alone: every one must end in a Python exception that says what is wrong, or in the documented NaN.

`check(kernel, seed, device)` draws one and raises AssertionError where something else happens. A crash is the caller's to notice: fuzz.py runs the cases
in processes of their own.
"""

from support.fuzzing.draws import Draw
from support.fuzzing.spoilt_arguments import gradient_that_does_not_fit, too_large, wrong_argument, wrong_flag
from support.fuzzing.spoilt_backward import changed_behind_torchs_back, changed_in_between, misused_backward
from support.fuzzing.spoilt_ops import wrong_op_argument
from support.fuzzing.spoilt_values import bad_labels, bad_values

FAMILIES = {
    wrong_argument: 50,
    gradient_that_does_not_fit: 1,
    too_large: 2,
    bad_values: 15,
    bad_labels: 12,
    changed_in_between: 6,
    changed_behind_torchs_back: 6,
    misused_backward: 4,
    wrong_op_argument: 27,
    wrong_flag: 3,
}


def check(kernel, seed: str, device: str, skip_fused: bool = False) -> str:
    """Runs the case of a seed; returns what it is, raises AssertionError with that where the outcome is a wrong one."""
    draw = Draw(f"malformed/{seed}")
    family = draw.choices(list(FAMILIES), list(FAMILIES.values()))[0]
    text, verify = family(kernel, draw, device)
    if skip_fused and "fused" in text:
        return f"{text}, left out"
    try:
        verify()
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{text}") from error
    return text
