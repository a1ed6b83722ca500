"""Nothing waits for ever: lengths and labels that another stream rewrites while the kernels read them. And the widest rows there are.

The losses run in a process of their own, which must end in time: a kernel that spins cannot be stopped in any other way. They run over
lattices of many strips, where one strip waits for what another one writes, while a second stream writes to the same lengths and labels
without a pause. What such a call returns is not defined; that it returns is.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from support.comparisons import same_bits

SECONDS = 60  # until the process counts as hanging; it starts in a quarter of that
RACE = 8.0  # seconds that the streams run
B, T, U, V, DURATIONS = 4, 300, 200, 33, (0, 1, 2, 3, 4)


# In the process


def numbers_to_write(kind, dtype):
    """(targets, logit_lengths, target_lengths), one after the other: all of them valid, or some of them out of range."""
    generator = torch.Generator().manual_seed(0)

    def draw(least, most, *shape):
        return torch.randint(least, most + 1, shape, generator=generator)

    largest = torch.iinfo(dtype).max
    sets = []
    for k in range(32):
        targets, frames, labels = draw(1, V - 1, B, U), draw(1, T, B), draw(0, U, B)
        if k % 4 == 0:
            frames.fill_(T)
            labels.fill_(U)
        if kind == "malformed" and k % 2:
            frames[k % B] = (-1, T + 1, largest, -largest)[k // 2 % 4]
            labels[(k + 1) % B] = (-1, U + 1, largest, -largest)[k // 4 % 4]
            targets[(k + 2) % B, draw(0, U - 1, 1)] = (-1, V, largest, -largest)[k // 8 % 4]
        if kind == "valid" and k % 2:
            frames[k % B], labels[(k + 1) % B] = 0, 0
        sets.append([x.to("cuda", dtype) for x in (targets, frames, labels)])
    return sets


def writer(targets_of_writing, sets):
    """A graph of a thousand copies: one replay writes for milliseconds and needs no host."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for k in range(400):
            for into, source in zip(targets_of_writing, sets[k % len(sets)]):
                into.copy_(source)
    return graph, stream


def calls(kernel, logits, labels):
    """Each call forward, and backward where it has one."""
    durations = list(DURATIONS)

    def with_gradient(loss):
        return loss, torch.autograd.grad(loss.sum(), logits)[0]

    def slices():
        return logits[..., :V], logits[..., V:]

    return {
        "TDT": lambda: with_gradient(kernel.tdt_loss_joint(logits, *labels, 0, durations, reduction="none")),
        "TDT, slices": lambda: with_gradient(kernel.tdt_loss(*slices(), *labels, 0, durations)),
        "RNN-T": lambda: with_gradient(kernel.rnnt_loss(slices()[0], *labels, 0, "mean_volume")),
        "both lattices": lambda: with_gradient(kernel.tdt_loss_joint(logits, *labels, 0, durations, omega=0.3)),
        "forward alone": lambda: (kernel.rnnt_loss(logits.detach(), *labels, 0, "none"),),
        "occupancy": lambda: tuple(kernel.rnnt_loss(logits, *labels, 0, return_occupancy=True)[1]),
        "TDT alignment": lambda: tuple(kernel.tdt_align_joint(logits, *labels, 0, durations)),
        "RNN-T alignment": lambda: tuple(kernel.rnnt_align(logits, *labels, 0)),
    }


def bits(kernel, logits, labels):
    return {name: [x.detach().cpu() for x in call()] for name, call in calls(kernel, logits, labels).items()}


def race(kind, dtype):
    """Runs the calls while the other stream writes; then once more, undisturbed, with the numbers from before."""
    from kernels import get_kernel

    faulthandler.dump_traceback_later(SECONDS - 5, exit=True)
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(B, T, U + 1, V + len(DURATIONS), generator=generator).cuda().requires_grad_()
    sets = numbers_to_write(kind, dtype)
    labels = [x.clone() for x in sets[0]]
    expected = bits(kernel, logits, labels)
    graph, stream = writer(labels, sets)
    torch.cuda.synchronize()
    stop, writes = threading.Event(), [0]

    def write():
        with torch.cuda.stream(stream):
            while not stop.is_set():
                graph.replay()
                stream.synchronize()
                writes[0] += 1

    thread = threading.Thread(target=write)
    thread.start()
    steps, end = 0, time.monotonic() + RACE
    racing = calls(kernel, logits, labels)
    while time.monotonic() < end:
        for call in racing.values():
            call()
        torch.cuda.current_stream().synchronize()
        steps += 1
    stop.set()
    thread.join()
    torch.cuda.synchronize()
    for into, source in zip(labels, sets[0]):
        into.copy_(source)
    actual = bits(kernel, logits, labels)
    for name, tensors in expected.items():
        for ours, theirs in zip(actual[name], tensors):
            assert same_bits(ours, theirs), name
    print(f"{steps} steps, {writes[0]} replays")
    assert steps >= 20 and writes[0] >= 20, "too slow to be a race"


# In the test


@pytest.mark.cuda
@pytest.mark.parametrize("kind, dtype", [("malformed", "int64"), ("malformed", "int32"), ("valid", "int64")])
def test_lengths_and_labels_rewritten_while_the_kernels_run(kind, dtype):
    process = subprocess.Popen(
        [sys.executable, __file__, kind, dtype],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TDT_LOSS_CHECK": "0"},
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {SECONDS} s: a kernel waits for what will not come")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    assert "steps" in output


# The widest rows

GIB = 2**30


def wide_logits(columns, dtype):
    """(1, 2, 2, columns) zeros, and memory for the gradient that holds something else before it is written."""
    needed = 2 * 4 * columns * dtype.itemsize + 2 * GIB
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB")
    logits = torch.zeros(1, 2, 2, columns, dtype=dtype, device="cuda").requires_grad_()
    del_me = torch.empty_like(logits).fill_(7.0)
    address = del_me.data_ptr()
    del del_me
    return logits, address


def is_zero(row):
    return not any(piece.any() for piece in row.split(1 << 27))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name, columns", [("rnnt_loss", 2**30 + 8), ("rnnt_loss", 2**30), ("tdt_loss_joint", 2**30 + 3)]
)
def test_padding_of_rows_of_a_billion_columns(kernel, name, columns):
    """One valid node of four: of the other three's 2^32 entries every one is written."""
    logits, address = wide_logits(columns, torch.float16)
    durations = [1, 2] if name.startswith("tdt") else []
    lengths = (torch.zeros(1, 1, dtype=torch.int64, device="cuda"), torch.tensor([1]).cuda(), torch.tensor([0]).cuda())
    try:
        loss = getattr(kernel, name)(logits, *lengths, 0, *([durations] if durations else []), reduction="sum")
        (grad,) = torch.autograd.grad(loss, logits)
        expected = torch.tensor(float(columns - len(durations))).log() + (torch.tensor(2.0).log() if durations else 0)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert grad.data_ptr() == address  # where the sevens were
        assert grad[0, 0, 0, 0] == -1 and is_zero(grad[0, 0, 0, 1 : columns - len(durations)])  # 2^-30 is 0 in float16
        for padding in (grad[0, 0, 1], grad[0, 1, 0], grad[0, 1, 1]):
            assert is_zero(padding)
    finally:
        del logits
        grad = None
        torch.cuda.empty_cache()


@pytest.mark.parametrize("columns", [2**31 - 4, 2**31 - 8, 2**31 + 5])
@pytest.mark.parametrize("name", ["rnnt_loss", "tdt_loss_joint"])
def test_more_columns_than_an_index_can_count(kernel, device, columns, name):
    """Refused before anything is read: memory that nobody touches is no memory on the host."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * columns + GIB:
        pytest.skip("needs 5 GiB")
    logits = torch.empty(1, 1, 1, columns, dtype=torch.float16, device=device).requires_grad_()
    labels = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(
        RuntimeError, match=rf"at most {2**31 - 1 - 2**16} tokens and durations are supported, got {columns}"
    ):
        getattr(kernel, name)(logits, *labels, 0, *([[1, 2]] if name.startswith("tdt") else []))


if __name__ == "__main__":
    race(sys.argv[1], getattr(torch, sys.argv[2]))
