"""A fixed slice of the fuzzer (fuzz.py), and every case that has found something: see there for how to run one again."""

from argparse import Namespace

import fuzz
import fuzz_malformed
import fuzz_valid
import numpy as np
import pytest

SLICE = {"valid": 400, "malformed": 1500}

# case of seed 0: what was wrong
VALID = {
    13: "empty logits whose last dimension has a stride were refused (tdt_align)",
    25: "the same, rnnt_loss without frames",
    124: "the same, tdt_loss_joint of an empty batch",
    285: "the same, layers.TDTLoss",
    194: "overlapping windows: the gradient went to wrong places, and other ones each time",
    244: "overlapping windows, float16: the gradient went to wrong places",
    356: "overlapping windows, two tensors: the gradient went to wrong places",
}
MALFORMED = {
    4: "sigma = 1e9 was a path that the lattice cannot represent, taken for none",
    133: "sigma = -1e7 overflowed the exponent of a weight",
    375: "sigma = -inf gave a number",
    335: "sigma = NaN went unnoticed",
    16: "targets on the meta device: an exception that did not name them",
    204: "the same, logit_lengths",
    18: "a sparse weight: an exception from inside the fused loss",
    20: "sparse lengths: an exception that did not name them",
    22: "sparse logits: an exception that did not name them",
    64: "max_tile_bytes = inf: OverflowError",
    272: "fastemit_lambda = 10**400: OverflowError",
    121: "a label beyond the vocabulary, set behind torch's back before backward: wrote before the row",
    131: "the same, tdt_loss with a label of -1",
    265: "the same, tdt_loss_joint",
    382: "the same, a label of -2**40",
    154: "op log_probs with targets of no dimension: an exception that said nothing",
    485: "the same, target_lengths",
    809: "op occupancy with ll of no dimension: an exception that said nothing",
}


@pytest.mark.parametrize("case", VALID, ids=lambda case: f"case {case}")
def test_valid_cases_that_were_wrong_once(kernel, device, case):
    with np.errstate(all="ignore"):
        fuzz_valid.check(kernel, f"0/{case}", device)


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: f"case {case}")
def test_malformed_cases_that_were_wrong_once(kernel, device, case):
    fuzz_malformed.check(kernel, f"0/{case}", device)


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
