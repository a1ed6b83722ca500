"""Thousands of steps in one process: memory stays, bits stay; errors leave nothing behind; threads and forks."""

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import same_bits

MIB = 2**20
REPO = Path(__file__).resolve().parent.parent


def run_script(script, *args):
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def held(device):
    gc.collect()
    if device == "cpu":
        return resident()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def mixed_steps(kernel, device, seed):
    """One training step of every kind, of shapes that the seed draws; yields what must not change from run to run."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    B, T, U, V = drawn(1, 5), drawn(1, 60), drawn(0, 25), drawn(2, 300)
    durations = [(0, 1, 2, 3, 4), (0, 1), (1, 2, 9), (2,)][drawn(0, 4)]
    dtype = [torch.float32, torch.float16, torch.bfloat16, torch.float64][drawn(0, 4)]
    shape = {"B": B, "T": T, "U": U, "V": V, "dtype": dtype, "device": device, "seed": seed}
    batch = make_batch(durations=durations, **shape)
    rnnt = make_batch(durations=(), **shape)
    yield from vars(loss_and_grads(kernel, batch, "separate", omega=0.25)).values()
    yield from vars(loss_and_grads(kernel, batch, "joint", reduction="mean")).values()
    yield from vars(loss_and_grads(kernel, rnnt, fastemit_lambda=0.1, clamp=0.5)).values()
    yield from loss_and_grads(kernel, batch, return_occupancy=True).occupancy
    yield from kernel.tdt_align_joint(*batch.joint_args)

    H = drawn(1, 20)
    operands = [(B, T, H), (B, U + 1, H), (V + len(durations), H), (V + len(durations),)]
    operands = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in operands]
    loss = kernel.tdt_loss_fused_joint(*operands, *batch.rest, dropout=0.1, max_tile_bytes=1 << 14)
    yield loss.detach()
    yield from torch.autograd.grad(loss, operands)


def test_memory_and_bits_stay_over_mixed_shapes(kernel, device):
    # On the GPU more than 10,000 steps: eight seeds, seven calls each.
    seeds, rounds = 8, 180 if device == "cuda" else 14
    warm = rounds // 3
    first, before = {}, None
    for index in range(rounds):
        if index == warm:
            before = held(device)
        for seed in range(seeds):
            torch.manual_seed(seed)  # of dropout
            outcome = [x for x in mixed_steps(kernel, device, seed) if x is not None]
            if index == 0:
                first[seed] = outcome
            elif index in (1, rounds - 1) or index % 50 == 0:
                assert len(outcome) == len(first[seed])
                assert all(same_bits(x, y) for x, y in zip(outcome, first[seed])), (seed, index)
        del outcome
    growth = held(device) - before
    assert growth <= (8 * MIB if device == "cpu" else 0)


def test_memory_comes_back_when_backward_never_runs(kernel, device):
    batch = make_batch(B=2, T=50, U=20, V=1025, durations=(0, 1, 2), device=device)
    logits = batch.joint.requires_grad_()

    def forward():
        kernel.tdt_loss_joint(logits, *batch.rest, return_occupancy=True)

    for _ in range(10):
        forward()
    before = held(device)
    for _ in range(100):
        forward()
    assert held(device) - before <= (8 * MIB if device == "cpu" else 0)


class Upset(Exception):
    pass


def fails_after_our_backward(kernel, batch):
    leaf = batch.joint.clone().requires_grad_()
    leaf.register_hook(raising)
    return leaf, kernel.tdt_loss_joint(leaf, *batch.rest), {}


def fails_before_our_backward(kernel, batch):
    leaf = batch.joint.clone().requires_grad_()
    loss = kernel.tdt_loss_joint(leaf * 1.0, *batch.rest)
    loss.register_hook(raising)
    return leaf, loss, {}


def fails_for_want_of_a_second_derivative(kernel, batch):
    leaf = batch.joint.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kernel.tdt_loss_joint(leaf, *batch.rest), leaf, create_graph=True)
    return leaf, grad.sum(), {}


def fails_after_in_place_changes(kernel, batch):
    leaf = batch.joint.clone().requires_grad_()
    logits = leaf * 1.0
    loss = kernel.tdt_loss_joint(logits, *batch.rest)
    logits.detach().zero_()
    return leaf, loss, {}


def fails_with_the_wrong_upstream(kernel, batch):
    leaf = batch.joint.clone().requires_grad_()
    return leaf, kernel.tdt_loss_joint(leaf, *batch.rest, reduction="none"), {"gradient": torch.ones(7)}


def raising(grad):
    raise Upset


FAILURES = [
    fails_after_our_backward,
    fails_before_our_backward,
    fails_for_want_of_a_second_derivative,
    fails_after_in_place_changes,
    fails_with_the_wrong_upstream,
]


@pytest.mark.parametrize("fails", FAILURES, ids=[f.__name__ for f in FAILURES])
def test_an_exception_in_backward_leaves_nothing_behind(kernel, device, fails):
    batch = make_batch(B=2, T=40, U=15, V=513, durations=(0, 1, 2), device=device)
    expected = loss_and_grads(kernel, batch, "joint", reduction="mean")

    def attempt():
        leaf, loss, arguments = fails(kernel, batch)
        with pytest.raises((Upset, RuntimeError)):
            loss.backward(**arguments)
        return weakref.ref(leaf)

    for _ in range(3):
        attempt()
    before = held(device)
    leaves = [attempt() for _ in range(30)]
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)
    assert held(device) - before <= (8 * MIB if device == "cpu" else 0)
    outcome = loss_and_grads(kernel, batch, "joint", reduction="mean")
    assert same_bits(outcome.losses, expected.losses) and same_bits(outcome.grad_tokens, expected.grad_tokens)


# Out of memory. Logits of one row, repeated without memory of their own: their gradient cannot be had anywhere.

TOO_LARGE = 2**26, 2**20  # columns, rows: 2^48 bytes


def loss_whose_gradient_does_not_fit(kernel, device):
    V, T = TOO_LARGE
    row = torch.zeros(1, 1, 1, V, device=device, requires_grad=True)
    labels = torch.zeros(1, 0, dtype=torch.int64), torch.tensor([1]), torch.tensor([0])
    return kernel.rnnt_loss(row.expand(1, T, 1, V), *labels, 0)


def logits_whose_lattice_does_not_fit(device, T=2**20, U1=2**10, D=64):
    """A record of 68 numbers for each of 2^30 nodes: 292 GB."""
    logits = torch.zeros(1, 1, 1, 2 + D, device=device).expand(1, T, U1, 2 + D)
    labels = torch.ones(1, U1 - 1, dtype=torch.int64), torch.tensor([1]), torch.tensor([0])
    return logits, labels, list(range(D))


def fails_without_memory(device, function):
    """The message of torch's own error."""
    with pytest.raises(torch.OutOfMemoryError if device == "cuda" else RuntimeError) as error:
        function()
    assert error.value.__cause__ is None and error.value.__suppress_context__
    return str(error.value)


def test_out_of_memory_in_backward_is_the_error_of_torch(kernel, device):
    batch = make_batch(B=2, T=40, U=15, V=513, durations=(0, 1, 2), device=device)
    expected = loss_and_grads(kernel, batch)
    loss = loss_whose_gradient_does_not_fit(kernel, device)
    message = fails_without_memory(device, loss.backward)
    assert ("CUDA out of memory" if device == "cuda" else "can't allocate memory") in message
    del loss
    outcome = loss_and_grads(kernel, batch)
    assert same_bits(outcome.losses, expected.losses) and same_bits(outcome.grad_tokens, expected.grad_tokens)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("grad", [True, False])
def test_out_of_memory_in_forward_is_the_error_of_torch(kernel, device, grad):
    batch = make_batch(B=2, T=40, U=15, V=513, durations=(0, 1, 2), device=device)
    expected = loss_and_grads(kernel, batch)
    logits, labels, durations = logits_whose_lattice_does_not_fit(device)
    logits = logits.requires_grad_(grad)
    before = held(device)
    calls = [
        lambda: kernel.tdt_loss_joint(logits, *labels, 0, durations),
        lambda: kernel.tdt_loss_joint(logits, *labels, 0, durations, return_occupancy=True),
        lambda: kernel.tdt_align_joint(logits, *labels, 0, durations),
    ]
    for function in calls:
        assert "CUDA out of memory" in fails_without_memory(device, function)
        assert held(device) == before
    outcome = loss_and_grads(kernel, batch)
    assert same_bits(outcome.losses, expected.losses) and same_bits(outcome.grad_tokens, expected.grad_tokens)


# A process of its own: memory that others hold in part is memory that torch has to spare.
ALLOCATIONS = """
import gc, sys
sys.path.insert(0, "tests")
import torch
from kernels import get_kernel
from support.batches import make_batch
from support.comparisons import same_bits

kernel, grad = get_kernel("kernels-community/tdt-loss", version=1), sys.argv[1] == "True"
batch = make_batch(B=4, T=600, U=400, V=129, durations=(0, 1, 2, 3, 9), device="cuda")
leaf = batch.joint.requires_grad_(grad)
total = torch.cuda.mem_get_info()[1]

def step():
    loss = kernel.tdt_loss_joint(leaf, *batch.rest)
    return [loss.detach(), *(torch.autograd.grad(loss, leaf) if grad else [])]

expected = step()
for spare in range(2, 650, 12):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + spare * 2**20) / total))
    outcome = None
    try:
        outcome = step()
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome is None or all(same_bits(x, y) for x, y in zip(outcome, expected))
    print("out of memory" if outcome is None else "done")
    outcome = None
    gc.collect()
    assert torch.cuda.memory_allocated() == before
"""


@pytest.mark.cuda
@pytest.mark.parametrize("grad", [True, False])
def test_out_of_memory_at_every_allocation(kernel, grad):
    # With more and more memory: for the records (30 MiB), the lattice (15), its working memory (15), the gradient (490), all.
    done = run_script(ALLOCATIONS, str(grad))
    outcomes = done.stdout.splitlines()
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {"done", "out of memory"}, done.stdout


@pytest.mark.cuda
def test_out_of_memory_of_the_fused_loss(kernel):
    B, T, U, H, V = 1, 2**15, 2**15 - 1, 8, 3
    encoder = torch.zeros(B, T, H, device="cuda", requires_grad=True)
    decoder, weight = torch.zeros(B, U + 1, H, device="cuda"), torch.zeros(V + 64, H, device="cuda")
    labels = torch.ones(B, U, dtype=torch.int64), torch.tensor([1]), torch.tensor([0])
    with pytest.raises(torch.OutOfMemoryError):
        kernel.tdt_loss_fused_joint(encoder, decoder, weight, None, *labels, 0, list(range(64)))
    small = (encoder[:, :4], decoder[:, :1], weight, None, labels[0][:, :0], *labels[1:], 0, list(range(64)))
    assert kernel.tdt_loss_fused_joint(*small).isfinite()


# Threads and processes


def test_threads(kernel, device):
    batches = [make_batch(B=2, T=30, U=9, V=65, durations=(0, 1, 2), device=device, seed=seed) for seed in range(4)]
    expected = [loss_and_grads(kernel, batch, "joint", omega=0.2) for batch in batches]

    def work(index):
        if device == "cpu":
            return loss_and_grads(kernel, batches[index % 4], "joint", omega=0.2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            outcome = loss_and_grads(kernel, batches[index % 4], "joint", omega=0.2)
        stream.synchronize()
        return outcome

    with ThreadPoolExecutor(4) as pool:
        for index, outcome in enumerate(pool.map(work, range(40))):
            for name in ("losses", "grad_tokens", "grad_durations"):
                assert same_bits(getattr(outcome, name), getattr(expected[index % 4], name))


FORK = """
import os, sys
import torch
from torch.utils.data import DataLoader
from kernels import get_kernel

kernel = get_kernel("kernels-community/tdt-loss", version=1)
torch.manual_seed(0)
logits = torch.randn(3, 40, 11, 64 + 3)
rest = torch.randint(1, 64, (3, 10)), torch.tensor([40, 31, 22]), torch.tensor([10, 4, 0]), 0, [0, 1, 2]

def step(_=0):
    leaf = logits.clone().requires_grad_()
    loss = kernel.tdt_loss_joint(leaf, *rest)
    loss.backward()
    return torch.cat([loss.detach().view(1), leaf.grad.flatten()])

class Losses(torch.utils.data.Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, index: step()

expected = step()
for batch in DataLoader(Losses(), num_workers=2, multiprocessing_context="fork"):
    assert torch.equal(batch[0], expected)
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)  # as after any fork: the threads of the parent are not there
    os._exit(0 if torch.equal(step(), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.equal(step(), expected)
"""


def test_forks_of_a_process_that_has_used_the_kernel(kernel):
    run_script(FORK)
