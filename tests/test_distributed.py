"""DistributedDataParallel and torchrun: gradients of the whole batch, whatever each process has of it."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support.processes import PROCESSES, SECONDS, devices, run_in_two_processes
from support.small_model import FUNCTIONS, loss_and_gradients, make_model, make_speech
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # float64


def total(value, device):
    value = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(value)
    return value.item()


def loss_of_the_whole_batch(model, inputs, reduction):
    """This process's part of a reduction over the samples of all, for DDP, which takes the mean of the gradients: README's recipe."""
    processes, (_, targets, _, target_lengths) = dist.get_world_size(), inputs
    if reduction in ("mean", "mean_batch"):
        samples = len(targets)
        return model(*inputs, reduction=reduction) * (samples * processes / total(samples, targets.device))
    loss = model(*inputs, reduction="sum") * processes
    return loss if reduction == "sum" else loss / max(1, total(target_lengths.sum(), targets.device))


def assert_ddp_equals_one_process(model, inputs, parts, reduction):
    """`parts`: the samples of each process."""
    expected_loss, expected = loss_and_gradients(model, *inputs, reduction=reduction)
    model.zero_grad(set_to_none=True)
    replica = DistributedDataParallel(model)  # as long as it lives, it sums gradients
    loss = loss_of_the_whole_batch(replica, [x[parts[dist.get_rank()]] for x in inputs], reduction)
    loss.backward()
    assert total(loss.detach(), loss.device) / dist.get_world_size() == pytest.approx(expected_loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")
    return loss


def check_gradients(kernel, rank, device):
    for function in FUNCTIONS:
        model = make_model(kernel, function, device=device, dtype=torch.float64)
        inputs = make_speech(B=5, T=12, U=5, device=device, dtype=torch.float64)
        for reduction in ("mean", "mean_batch", "mean_volume", "sum"):
            assert_ddp_equals_one_process(model, inputs, [[0, 2, 4], [1, 3]], reduction)


@devices
def test_gradients_of_two_processes_are_those_of_one(tmp_path, device):
    run_in_two_processes(check_gradients, tmp_path, device)


def check_no_alignments_and_no_samples(kernel, rank, device):
    for function in FUNCTIONS:
        model = make_model(kernel, function, durations=[0, 2], device=device, dtype=torch.float64)
        # Durations 0 and 2: no alignment for an odd number of frames. RNN-T: none without frames.
        frames = [8, 6, 0, 0] if function.startswith("rnnt") else [8, 6, 7, 1]
        inputs = make_speech(B=4, T=8, U=3, logit_lengths=frames, device=device, dtype=torch.float64)
        for reduction in ("mean", "mean_volume"):
            loss = assert_ddp_equals_one_process(model, inputs, [[0, 1], [2, 3]], reduction)
            assert loss.isinf() == (rank == 1)
        inputs = [x[:2] for x in inputs]
        for reduction in ("mean_volume", "sum"):
            assert_ddp_equals_one_process(model, inputs, [[0, 1], []], reduction)


@devices
def test_a_process_without_alignments_or_samples_hangs_no_other(tmp_path, device):
    """Its gradients are 0, and it takes part in the sum of all."""
    run_in_two_processes(check_no_alignments_and_no_samples, tmp_path, device)


# The training example


def check_example(kernel, rank, device):
    """The model of the example in float64, but for batch norm, which knows the samples of its own process alone."""
    from support.example_model import make_model, shortest_speech
    from support.example_model import train_parakeet as example

    waveforms, texts = shortest_speech(3)
    vocabulary = example.Vocabulary.of(texts)

    def batch_of(part):
        batch = example.make_batch(waveforms[part], texts[part], vocabulary, device)
        return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}

    for fused in (False, True):
        model = make_model(vocabulary).to(device, torch.float64)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.eval()
        if fused:
            kernel.use_fused_loss(model)
        else:
            model.loss_function = kernel.parakeet_tdt_loss
        model(**batch_of(slice(None))).loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
        model.zero_grad(set_to_none=True)
        batch = batch_of(slice(rank, None, PROCESSES))
        weight = example.loss_weight(len(batch["labels"]), device)
        assert weight == pytest.approx([4 / 3, 2 / 3][rank])
        replica = DistributedDataParallel(model)
        (replica(**batch).loss * weight).backward()
        for name, parameter in model.named_parameters():
            # The features are float32, rounded with their batch.
            assert (parameter.grad - expected[name]).norm() <= 1e-6 * expected[name].norm() + 1e-10 * norm, name


@devices
def test_gradients_of_the_training_example(tmp_path, device):
    pytest.importorskip("support.example_model")
    run_in_two_processes(check_example, tmp_path, device)


@devices
def test_the_training_example_under_torchrun(tmp_path, device):
    """Two steps are too few: both processes take them and end, and the first one says that the model has not learnt to read."""
    from support.example_model import EXAMPLES

    script = [str(EXAMPLES / "train_parakeet.py"), "--steps", "2", "--device", device]
    files = ["--output", str(tmp_path / "loss.png"), "--weights", str(tmp_path / "weights.pt")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    process = subprocess.Popen(
        launch + script + files, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert output.count("trained 2 steps") == output.count("word error rate") == 1, output + errors
    assert f"{PROCESSES} processes" in output
    assert errors.count("FAILED: the word error rate is") == 1
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "weights.pt").exists()
