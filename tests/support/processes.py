"""Two processes that can talk to each other, as torchrun starts them: on the CPU with gloo, on two GPUs with nccl.

A process that waits in vain for the other one fails the test after a while.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROCESSES = 2
SECONDS = 180  # until two processes count as hanging

devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.two_gpus])]
)


def run_in_two_processes(work, tmp_path, device, *args):
    """work(kernel, rank, device, *args) in each of two processes that can talk to each other."""
    context = mp.start_processes(
        _process, (work, str(tmp_path / "rendezvous"), device, args), PROCESSES, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _process(rank, work, rendezvous, device, args):
    from kernels import get_kernel

    torch.set_num_threads(1)
    device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    work(get_kernel("kernels-community/tdt-loss", version=1), rank, device, *args)
    dist.destroy_process_group()
