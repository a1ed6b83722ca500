"""The same call gives the same bits: on any stream, whatever ran before it, launched blocking or not, beside any other samples."""

import os
import subprocess
import sys

import pytest
import torch
from support.batches import make_batch
from support.calls import call, loss_and_grads
from support.comparisons import same_bits

LENGTHS = {"logit_lengths": [40, 33, 17, 40], "target_lengths": [20, 11, 16, 0]}


def drawn(device, seed=0, scale=1.0, **changes):
    shape = {"B": 4, "T": 40, "U": 20, "V": 257, "durations": (0, 1, 2, 3, 4), **LENGTHS, **changes}
    return make_batch(**shape, seed=seed, scale=scale, device=device)


def operands_of(batch, seed=0, H=24):
    """Encoder, decoder, weight and bias of a joint network for the fused loss."""
    generator = torch.Generator().manual_seed(seed)
    B, T, U1, V = batch.token_logits.shape
    sizes = (B, T, H), (B, U1, H), (V + len(batch.durations), H), (V + len(batch.durations),)
    return [torch.randn(size, generator=generator).to(batch.token_logits.device).requires_grad_() for size in sizes]


def everything(kernel, batch, seed=0):
    """Every output and gradient of every public function, by name."""
    out = {}
    for api in ("separate", "joint"):
        outcome = loss_and_grads(kernel, batch, api, omega=0.3, clamp=0.2, return_occupancy=True)
        out |= {f"{api} losses": outcome.losses, f"{api} tokens": outcome.grad_tokens}
        out |= {f"{api} durations": outcome.grad_durations}
        out |= dict(zip((f"{api} occ blank", f"{api} occ label"), outcome.occupancy))
    rnnt = loss_and_grads(kernel, batch.without_durations(), fastemit_lambda=0.1)
    out |= {"rnnt losses": rnnt.losses, "rnnt tokens": rnnt.grad_tokens}
    mean = loss_and_grads(kernel, batch, "joint", reduction="mean_volume")
    out |= {"mean loss": mean.losses, "mean tokens": mean.grad_tokens}
    weight = torch.ones((), device=batch.joint.device, requires_grad=True)
    in_place = call(kernel, batch, [batch.joint * weight], "sum", inplace_grad=True)
    out |= {"in place": torch.autograd.grad(in_place, weight)[0]}
    out |= dict(zip(("frames", "advances", "score"), kernel.tdt_align_joint(*batch.joint_args)))
    operands = operands_of(batch, seed)
    torch.manual_seed(seed)
    loss = kernel.tdt_loss_fused_joint(*operands, *batch.rest, "none", dropout=0.1, max_tile_bytes=1 << 18)
    out |= {"fused losses": loss.detach()}
    names = ("fused encoder", "fused decoder", "fused weight", "fused bias")
    return out | dict(zip(names, torch.autograd.grad(loss.sum(), operands)))


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not same_bits(first[name], second[name])] == []


def litter(device):
    """Leaves NaN in memory that is given back."""
    pieces = [torch.full((n,), torch.nan, device=device) for n in (2**8, 2**12, 2**16, 2**20, 2**24)]
    del pieces


def test_whatever_ran_before(kernel, device):
    batch = drawn(device)
    first = everything(kernel, batch)
    for seed in (1, 2):
        litter(device)
        everything(
            kernel, drawn(device, seed=seed, scale=9.0, dtype=torch.bfloat16, T=70, V=65, logit_lengths=[70] * 4)
        )
        litter(device)
        assert_same_bits(everything(kernel, batch), first)


@pytest.fixture
def deterministic(monkeypatch):
    """torch.use_deterministic_algorithms(True), which fills every new tensor with NaN, or the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_on_the_cpu(kernel, deterministic):
    batch = drawn("cpu")
    assert torch.empty(3).isnan().all()
    strict = everything(kernel, batch)
    torch.use_deterministic_algorithms(False)
    assert_same_bits(everything(kernel, batch), strict)


def test_uninitialized_memory_never_shows(kernel, device, deterministic):
    # Without the matrix products of the fused loss, for which cuBLAS wants a variable in the environment.
    batch = drawn(device, logit_lengths=[40, 0, 2, 33], target_lengths=[20, 11, 16, 0])
    outcomes = [loss_and_grads(kernel, batch, api, return_occupancy=True) for api in ("separate", "joint")]
    outcomes.append(loss_and_grads(kernel, batch.without_durations(), return_occupancy=True))
    for outcome in outcomes:
        for x in (outcome.grad_tokens, outcome.grad_durations, *outcome.occupancy):
            assert x.isfinite().all()
        assert (outcome.losses[[0, 2, 3]].isfinite() | (outcome.losses[[0, 2, 3]] == torch.inf)).all()
    frames, advances, score = kernel.tdt_align_joint(*batch.joint_args)
    assert frames.max() < 40 and advances.max() <= 4 and not score.isnan().any()


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_values_of_other_samples_never_matter(kernel, device, sample):
    # With the lengths and labels as they are: those of the fused loss decide which row of a matrix product a node gets.
    batch, other = drawn(device), drawn(device, seed=1, scale=30.0)
    for name in ("token_logits", "duration_logits"):
        getattr(other, name)[sample] = getattr(batch, name)[sample]
    other = other.replace(targets=batch.targets)
    first, second = everything(kernel, batch), everything(kernel, other)
    per_sample = [name for name, x in first.items() if x.dim() > 0 and "fused" not in name and "mean" not in name]
    assert len(per_sample) >= 15
    for name in per_sample:
        assert same_bits(first[name][sample], second[name][sample]), name

    operands = operands_of(batch)
    changed = [x.detach().clone() for x in operands_of(batch, seed=1)[:2]] + operands[2:]
    for k in (0, 1):
        changed[k][sample] = operands[k].detach()[sample]
    losses = [kernel.tdt_loss_fused_joint(*x, *batch.rest, "none").detach() for x in (operands, changed)]
    assert same_bits(losses[0][sample], losses[1][sample])
    assert not same_bits(losses[0], losses[1])


@pytest.mark.cuda
def test_any_stream(kernel):
    batch = drawn("cuda")
    first = everything(kernel, batch)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0)]
    outcomes = []
    for stream in streams:  # all at once, beside one another
        with torch.cuda.stream(stream):
            litter("cuda")
            outcomes.append(everything(kernel, batch))
    torch.cuda.synchronize()
    for outcome in outcomes:
        assert_same_bits(outcome, first)


FINGERPRINT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from kernels import get_kernel
from test_determinism import drawn, everything

torch.use_deterministic_algorithms("deterministic" in sys.argv)
kernel = get_kernel("kernels-community/tdt-loss", version=1)
for name, x in everything(kernel, drawn("cuda")).items():
    print(name, hashlib.sha256(x.cpu().contiguous().numpy().tobytes()).hexdigest())
"""


@pytest.mark.cuda
def test_blocking_launches_and_deterministic_algorithms(kernel):
    def fingerprint(*words, **environment):
        command = [sys.executable, "-c", FINGERPRINT, os.path.dirname(__file__), *words]
        env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain = fingerprint()
    assert plain.count("\n") >= 20
    assert fingerprint(CUDA_LAUNCH_BLOCKING="1") == plain
    assert fingerprint("deterministic") == plain
