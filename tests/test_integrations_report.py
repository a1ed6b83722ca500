"""`info()` and the log: which path ran, said once for each function, at next to no cost."""

import logging
import subprocess
import sys
import time

import pytest
import torch
from support.batches import make_batch

SCRIPT = """
import logging, torch
from kernels import get_kernel
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.WARNING)
logging.getLogger("tdt_loss").setLevel("INFO")
kernel = get_kernel("kernels-community/tdt-loss", version=1)
labels = (torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]))
for dtype in (torch.float32, torch.bfloat16):
    kernel.rnnt_loss(torch.zeros(1, 2, 2, 4, dtype=dtype), *labels, 3)
    kernel.tdt_loss_fused_joint(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(6, 3), None, *labels, 3, [0, 1])
"""


def test_one_line_for_each_function_of_a_process():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = [line for line in run.stderr.splitlines() if line.startswith("tdt_loss ")]
    assert len(lines) == 2
    assert lines[0].startswith("tdt_loss INFO rnnt_loss: dense, on logits; cpu kernels of _tdt_loss_")
    assert lines[0].endswith("; float32")
    assert lines[1].startswith("tdt_loss INFO tdt_loss_fused_joint: fused, without logits; cpu kernels of")


def test_every_loss_and_alignment_is_recorded(kernel):
    batch = make_batch(B=2, T=5, U=2, V=6)
    kernel.tdt_loss(batch.token_logits, batch.duration_logits, *batch.rest)
    kernel.tdt_loss_joint(batch.joint, *batch.rest)
    kernel.rnnt_loss(batch.token_logits, *batch.lengths, batch.blank)
    ran = kernel.info()["ran"]
    for name in ("tdt_loss", "tdt_loss_joint", "rnnt_loss"):
        assert ran[name].startswith("dense, on logits; ")


def test_info(kernel):
    info = kernel.info()
    assert info["build"] == kernel.loss.ops.name
    assert info["backend"] in ("cpu", "cuda") and f"_{info['backend']}_" in info["build"]
    assert info["torch"] == torch.__version__
    assert info["devices"]["cpu"] is True
    assert len(info["devices"]) == 1 + torch.cuda.device_count()
    info["ran"]["nonsense"] = "x"
    assert "nonsense" not in kernel.info()["ran"]


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((9, 0), ["9.0"], True),
        ((8, 6), ["8.0"], True),
        ((8, 0), ["8.6"], False),
        ((12, 0), ["9.0+PTX"], True),
        ((12, 0), ["9.0"], False),
        ((7, 5), ["8.0+PTX", "9.0a"], False),
    ],
)
def test_which_gpus_a_build_runs_on(kernel, capability, archs, runs):
    assert kernel.report._runs_on(capability, archs) is runs


def test_why_a_fallback_was_taken(kernel, caplog, monkeypatch):
    from support.tiny_transducers import MODELS, make_transducer
    from support.tiny_transducers import make_batch as make_speech

    monkeypatch.setattr(kernel.report, "_ran", {})
    model, batch = make_transducer(MODELS[0]), make_speech(MODELS[0])
    model.joint.head.register_forward_hook(lambda module, args, output: output)
    kernel.use_fused_loss(model)
    with caplog.at_level(logging.INFO, logger="tdt_loss"), pytest.warns(UserWarning):
        model(**batch)
        model(**batch)
    (line,) = [record.message for record in caplog.records if record.message.startswith("use_fused_loss")]
    assert line.startswith(f"use_fused_loss({MODELS[0]}): dense, on logits; ") and line.endswith("its head has hooks")


def test_the_second_report_costs_next_to_nothing(kernel):
    """Against the call that it stands in: a thousandth of the smallest loss would already be generous."""
    batch = make_batch(B=1, T=2, U=1, V=4)
    report, tensor = kernel.report.report, batch.token_logits
    kernel.rnnt_loss(tensor, *batch.lengths, batch.blank)

    def seconds(call, times):
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(times):
                call()
            best = min(best, (time.perf_counter() - start) / times)
        return best

    of_report = seconds(lambda: report("rnnt_loss", tensor), 2000)
    assert of_report < 0.05 * seconds(lambda: kernel.rnnt_loss(tensor, *batch.lengths, batch.blank), 200)
