"""What the whole suite shares: how the kernel is loaded, the devices, one `make_batch`, one table of tolerances.

The kernel comes from `kernels.get_kernel` and nowhere else. Unless LOCAL_KERNELS says otherwise, that resolves to the build in this repository.
"""

import os
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
os.environ.setdefault("LOCAL_KERNELS", f"kernels-community/tdt-loss={REPO}")  # read when kernels is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost seconds where another process holds a core
sys.path.insert(0, str(Path(__file__).resolve().parent))

import hypothesis  # noqa: E402
import oracle  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# The official builder's CI has build.toml, the sources, and the Python files of torch-ext and tests, and nothing else.
WHOLE_REPOSITORY = (Path(__file__).resolve().parent.parent / "benchmarks").is_dir()
collect_ignore = [] if WHOLE_REPOSITORY else ["test_fuzz.py", "test_readme.py"]

# Derandomized: a test suite that guards a commit must give the same verdict twice.
hypothesis.settings.register_profile("suite", derandomize=True, max_examples=25, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset for a quick check of a build, under 60 s")
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "two_gpus: needs two NVIDIA GPUs")
    config.addinivalue_line("markers", "whole_repository: needs files that the official builder's CI lacks")


def pytest_runtest_setup(item):
    if item.get_closest_marker("whole_repository") and not WHOLE_REPOSITORY:
        pytest.skip("needs the whole repository")
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="session")
def kernel():
    from kernels import get_kernel

    return get_kernel("kernels-community/tdt-loss", version=1)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture(params=["separate", "joint"])
def api(request):
    """Token and duration logits as two tensors (tdt_loss), or as one (tdt_loss_joint)."""
    return request.param


@dataclass(frozen=True)
class Tolerance:
    """Largest error against float64, from the same (rounded) logits.

    `log_prob` is of a log-probability, for every nat in it and one nat more. `loss` and `grad` are times the condition of a sample, which says how far
    such errors carry (oracle.condition), `loss` beside that relative to the loss: see `loss_limit` and `grad_limit`. None of them knows how large the
    logits are. `lattice` is the relative error of alpha, beta and LL from given log-probabilities; `rounding`, relative too, is the one rounding of a
    gradient to the dtype of the logits. test_logprobs.py and test_loss.py measure plain torch beside it: in float32 it errs as much or more.
    """

    log_prob: float
    lattice: float
    loss: float
    grad: float
    rounding: float


_DOUBLE = Tolerance(log_prob=2e-15, lattice=1e-13, loss=2e-15, grad=2e-15, rounding=0.0)
_SINGLE = Tolerance(log_prob=5e-7, lattice=2e-7, loss=2.5e-7, grad=2.5e-7, rounding=0.0)  # 2**-24 is 6e-8
TOLERANCE = {
    torch.float64: _DOUBLE,
    torch.float32: _SINGLE,
    torch.bfloat16: replace(_SINGLE, rounding=2**-8),
    torch.float16: replace(_SINGLE, rounding=2**-11),
}
# Durations of every kind.
DURATIONS = {
    "RNN-T": (),
    "one frame": (1,),
    "zero and one": (0, 1),
    "parakeet": (0, 1, 2, 3, 4),
    "no zero": (1, 2),
    "even only": (2, 4),
    "a gap": (0, 4),
    "descending": (4, 3, 2, 1, 0),
    "shuffled": (2, 0, 3, 1),
    "duplicates": (1, 0, 1, 2, 2),
    "duplicated zero": (0, 0, 1),
    "long": (0, 1, 9, 17),
    "beyond every frame": (0, 1, 1000, 2**31 - 1, 2**40),
    "64 of them": tuple(range(63, -1, -1)),
}

DTYPES = list(TOLERANCE)

# Fields of a node's record, from the op log_probs.
ROW_SUM, BLANK_LP, LABEL_LP, DUR_LP = 0, 1, 2, 3


@dataclass(frozen=True)
class Batch:
    """Inputs of one call. Without durations (D = 0) it is a batch of rnnt_loss."""

    token_logits: torch.Tensor  # (B, max_T, max_U1, V)
    duration_logits: torch.Tensor  # (B, max_T, max_U1, D)
    targets: torch.Tensor  # (B, max_U)
    logit_lengths: torch.Tensor  # (B,)
    target_lengths: torch.Tensor  # (B,)
    blank: int
    durations: tuple[int, ...]
    sigma: float
    options: dict = field(default_factory=dict)  # omega, fastemit_lambda, clamp, delay_penalty

    replace = replace

    @property
    def lengths(self):
        return self.targets, self.logit_lengths, self.target_lengths

    @property
    def rest(self):
        """What follows the logits in both functions, up to sigma."""
        return *self.lengths, self.blank, list(self.durations), self.sigma

    @property
    def args(self):
        """The arguments of tdt_loss."""
        return self.token_logits, self.duration_logits, *self.rest

    @property
    def joint_args(self):
        """The arguments of tdt_loss_joint."""
        return self.joint, *self.rest

    @property
    def rnnt_args(self):
        """The arguments of rnnt_loss, up to the blank; sigma is a keyword there."""
        return self.token_logits, *self.lengths, self.blank

    def option(self, name):
        return float(self.options.get(name, 0.0))

    def without_durations(self):
        """The RNN-T batch of the same tokens."""
        options = {name: value for name, value in self.options.items() if name != "omega"}
        return self.replace(durations=(), duration_logits=self.duration_logits[..., :0], options=options)

    def op_logits(self, api="separate"):
        """The two logits arguments of an op."""
        if not self.durations:
            return self.token_logits, None
        return (self.token_logits, self.duration_logits) if api == "separate" else (self.joint, None)

    @property
    def op_arcs(self):
        return self.blank % self.token_logits.shape[-1], list(self.durations)

    def loss_op_args(self, api="separate", *, zero_infinity=False, need_grad=True, inplace_grad=False, reduction=0):
        """The arguments of the op loss."""
        options = map(self.option, ("delay_penalty", "omega", "fastemit_lambda", "clamp"))
        flags = (zero_infinity, need_grad, inplace_grad, reduction)
        return (*self.op_logits(api), *self.lengths, *self.op_arcs, self.sigma, *options, *flags)

    def gradient_op_args(self, api, grad_loss, weights, *saved):
        """The arguments of the op gradient; `saved`: node_lp, row_max, ll, alpha_beta."""
        options = map(self.option, ("omega", "fastemit_lambda", "clamp"))
        return (grad_loss, weights, *self.op_logits(api), *self.lengths, *saved, *self.op_arcs, *options)

    def leaves(self):
        """Copies of both logits that require grad."""
        return self.token_logits.clone().requires_grad_(), self.duration_logits.clone().requires_grad_()

    @cached_property
    def joint(self):
        return torch.cat([self.token_logits, self.duration_logits], dim=-1)

    @cached_property
    def valid(self):
        """(B, max_T, max_U1) True at the nodes of the lattice, False in the padding."""
        _, max_T, max_U1, _ = self.token_logits.shape
        t = torch.arange(max_T)[None, :, None] < self.logit_lengths.cpu()[:, None, None]
        u = torch.arange(max_U1)[None, None, :] <= self.target_lengths.cpu()[:, None, None]
        return (t & u).to(self.token_logits.device)

    @cached_property
    def expected(self):
        """Losses, gradients, alpha, beta, LL and occupancies of the oracle."""
        return oracle.tdt_loss(*self.args, **self.options)

    @cached_property
    def expected_node_lp(self):
        """(B, max_T, max_U1, R) float64, the first result of the op log_probs: sum of exp(x - max), blank_lp, label_lp, dur_lp; R is 3 + D, rounded up to 4."""
        D = len(self.durations)
        node_lp = torch.zeros(*self.token_logits.shape[:3], (3 + D + 3) // 4 * 4, dtype=torch.float64)
        for b, (T, U) in enumerate(zip(self.logit_lengths.tolist(), self.target_lengths.tolist())):
            x, z = self.token_logits[b, :T, : U + 1], self.duration_logits[b, :T, : U + 1]
            lp = oracle.log_probs(x, z, self.targets[b, :U], self.blank, self.sigma, self.option("delay_penalty"))
            record = node_lp[b, :T, : U + 1]
            record[..., BLANK_LP], record[..., LABEL_LP] = torch.from_numpy(lp.blank), torch.from_numpy(lp.label)
            record[..., DUR_LP : DUR_LP + D] = torch.from_numpy(lp.dur)
            x = x.double().cpu()
            record[..., ROW_SUM] = (x - x.amax(-1, keepdim=True)).exp().sum(-1)
        return node_lp.to(self.token_logits.device)

    @cached_property
    def expected_row_max(self):
        """(B, max_T, max_U1) float64, its second result: the largest token logit of each row; NaN in the padding."""
        return self.token_logits.double().amax(-1).masked_fill(~self.valid, nan)

    @cached_property
    def penalty(self):
        """What sigma and the delay penalty add to an arc at most, in nats."""
        return abs(self.sigma) + abs(self.option("delay_penalty")) * max(self.valid.shape[1] - 1, 0) / 2


def make_batch(
    B=1,
    T=5,
    U=3,
    V=7,
    durations=(0, 1, 2),
    *,
    logit_lengths=None,
    target_lengths=None,
    blank=0,
    sigma=0.0,
    scale=1.0,
    dtype=torch.float32,
    index_dtype=torch.int64,
    device="cpu",
    seed=0,
    **options,
):
    """Normal logits times `scale` (0: all logits zero), random labels other than blank, full lengths unless given. No durations: RNN-T."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, U + 1, V + len(durations), generator=generator) * scale
    targets = torch.randint(0, max(V - 1, 1), (B, U), generator=generator)
    targets += (targets >= blank % V) & (V > 1)
    token_logits, duration_logits = logits.to(dtype).split([V, len(durations)], dim=-1)
    return Batch(
        token_logits=token_logits.contiguous().to(device),
        duration_logits=duration_logits.contiguous().to(device),
        targets=targets.to(device, index_dtype),
        logit_lengths=torch.tensor([T] * B if logit_lengths is None else logit_lengths, dtype=index_dtype).to(device),
        target_lengths=torch.tensor([U] * B if target_lengths is None else target_lengths, dtype=index_dtype).to(
            device
        ),
        blank=blank,
        durations=tuple(durations),
        sigma=sigma,
        options=options,
    )


@dataclass
class Outcome:
    losses: torch.Tensor  # (B,), or () when reduced
    grad_tokens: torch.Tensor  # (B, max_T, max_U1, V)
    grad_durations: torch.Tensor  # (B, max_T, max_U1, D)
    occupancy: tuple | None = None  # (blank, label), where it was asked for


class PaddedSlices(TorchDispatchMode):
    """Counts the tensors that the backward of a slice makes of the slice's gradient: of the size of the whole, zeros all around it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # What is no plain tensor stands for one, and takes no memory.
        self.count += function is torch.ops.aten.slice_backward.default and type(result) is torch.Tensor
        return result


def call(kernel, batch, logits, reduction="none", **options):
    """One call on one tensor (RNN-T or joint, as the batch has it) or on two, with the batch's own options beside the given ones."""
    options = {**batch.options, **options}
    if len(logits) == 2:
        return kernel.tdt_loss(*logits, *batch.rest, reduction, **options)
    if batch.durations:
        return kernel.tdt_loss_joint(*logits, *batch.rest, reduction, **options)
    return kernel.rnnt_loss(*logits, *batch.rnnt_args[1:], reduction, sigma=batch.sigma, **options)


def loss_and_grads(kernel, batch, api="separate", *, upstream=None, reduction="none", **options):
    """Runs forward and backward as a user would, on leaf tensors with the strides of the batch's own. `api` does not matter to RNN-T."""
    V = batch.token_logits.shape[-1]
    one = batch.joint if batch.durations else batch.token_logits
    two = (batch.token_logits, batch.duration_logits)
    logits = [x.detach().requires_grad_() for x in (two if batch.durations and api == "separate" else (one,))]
    losses, occupancy = call(kernel, batch, logits, reduction, **options), None
    if options.get("return_occupancy"):
        losses, occupancy = losses
    losses.backward(torch.ones_like(losses) if upstream is None else upstream)
    grads = [x.grad for x in logits]
    return Outcome(losses.detach(), *(grads if len(grads) == 2 else (grads[0][..., :V], grads[0][..., V:])), occupancy)


def through_the_ops(kernel, batch, api="separate", zero_infinity=False):
    """Forward and backward without the host checks, so that malformed values reach the kernels on every device."""
    ops, V = kernel.loss.ops, batch.token_logits.shape[-1]
    losses, *saved, weights = ops.loss(*batch.loss_op_args(api, zero_infinity=zero_infinity))
    grad, grad_durations = ops.gradient(*batch.gradient_op_args(api, torch.ones_like(losses), weights, *saved))
    if grad.shape[-1] > V or not batch.durations:
        grad, grad_durations = grad[..., :V], grad[..., V:]
    return Outcome(losses, grad, grad_durations)


def reduced(reduction, losses, target_lengths):
    """The reductions as they are documented."""
    return {
        "none": losses,
        "sum": losses.sum(),
        "mean": (losses / target_lengths.clamp(min=1)).mean(),
        "mean_batch": losses.mean(),
        "mean_volume": losses.sum() / target_lengths.sum().clamp(min=1),
    }[reduction]


def transformers_rnnt_loss():
    """rnnt_loss of the installed transformers; skips where it or torchaudio, which it calls, cannot be loaded."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"needs torchaudio: {error}")
    return pytest.importorskip("transformers.loss.loss_rnnt").rnnt_loss


def assert_log_probs_match(node_lp, batch):
    """The first result of the op log_probs."""
    D, dtype, expected = len(batch.durations), batch.token_logits.dtype, batch.expected_node_lp
    assert node_lp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert node_lp.shape == expected.shape and node_lp.is_contiguous()
    nats = 1 + batch.penalty + expected.abs().nan_to_num(posinf=0.0)
    nats[..., ROW_SUM] = 2 * expected[..., ROW_SUM].nan_to_num()
    assert_close("log-probabilities", node_lp, expected, TOLERANCE[dtype].log_prob * nats)
    assert (node_lp[~batch.valid] == 0).all() and (node_lp[..., DUR_LP + D :] == 0).all()


def assert_row_max_match(row_max, batch):
    """The second."""
    dtype, expected = batch.token_logits.dtype, batch.expected_row_max[batch.valid]
    assert row_max.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert row_max.shape == batch.expected_row_max.shape and row_max.is_contiguous()
    assert_close("max of a row", row_max[batch.valid], expected, 0.0)


def loss_limit(batch):
    """(B,) the largest error of each loss."""
    losses, tolerance = batch.expected.losses, TOLERANCE[batch.token_logits.dtype].loss
    own = losses.abs().nan_to_num(posinf=0.0)
    return tolerance * (batch.expected.condition + own) + oracle_limit(batch)


def grad_limit(batch):
    """(B,) the largest error of a gradient or an occupancy of each sample, before it is rounded to the dtype of the logits."""
    return TOLERANCE[batch.token_logits.dtype].grad * batch.expected.condition + 2 * oracle_limit(batch)


def oracle_limit(batch):
    """(B,) of the oracle's LL, a sum in float64 of as many log-weights as an alignment has arcs, each time rounded to its size."""
    losses, arcs = batch.expected.losses, (batch.logit_lengths.cpu() + batch.target_lengths.cpu()).double()
    return 2**-53 * arcs.to(losses.device) * losses.abs().nan_to_num(posinf=0.0)


def assert_grads_match(outcome, batch, weights=1.0, atol=None):
    """Gradients against the oracle's times `weights`, within `atol` or else what the batch's condition allows; exactly 0 in the padding."""
    tolerance = TOLERANCE[batch.token_logits.dtype]
    weights = torch.as_tensor(weights, dtype=torch.float64, device=batch.token_logits.device).reshape(-1, 1, 1, 1)
    limit = grad_limit(batch).view(-1, 1, 1, 1) * (1 + batch.option("fastemit_lambda")) if atol is None else atol
    limit = limit * weights.abs()
    for name in ("grad_tokens", "grad_durations"):
        actual, expected = getattr(outcome, name), getattr(batch.expected, name) * weights
        assert actual.dtype == batch.token_logits.dtype
        assert (actual[~batch.valid] == 0).all(), f"{name}: not exactly 0 in the padding"
        subnormal = torch.finfo(actual.dtype).tiny * torch.finfo(actual.dtype).eps
        assert_close(name, actual, expected, limit + tolerance.rounding * expected.abs() + subnormal)


def assert_losses_match(losses, batch):
    assert losses.dtype == (torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32)
    assert_close("loss", losses, batch.expected.losses, loss_limit(batch))


def assert_close(name, actual, expected, limit, excused=None):
    """Every entry within its own limit of the expected one; infinities and NaN where they are expected. `excused`: True where anything goes."""
    actual, expected = actual.detach().cpu().double(), expected.cpu().double()
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    limit = torch.as_tensor(limit, dtype=torch.float64).cpu().expand(expected.shape)
    right = (actual == expected) | (actual.isnan() & expected.isnan()) | ((actual - expected).abs() <= limit)
    if excused is not None:
        right |= excused.cpu()
    if not right.all():
        at = tuple((~right).nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int((~right).sum())} of {right.numel()} wrong, first at {list(at)}: {actual[at].item()!r}, "
            f"expected {expected[at].item()!r} within {limit[at].item():.3g}"
        )


def assert_matches(outcome, batch):
    """Losses and gradients against the oracle."""
    assert_losses_match(outcome.losses, batch)
    assert_grads_match(outcome, batch)


def same_bits(first, second):
    """Bitwise equality, NaN and the sign of zero included."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.contiguous().view(as_int), second.contiguous().view(as_int))
    )


def peak_extra_bytes(function, device):
    """The most memory that `function` held at any time on top of what was there before, from torch's allocator."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
