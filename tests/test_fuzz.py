"""A fixed slice of the fuzzer (fuzz.py), and every case that has found something: see there for how to run one again."""

from argparse import Namespace

import fuzz
import numpy as np
import pytest
from support.fuzzing import malformed, valid

SLICE = {"valid": 400, "malformed": 1500}

# What was wrong once, and the cases of seed 0 that had found it.
VALID = {
    "empty logits whose last dimension has a stride were refused (tdt_align)": 13,
    "empty logits whose last dimension has a stride were refused (rnnt_loss without frames)": 25,
    "empty logits whose last dimension has a stride were refused (tdt_loss_joint of an empty batch)": 124,
    "empty logits whose last dimension has a stride were refused (layers.TDTLoss)": 285,
    "overlapping windows: the gradient went to wrong places, and other ones each time": 194,
    "overlapping windows, float16: the gradient went to wrong places": 244,
    "overlapping windows, two tensors: the gradient went to wrong places": 356,
}
MALFORMED = {
    "sigma = 1e9 was a path that the lattice cannot represent, taken for none": 4,
    "sigma = -1e7 overflowed the exponent of a weight": 133,
    "sigma = -inf gave a number": 375,
    "sigma = NaN went unnoticed": 335,
    "targets on the meta device: an exception that did not name them": 16,
    "logit_lengths on the meta device: an exception that did not name them": 204,
    "a sparse weight: an exception from inside the fused loss": 18,
    "sparse lengths: an exception that did not name them": 20,
    "sparse logits: an exception that did not name them": 22,
    "max_tile_bytes = inf: OverflowError": 64,
    "fastemit_lambda = 10**400: OverflowError": 272,
    "op log_probs with targets of no dimension: an exception that said nothing": 154,
    "op log_probs with target_lengths of no dimension: an exception that said nothing": 485,
    "op occupancy with ll of no dimension: an exception that said nothing": 809,
}
CHANGED_BEHIND_TORCHS_BACK = {
    "a label beyond the vocabulary (rnnt_loss): wrote before the row": 121,
    "a label of -1 (tdt_loss): wrote before the row": 131,
    "a label beyond the vocabulary (tdt_loss_joint): wrote before the row": 265,
    "a label of -2**40: wrote before the row": 382,
}


@pytest.mark.parametrize("case", VALID.values(), ids=VALID.keys())
def test_valid_cases_that_were_wrong_once(kernel, device, case):
    with np.errstate(all="ignore"):
        valid.check(kernel, f"0/{case}", device)


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_cases_that_were_wrong_once(kernel, device, case):
    malformed.check(kernel, f"0/{case}", device)


@pytest.mark.parametrize("case", CHANGED_BEHIND_TORCHS_BACK.values(), ids=CHANGED_BEHIND_TORCHS_BACK.keys())
def test_labels_changed_behind_torchs_back_that_did_harm_once(kernel, device, case):
    malformed.check(kernel, f"0/{case}", device)


@pytest.mark.parametrize("kind", SLICE)
def test_slice(device, kind):
    options = Namespace(device=device, seed=1, threads=1, skip_fused=False)
    failures = fuzz.run_batch(kind, options, 0, SLICE[kind])
    assert not failures, "\n".join(
        f"{failure['failure']}\n  again: {fuzz.reproduction(kind, device, 1, failure['case'])}" for failure in failures
    )


def test_a_crash_is_its_cases_own(monkeypatch, tmp_path):
    # A fuzzer whose third case ends the process.
    script = tmp_path / "fuzz.py"
    script.write_text(
        "import sys, os\n"
        "value = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
        "for k in range(int(value('--first')), int(value('--first')) + int(value('--cases'))):\n"
        "    open(value('--progress'), 'w').write(str(k))\n"
        "    if k == 3: os.abort()\n"
    )
    monkeypatch.setattr(fuzz, "__file__", str(script))
    failures = fuzz.run_batch("valid", Namespace(device="cpu", seed=1, threads=1, skip_fused=False), 1, 5)
    assert [failure["case"] for failure in failures] == [3] and "SIGABRT" in failures[0]["failure"]
