"""benchmarks/end_to_end.py: the same code as on a GPU, on small models; its search for the largest batch; the kernel published before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
BENCHMARKS = REPO / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="needs the whole repository")
METADATA = {"id": "_stand_in", "name": "tdt-loss", "version": 1, "license": "Apache-2.0", "python-depends": []}

# The layer of the kernel published before, on transformers' loss.
STAND_IN = """
import torch

class TDTLoss(torch.nn.Module):
    def forward(self, *arguments):
        from transformers.loss.loss_tdt import tdt_loss

        return tdt_loss(*arguments)
"""


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import end_to_end

        yield end_to_end
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def published_before(tmp_path):
    variant = tmp_path / "earlier" / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "metadata.json").write_text(json.dumps(METADATA | {"backend": {"type": "cpu"}}))
    (variant / "__init__.py").write_text("from . import layers\n")
    (variant / "layers.py").write_text(STAND_IN)
    return tmp_path / "earlier"


def test_tiny_models_on_a_cpu(benchmark, published_before, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "end_to_end.py"), "--tiny", "--device", "cpu"]
    command += ["--earlier", str(published_before), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "cpu-end-to-end.json").read_text())
    found = {(row["model"], row["loss"]): row for row in rows}
    losses = ("transformers", "earlier kernel", "ours, from logits", "ours, fused")
    assert set(found) == {(model, loss) for model in ("tiny TDT", "tiny RNN-T") for loss in losses}
    for (model, loss), row in found.items():
        if model == "tiny TDT" or loss.startswith("ours"):
            assert row["ms"] > 0 and row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["steps"] >= 3
        else:
            assert row["ms"] is None and row["lost"]
        assert row["earlier"] == "earlier" and row["transformers"]


def test_a_build_of_this_kernel_is_not_taken_for_the_one_before(benchmark):
    with pytest.raises(ValueError, match="not of the one published before"):
        benchmark.earlier.load(str(REPO))


@pytest.mark.parametrize("most", [0, 1, 2, 7, 22, 100])
@pytest.mark.parametrize("guess", [1, 2, 9, 21, 22, 23, 64, 300])
def test_largest_batch_from_any_guess(benchmark, most, guess):
    tried = []
    assert benchmark.largest(lambda n: not tried.append(n) and n <= most, guess) == most
    assert min(tried) >= 1 and len(tried) == len(set(tried))


def test_a_near_guess_takes_few_tries(benchmark):
    tried = []
    assert benchmark.largest(lambda n: not tried.append(n) and n <= 22, 22) == 22
    assert tried == [22, 23]


def test_the_guess_is_where_the_line_meets_the_limit(benchmark):
    assert benchmark.guess_from({2: 10, 4: 14}, 30) == 12
    assert benchmark.guess_from({2: 10, 4: 14}, 5) == 1
    assert benchmark.guess_from({2: 10, 4: 10}, 5) == 4


def test_time_covered_by_overlapping_kernels(benchmark):
    assert benchmark.covered([]) == 0
    assert benchmark.covered([(5, 8), (0, 3), (2, 4), (6, 7), (20, 21)]) == 8


def test_the_model_is_afterwards_as_it_was(benchmark, kernel):
    training = benchmark.Training(benchmark.TINY[0], "cpu")
    batch = training.batch(1)
    before, cls = training.value(batch), type(training.model)
    for install in (benchmark.dense_loss, benchmark.fused_loss, benchmark.own_loss):
        with benchmark.using(install, kernel, training.model):
            assert training.value(batch) == pytest.approx(before, rel=1e-4)
        assert type(training.model) is cls and "_loss_function" not in vars(training.model)
