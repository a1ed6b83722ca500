"""`tdt_loss_fused_joint` and `rnnt_loss_fused_joint`: loss and gradients of a joint network whose logits never exist.

What is right: the oracle's loss and gradient of the float64 logits `act(f + g) W^T + b`, taken on by torch's autograd in float64.
"""

from dataclasses import dataclass, field, replace

import oracle
import pytest
import torch
from conftest import peak_extra_bytes, same_bits

NAMES = ("encoder", "decoder", "weight", "bias")
# Largest norm of the error of a gradient, of the norm of the gradient.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
RAGGED = {"logit_lengths": [9, 6, 4, 5], "target_lengths": [4, 2, 0, 3]}


@dataclass(frozen=True)
class Problem:
    """The arguments of a fused loss. No durations: RNN-T."""

    encoder: torch.Tensor  # (B, T, H)
    decoder: torch.Tensor  # (B, U1, H)
    weight: torch.Tensor  # (V + D, H)
    bias: torch.Tensor | None  # (V + D,)
    targets: torch.Tensor
    logit_lengths: torch.Tensor
    target_lengths: torch.Tensor
    blank: int
    durations: tuple[int, ...]
    sigma: float = 0.0
    activation: str = "relu"
    options: dict = field(default_factory=dict)

    replace = replace

    @property
    def operands(self):
        return self.encoder, self.decoder, self.weight, self.bias

    @property
    def labels(self):
        return self.targets, self.logit_lengths, self.target_lengths

    @property
    def vocab(self):
        return len(self.weight) - len(self.durations)

    @property
    def nodes(self):
        return int((self.logit_lengths * (self.target_lengths + 1)).sum())

    @property
    def tile_bytes(self):
        """What one row of a tile takes."""
        padded = (len(self.weight) + 7) // 8 * 8
        return (padded + self.weight.shape[1]) * self.encoder.dtype.itemsize

    def to(self, where):
        moved = {name: x.to(where) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        if isinstance(where, torch.dtype):
            moved = {name: x for name, x in moved.items() if name in NAMES}
        return self.replace(**moved)


def make_problem(
    B=4, T=9, U=4, V=21, H=24, durations=(0, 1, 2, 3), *, dtype=torch.float32, device="cpu", seed=0, scale=1.0, **rest
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N = V + len(durations)
    lengths = [
        torch.tensor(rest.pop(name, [n] * B), dtype=torch.int64)
        for name, n in (("logit_lengths", T), ("target_lengths", U))
    ]
    problem = Problem(
        encoder=normal(B, T, H),
        decoder=normal(B, U + 1, H),
        weight=normal(N, H) * scale / H**0.5,
        bias=normal(N) if rest.pop("bias", True) else None,
        targets=torch.randint(0, V - 1, (B, U), generator=generator),
        logit_lengths=lengths[0],
        target_lengths=lengths[1],
        blank=V - 1,
        durations=durations,
        **rest,
    )
    return problem.to(dtype).to(device)


@dataclass
class Outcome:
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    stats: object = None


def fused(kernel, problem, reduction="none", *, upstream=None, **options):
    """Forward and backward through the kernel, as a user would."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in problem.operands]
    options = {"activation": problem.activation, **problem.options, **options}
    if problem.durations:
        rest = (*problem.labels, problem.blank, list(problem.durations), problem.sigma, reduction)
        loss, stats = kernel.tdt_loss_fused_joint(*leaves, *rest, return_stats=True, **options)
    else:
        options["sigma"] = problem.sigma
        rest = (*problem.labels, problem.blank, reduction)
        loss, stats = kernel.rnnt_loss_fused_joint(*leaves, *rest, return_stats=True, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return Outcome(loss.detach(), {name: x.grad for name, x in zip(NAMES, leaves) if x is not None}, stats)


def logits_of(operands, activation, factors=None):
    encoder, decoder, weight, bias = operands
    hidden = getattr(torch, activation)(encoder[:, :, None] + decoder[:, None])
    return torch.nn.functional.linear(hidden if factors is None else hidden * factors, weight, bias)


def expected(problem, upstream=1.0, factors=None):
    """Losses and gradients of the oracle, in float64. factors: of every hidden unit, (B, T, U1, H)."""
    leaves = [None if x is None else x.detach().double().cpu().requires_grad_() for x in problem.operands]
    logits = logits_of(leaves, problem.activation, factors)
    x, z = logits.detach().split([problem.vocab, len(problem.durations)], dim=-1)
    labels = [label.cpu() for label in problem.labels]
    result = oracle.tdt_loss(x, z, *labels, problem.blank, problem.durations, problem.sigma, **problem.options)
    upstream = torch.as_tensor(upstream, dtype=torch.float64).reshape(-1, 1, 1, 1)
    logits.backward(torch.cat([result.grad_tokens, result.grad_durations], dim=-1) * upstream)
    return Outcome(result.losses, {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None})


def errors(outcome, reference):
    return {
        name: ((outcome.grads[name].double().cpu() - grad).norm() / grad.norm().clamp(min=1e-30)).item()
        for name, grad in reference.grads.items()
    }


def assert_matches(outcome, reference, problem):
    tolerance = TOLERANCE[problem.encoder.dtype]
    torch.testing.assert_close(outcome.loss.double().cpu(), reference.loss, rtol=tolerance, atol=tolerance)
    for name, x in zip(NAMES, problem.operands):
        if x is not None:
            assert outcome.grads[name].dtype == x.dtype and outcome.grads[name].shape == x.shape
    assert all(error <= tolerance for error in errors(outcome, reference).values()), errors(outcome, reference)


def assert_same_bits(first, second):
    assert same_bits(first.loss, second.loss)
    for name, grad in first.grads.items():
        assert same_bits(grad, second.grads[name]), name


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("durations", [(0, 1, 2, 3), ()], ids=["tdt", "rnnt"])
def test_loss_and_gradients(kernel, device, dtype, activation, durations):
    problem = make_problem(durations=durations, activation=activation, sigma=0.05, dtype=dtype, device=device, **RAGGED)
    upstream = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=dtype, device=device)
    outcome = fused(kernel, problem, upstream=upstream)
    assert_matches(outcome, expected(problem, upstream.cpu()), problem)
    assert outcome.stats.valid_rows == problem.nodes == 9 * 5 + 6 * 3 + 4 * 1 + 5 * 4


@pytest.mark.parametrize("H", [1, 5, 8, 36, 640])
@pytest.mark.parametrize("V", [3, 8, 33])
def test_every_width(kernel, device, H, V):
    problem = make_problem(H=H, V=V, durations=(2, 0, 1), device=device, **RAGGED)
    assert_matches(fused(kernel, problem), expected(problem), problem)


@pytest.mark.parametrize(
    "options",
    [
        {"omega": 0.3},
        {"omega": 1.0},
        {"fastemit_lambda": 0.5},
        {"clamp": 0.02},
        {"delay_penalty": 0.2},
        {"omega": 0.4, "fastemit_lambda": 0.1, "clamp": 0.05, "delay_penalty": -0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("durations", [(0, 1, 2, 3), ()], ids=["tdt", "rnnt"])
def test_every_option(kernel, device, options, durations):
    if not durations:
        options = {name: value for name, value in options.items() if name != "omega"}
    problem = make_problem(
        durations=durations, sigma=0.05, options=options, dtype=torch.float64, device=device, **RAGGED
    )
    assert_matches(fused(kernel, problem, max_tile_bytes=20 * problem.tile_bytes), expected(problem), problem)


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum", "none"])
def test_reductions_are_those_of_the_dense_loss(kernel, device, reduction):
    problem = make_problem(dtype=torch.float64, device=device, **RAGGED)
    leaves = [x.requires_grad_() for x in problem.operands]
    dense = kernel.tdt_loss_joint(
        logits_of(leaves, "relu"), *problem.labels, problem.blank, list(problem.durations), reduction=reduction
    )
    dense.sum().backward()
    outcome = fused(kernel, problem, reduction)
    torch.testing.assert_close(outcome.loss, dense.detach(), rtol=1e-13, atol=0)
    for name, leaf in zip(NAMES, leaves):
        torch.testing.assert_close(outcome.grads[name], leaf.grad, rtol=1e-12, atol=1e-14)


def test_without_bias(kernel, device):
    problem = make_problem(bias=False, device=device, **RAGGED)
    outcome = fused(kernel, problem)
    assert set(outcome.grads) == {"encoder", "decoder", "weight"}
    assert_matches(outcome, expected(problem), problem)


def test_strided_inputs(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    strided = problem.replace(
        encoder=problem.encoder.transpose(0, 1).contiguous().transpose(0, 1),
        decoder=problem.decoder.repeat_interleave(2, dim=-1)[..., ::2],
        weight=problem.weight.t().contiguous().t(),
        targets=problem.targets.t().contiguous().t(),
    )
    assert_same_bits(fused(kernel, strided), fused(kernel, problem))


@pytest.mark.parametrize("offset", [1, 4])
def test_inputs_at_any_address(kernel, device, offset):
    problem = make_problem(H=32, dtype=torch.bfloat16, device=device, **RAGGED)

    def moved(x):
        buffer = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
        return buffer[offset:].view(x.shape).copy_(x)

    assert_same_bits(
        fused(kernel, problem.replace(encoder=moved(problem.encoder), decoder=moved(problem.decoder))),
        fused(kernel, problem),
    )


@pytest.mark.parametrize("frozen", [("encoder",), ("decoder",), ("weight", "bias"), ("encoder", "decoder"), ("bias",)])
def test_frozen_inputs(kernel, device, frozen):
    problem = make_problem(device=device, **RAGGED)
    everything = fused(kernel, problem)
    leaves = [x.detach().requires_grad_(name not in frozen) for name, x in zip(NAMES, problem.operands)]
    loss = kernel.tdt_loss_fused_joint(
        *leaves, *problem.labels, problem.blank, list(problem.durations), reduction="none"
    )
    loss.sum().backward()
    for name, leaf in zip(NAMES, leaves):
        assert leaf.grad is None if name in frozen else same_bits(leaf.grad, everything.grads[name])


# Tiles


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_many_tiles_equal_one(kernel, device, rows, dropout):
    problem = make_problem(U=6, T=12, dtype=torch.float64, activation="tanh", device=device)

    def run(**options):
        torch.manual_seed(3)
        return fused(kernel, problem, dropout=dropout, **options)

    tiled, whole = run(max_tile_bytes=rows * problem.tile_bytes), run()
    assert_matches(tiled, Outcome(whole.loss.cpu(), {name: grad.cpu() for name, grad in whole.grads.items()}), problem)
    assert_same_bits(tiled, run(max_tile_bytes=rows * problem.tile_bytes))


def test_nodes_are_listed_in_pieces(kernel, device, monkeypatch):
    problem = make_problem(device=device, **RAGGED)
    monkeypatch.setattr(kernel.tiles, "_LISTED", 10)
    assert_matches(fused(kernel, problem, max_tile_bytes=7 * problem.tile_bytes), expected(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_call_same_bits(kernel, device, dtype):
    problem = make_problem(B=3, T=60, U=20, V=50, H=64, dtype=dtype, device=device)
    first = fused(kernel, problem, max_tile_bytes=1 << 16)
    for _ in range(3):
        assert_same_bits(fused(kernel, problem, max_tile_bytes=1 << 16), first)


def test_a_tile_holds_at_least_a_row(kernel, device):
    problem = make_problem(B=1, T=3, U=1, device=device)
    assert_matches(fused(kernel, problem, max_tile_bytes=1), expected(problem), problem)


def test_long_samples(kernel, device):
    # More than 32 frames and label positions, the width of a warp, and several samples in a tile.
    problem = make_problem(B=5, T=150, U=70, V=9, H=8, device=device, logit_lengths=[150, 90, 40, 1, 77])
    assert_matches(fused(kernel, problem), expected(problem), problem)


# Live rows


def sharp_problem(**rest):
    """Logits that follow the encoder, which says blank, but for frame 3, where it says the one label."""
    problem = make_problem(B=1, T=40, U=1, V=6, H=8, durations=(1,), dtype=torch.float64, **rest)
    problem.targets.fill_(2)
    encoder, weight = torch.zeros_like(problem.encoder), torch.zeros_like(problem.weight)
    encoder[:, :, 0], encoder[:, 3, 0], encoder[:, 3, 1] = 1.0, 0.0, 1.0
    weight[5, 0], weight[2, 1] = 1.0, 1.0
    return problem.replace(encoder=encoder * 30, decoder=problem.decoder * 0.1, weight=weight * 30, bias=None)


def test_rows_without_occupancy_are_skipped_exactly(kernel, device):
    problem = sharp_problem(device=device)
    single = problem.to(torch.float32)
    outcome = fused(kernel, single)
    assert outcome.stats.live_rows < outcome.stats.valid_rows == 80
    assert outcome.stats.dropped_mass == 0
    assert_matches(outcome, expected(problem), single)


def test_occupancy_threshold(kernel, device):
    problem = make_problem(T=20, dtype=torch.float64, device=device)
    exact = fused(kernel, problem)
    assert exact.stats.live_rows == exact.stats.valid_rows
    previous = exact.stats.live_rows
    for threshold in (1e-3, 1e-2, 0.1):
        outcome = fused(kernel, problem, occupancy_threshold=threshold)
        assert 0 < outcome.stats.live_rows < previous
        previous = outcome.stats.live_rows
        assert same_bits(outcome.loss, exact.loss)
        # The bias' gradient is the sum of the gradients of the logits: what it lacks is part of the dropped mass.
        missing = (outcome.grads["bias"] - exact.grads["bias"]).abs().split([problem.vocab, len(problem.durations)])
        assert 0 < outcome.stats.dropped_mass < 2 * threshold * outcome.stats.valid_rows
        assert all(part.sum() <= outcome.stats.dropped_mass for part in missing)


def test_node_occupancy(kernel, device):
    problem = make_problem(
        dtype=torch.float64, device=device, options={"omega": 0.25, "fastemit_lambda": 0.5}, **RAGGED
    )
    ops = kernel.loss.ops
    logits = logits_of(problem.operands, "relu")
    durations = list(problem.durations)
    node_lp, _ = ops.log_probs(logits, None, *problem.labels, problem.blank, len(durations), 0.0, 0.0)
    occupancy = 0
    for share, arcs, omega in ((0.75, durations, 0.0), (0.25, [], 0.0)):
        alone = node_lp if arcs else node_lp[..., :4].contiguous()
        saved = ops.lattice(alone, *problem.labels, arcs, problem.vocab, omega, True)
        blank, label = ops.occupancy(alone, *saved, *problem.labels, arcs, problem.vocab)
        total = blank + 1.5 * label
        occupancy = occupancy + share * (total.sum(-1) if arcs else total)
    saved = ops.lattice(node_lp, *problem.labels, durations, problem.vocab, 0.25, True)
    actual = ops.node_occupancy(node_lp, *saved, *problem.labels, durations, problem.vocab, 0.25, 0.5)
    torch.testing.assert_close(actual, occupancy, rtol=1e-12, atol=1e-14)


def test_stats_before_backward(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    call = (*problem.operands, *problem.labels, problem.blank, list(problem.durations))
    loss, stats = kernel.tdt_loss_fused_joint(*call, return_stats=True)
    assert (stats.valid_rows, stats.live_rows, stats.dropped_mass) == (problem.nodes, None, None)
    assert same_bits(loss, kernel.tdt_loss_fused_joint(*call))


# Dropout


def philox(seed, node, group):
    """Philox 4x32-10, from the paper."""
    counter, key = [node, group, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        (high0, low0), (high1, low1) = (divmod(m * counter[i], 1 << 32) for m, i in ((0xD2511F53, 0), (0xCD9E8D57, 2)))
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
    return counter


def draw(kernel, dropout, seed, B=2, T=10, U1=5, H=64, dtype=torch.float32, device="cpu"):
    """The factors of all hidden units, (B, T, U1, H)."""
    ones, zeros = torch.ones(B, T, H, dtype=dtype, device=device), torch.zeros(B, U1, H, dtype=dtype, device=device)
    nodes = torch.arange(B * T * U1, dtype=torch.int32, device=device)
    hidden = torch.empty(len(nodes), H, dtype=dtype, device=device)
    kernel.loss.ops.joint_hidden_(hidden, ones, zeros, nodes, 0, dropout, seed, 0)
    return hidden.view(B, T, U1, H)


def test_the_generator_is_philox(kernel, device):
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # published
    seed = 0x123456789ABCDEF0
    factors = draw(kernel, 0.5, seed, H=22, device=device)
    kept = [
        [philox(seed, node, unit // 4)[unit % 4] >= 1 << 31 for unit in range(22)]
        for node in range(factors[..., 0].numel())
    ]
    assert torch.equal(factors.cpu() > 0, torch.tensor(kept).view(factors.shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_statistics(kernel, device, p):
    factors = draw(kernel, p, 7, B=4, T=32, U1=32, H=128, device=device).double()
    n = factors.numel()
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=1e-6)
    dropped = (factors == 0).double()
    spread = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * spread / n**0.5
    for dims, count in (((0, 1, 2), n / 128), ((0, 1, 3), n / 32), ((1, 2, 3), n / 4)):  # by unit, u and sample
        assert (dropped.mean(dims) - p).abs().max() < 6 * spread / count**0.5
    for dim in range(4):  # neighbours do not know of each other
        a, b = dropped.narrow(dim, 1, dropped.shape[dim] - 1) - p, dropped.narrow(dim, 0, dropped.shape[dim] - 1) - p
        assert abs((a * b).mean() / spread**2) < 5 / a.numel() ** 0.5
    other = (draw(kernel, p, 8, B=4, T=32, U1=32, H=128, device=device) == 0).double()
    assert abs(((dropped - p) * (other - p)).mean() / spread**2) < 5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_draws_the_same_mask(kernel, device, dtype):
    for H in (64, 61):
        single, other = (draw(kernel, 0.3, 5, H=H, dtype=d, device=device) == 0 for d in (torch.float32, dtype))
        assert torch.equal(single, other)


@pytest.mark.cuda
def test_cpu_and_cuda_draw_the_same_mask(kernel):
    for H in (64, 61):
        masks = [draw(kernel, 0.3, 1 << 61, H=H, device=device).cpu() for device in ("cpu", "cuda")]
        assert same_bits(*masks)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("H", [24, 21])
def test_dropout_against_its_explicit_mask(kernel, device, activation, H):
    problem = make_problem(activation=activation, H=H, dtype=torch.float64, device=device, **RAGGED)
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    shape = {"B": 4, "T": 9, "U1": 5, "H": H}
    factors = draw(kernel, 0.4, seed, **shape, dtype=torch.float64, device=device).cpu()
    reference = expected(problem, factors=factors)
    torch.manual_seed(11)
    outcome = fused(kernel, problem, dropout=0.4, max_tile_bytes=17 * problem.tile_bytes)
    assert_matches(outcome, reference, problem)


def test_dropout_is_reproducible(kernel, device):
    problem = make_problem(device=device, **RAGGED)

    def run(seed):
        torch.manual_seed(seed)
        return fused(kernel, problem, dropout=0.2), fused(kernel, problem, dropout=0.2)

    first, second = run(1), run(1)
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])
    assert not torch.equal(first[0].loss, first[1].loss)  # a new mask for each call
    assert not torch.equal(first[0].loss, run(2)[0].loss)


def test_dropout_0_is_no_dropout_and_draws_nothing(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    state = torch.get_rng_state()
    assert_same_bits(fused(kernel, problem, dropout=0.0), fused(kernel, problem))
    assert torch.equal(torch.get_rng_state(), state)


def test_gradcheck(kernel, device):
    problem = make_problem(B=2, T=4, U=2, V=5, H=6, dtype=torch.float64, activation="tanh", device=device)
    leaves = [x.requires_grad_() for x in problem.operands]

    def loss(*operands):
        torch.manual_seed(0)
        return kernel.tdt_loss_fused_joint(*operands, *problem.labels, problem.blank, [0, 1, 2, 3], dropout=0.3)

    torch.autograd.gradcheck(loss, leaves)


# Precision


def unfused(kernel, problem):
    """The usual pipeline in the dtype of the problem, through the dense loss."""
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    logits = logits_of(leaves, problem.activation)
    loss = kernel.tdt_loss_joint(logits, *problem.labels, problem.blank, list(problem.durations), reduction="none")
    loss.sum().backward()
    return Outcome(loss.detach(), {name: x.grad for name, x in zip(NAMES, leaves)})


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_less_exact_than_the_unfused_pipeline(kernel, device, dtype, activation):
    problem = make_problem(B=3, T=40, U=12, V=60, H=64, activation=activation, dtype=dtype, device=device)
    reference = expected(problem)
    ours = fused(kernel, problem, max_tile_bytes=1 << 17)
    theirs = unfused(kernel, problem)
    assert ours.loss.dtype == torch.float32
    for name, error in errors(ours, reference).items():
        assert error <= 1.2 * errors(theirs, reference)[name] + 1e-4, name
    our_error, their_error = ((x.loss.double().cpu() - reference.loss).abs().max() for x in (ours, theirs))
    assert our_error <= 1.5 * their_error + 1e-3 * reference.loss.max()


def test_sums_over_many_tiles_do_not_lose_precision(kernel, device):
    problem = make_problem(B=2, T=60, U=12, V=30, H=32, dtype=torch.bfloat16, device=device)
    reference = expected(problem)
    whole, tiled = (
        errors(fused(kernel, problem, max_tile_bytes=n), reference) for n in (1 << 28, problem.tile_bytes * 8)
    )
    assert all(tiled[name] <= 1.05 * whole[name] + 1e-5 for name in NAMES)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast(kernel, device, given):
    single = make_problem(device=device, **RAGGED)
    half = single.to(torch.bfloat16)
    problem = single.replace(encoder=half.encoder.to(given), decoder=half.decoder.to(given))
    with torch.autocast(device, dtype=torch.bfloat16):
        outcome = fused(kernel, problem)
    plain = fused(kernel, half)
    assert same_bits(outcome.loss, plain.loss)
    assert outcome.grads["encoder"].dtype == given
    assert outcome.grads["weight"].dtype == outcome.grads["bias"].dtype == torch.float32
    for name, grad in outcome.grads.items():
        assert same_bits(grad.bfloat16(), plain.grads[name])


def test_float32_parameters_of_16_bit_activations(kernel, device):
    single = make_problem(device=device, **RAGGED)
    half = single.to(torch.bfloat16)
    outcome = fused(kernel, half.replace(weight=single.weight, bias=single.bias))
    assert same_bits(outcome.loss, fused(kernel, half).loss)
    assert outcome.grads["weight"].dtype == torch.float32 and outcome.grads["encoder"].dtype == torch.bfloat16


# Unusual batches


def test_no_alignment(kernel, device):
    problem = make_problem(durations=(1, 2), logit_lengths=[9, 2, 0, 9], target_lengths=[4, 4, 2, 0], device=device)
    outcome = fused(kernel, problem)
    assert outcome.loss.isinf().tolist() == [False, True, True, False]
    assert_matches(outcome, expected(problem), problem)
    assert (outcome.grads["encoder"][1:3] == 0).all() and (outcome.grads["decoder"][1:3] == 0).all()
    assert outcome.stats.live_rows <= 9 * 5 + 9
    assert (fused(kernel, problem, zero_infinity=True).loss[1:3] == 0).all()


@pytest.mark.parametrize("B, T, U", [(0, 4, 2), (2, 0, 2), (2, 4, 0), (1, 1, 0), (2, 0, 0)])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_empty(kernel, device, B, T, U, reduction):
    problem = make_problem(B=B, T=T, U=U, durations=(0, 1, 2), device=device)
    outcome = fused(kernel, problem, reduction)
    reference = expected(problem)
    assert outcome.loss.shape == ((B,) if reduction == "none" else ())
    losses = reference.loss if reduction == "none" else reference.loss.sum()
    torch.testing.assert_close(outcome.loss.double().cpu(), losses, rtol=1e-6, atol=1e-6)
    for name, grad in reference.grads.items():
        torch.testing.assert_close(outcome.grads[name].double().cpu(), grad, rtol=1e-5, atol=1e-6)


def test_padding_is_never_read(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    clean = fused(kernel, problem)
    for b, (T, U) in enumerate(zip(RAGGED["logit_lengths"], RAGGED["target_lengths"])):
        problem.encoder[b, T:] = torch.nan
        problem.decoder[b, U + 1 :] = torch.nan
        problem.targets[b, U:] = -7
    outcome = fused(kernel, problem)
    assert_same_bits(outcome, clean)
    assert (outcome.grads["encoder"][1, 6:] == 0).all() and (outcome.grads["decoder"][2, 1:] == 0).all()


def test_nan_stays_in_its_sample(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    clean = fused(kernel, problem)
    problem.encoder[1, 2, 3] = torch.nan
    outcome = fused(kernel, problem)
    assert outcome.loss.isnan().tolist() == [False, True, False, False]
    dense = unfused(kernel, problem).grads
    others = torch.tensor([0, 2, 3])
    for name in ("encoder", "decoder"):
        assert outcome.grads[name][1].isnan().any()
        assert torch.equal(outcome.grads[name].isnan(), dense[name].isnan())
        assert same_bits(outcome.grads[name][others], clean.grads[name][others])
    # As in the dense pipeline, the parameters see every sample.
    assert outcome.grads["weight"].isnan().all() and outcome.grads["bias"].isnan().all()


@pytest.mark.cuda
def test_malformed_samples_on_the_gpu(kernel):
    problem = make_problem(device="cuda", **RAGGED)
    without = fused(kernel, problem.replace(**{n: x[[0, 2]] for n, x in vars(problem).items() if n in BY_SAMPLE}))
    problem.logit_lengths[1] = 10
    problem.targets[3, 1] = 21
    outcome = fused(kernel, problem)
    assert outcome.loss.isnan().tolist() == [False, True, False, True]
    assert (outcome.grads["encoder"][[1, 3]] == 0).all() and (outcome.grads["decoder"][[1, 3]] == 0).all()
    for name in ("weight", "bias"):
        torch.testing.assert_close(outcome.grads[name], without.grads[name], rtol=1e-5, atol=1e-5)


BY_SAMPLE = ("encoder", "decoder", "targets", "logit_lengths", "target_lengths")


# Autograd and memory


def test_backward_twice(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    leaves = [x.requires_grad_() for x in problem.operands]
    loss = kernel.tdt_loss_fused_joint(*leaves, *problem.labels, problem.blank, [0, 1, 2, 3], dropout=0.5)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(same_bits, first, torch.autograd.grad(loss, leaves)))


def test_second_derivative_is_a_clear_error(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    leaves = [x.requires_grad_() for x in problem.operands]
    loss = kernel.tdt_loss_fused_joint(*leaves, *problem.labels, problem.blank, [0, 1, 2, 3])
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(grad.sum(), leaves, retain_graph=True)


def test_without_grad_nothing_is_kept(kernel, device):
    problem = make_problem(device=device, **RAGGED)
    leaves = [x.requires_grad_() for x in problem.operands]
    call = (*leaves, *problem.labels, problem.blank, [0, 1, 2, 3])
    with torch.no_grad():
        loss = kernel.tdt_loss_fused_joint(*call)
    assert loss.grad_fn is None
    assert same_bits(loss, kernel.tdt_loss_fused_joint(*call).detach())


def test_checkpoint(kernel, device):
    problem = make_problem(device=device, **RAGGED)

    def run(wrap):
        leaves = [x.detach().requires_grad_() for x in problem.operands]
        torch.manual_seed(0)
        wrap(
            lambda *x: kernel.tdt_loss_fused_joint(*x, *problem.labels, problem.blank, [0, 1, 2, 3], dropout=0.5),
            *leaves,
        ).backward()
        return [leaf.grad for leaf in leaves]

    plain = run(lambda function, *x: function(*x))
    again = run(lambda function, *x: torch.utils.checkpoint.checkpoint(function, *x, use_reentrant=False))
    assert all(map(same_bits, plain, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_a_tile_and_a_few_numbers_per_node(kernel, device, dtype):
    problem = make_problem(B=4, T=100, U=30, V=507, H=64, durations=(0, 1, 2, 3, 4), dtype=dtype, device=device)
    nodes, tile = problem.nodes, 1 << 20
    leaves = [x.requires_grad_() for x in problem.operands]

    def step():
        kernel.tdt_loss_fused_joint(
            *leaves, *problem.labels, problem.blank, [0, 1, 2, 3, 4], max_tile_bytes=tile
        ).backward()

    step()
    parameters = 4 * sum(x.numel() for x in leaves)
    assert peak_extra_bytes(step, device) < tile + 100 * nodes + 5 * parameters
    assert tile + 100 * nodes + 5 * parameters < 0.2 * nodes * 512 * 4


@pytest.mark.cuda
def test_lengths_on_the_host_save_every_wait(kernel):
    problem = make_problem(B=4, T=60, U=20, device="cuda")
    lengths = [x.cpu() for x in problem.labels[1:]]
    call = (problem.targets, *lengths, problem.blank, [0, 1, 2, 3])
    kernel.tdt_loss_fused_joint(*problem.operands, *call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = kernel.tdt_loss_fused_joint(*problem.operands, *call, dropout=0.1, max_tile_bytes=1 << 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


# torch.compile


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("durations", [(0, 1, 2, 3), ()], ids=["tdt", "rnnt"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_equals_eager(kernel, device, fresh_dynamo, durations, dropout):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*operands):
        labels = (*problem.labels, problem.blank)
        if durations:
            return kernel.tdt_loss_fused_joint(*operands, *labels, [0, 1, 2, 3], dropout=dropout)
        return kernel.rnnt_loss_fused_joint(*operands, *labels, dropout=dropout)

    problem = make_problem(durations=durations, device=device, **RAGGED)
    leaves = [x.detach().requires_grad_() for x in problem.operands]
    leaves[1].requires_grad_(False)
    torch.manual_seed(4)
    loss = compiled(*leaves)
    loss.backward()
    torch.manual_seed(4)
    eager = fused(kernel, problem, "mean" if durations else "mean_volume", dropout=dropout)
    assert same_bits(loss.detach(), eager.loss)
    assert leaves[1].grad is None
    for name, leaf in zip(NAMES, leaves):
        assert name == "decoder" or same_bits(leaf.grad, eager.grads[name])


# Errors


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"encoder": torch.zeros(4, 9)}, ValueError, "encoder must have shape"),
        ({"encoder": torch.zeros(4, 9, 24, dtype=torch.int64)}, TypeError, "encoder must be float32"),
        ({"encoder": None}, TypeError, "encoder must be a tensor"),
        ({"decoder": torch.zeros(4, 5, 23)}, ValueError, r"decoder must have shape \(4, U\+1, 24\)"),
        ({"decoder": torch.zeros(3, 5, 24)}, ValueError, "decoder must have shape"),
        ({"decoder": torch.zeros(4, 0, 24)}, ValueError, "decoder must have shape"),
        ({"decoder": torch.zeros(4, 5, 24, dtype=torch.float16)}, TypeError, "decoder must have the dtype of encoder"),
        ({"weight": torch.zeros(25, 23)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(4, 24), "bias": None}, ValueError, "at least one token column"),
        ({"weight": torch.zeros(25, 24, dtype=torch.bfloat16)}, TypeError, "weight must have the dtype of encoder"),
        ({"bias": torch.zeros(24)}, ValueError, r"bias must have shape \(25,\)"),
        ({"blank": 21}, ValueError, "blank_token_id"),
        ({"targets": torch.zeros(4, 3, dtype=torch.int64)}, ValueError, "targets must have at least 4 columns"),
        ({"logit_lengths": torch.tensor([9, 10, 9, 9])}, ValueError, "sample 1"),
        ({"activation": "gelu"}, ValueError, "activation must be one of 'relu', 'tanh', got 'gelu'"),
        ({"options": {"dropout": 1.0}}, ValueError, r"dropout must be in \[0, 1\), got 1"),
        ({"options": {"dropout": "0.1"}}, TypeError, "dropout must be a number"),
        ({"options": {"max_tile_bytes": 0}}, ValueError, "max_tile_bytes must be positive, got 0"),
        ({"options": {"occupancy_threshold": -1e-9}}, ValueError, "occupancy_threshold must be at least 0"),
        ({"options": {"omega": 2}}, ValueError, "omega"),
        ({"options": {"fastemit_lambda": 1e5}}, ValueError, r"fastemit_lambda must be in \[0, 10000\], got 100000"),
        ({"options": {"zero_infinity": 1}}, TypeError, "zero_infinity must be True or False, got 1"),
        ({"options": {"return_stats": None}}, TypeError, "return_stats must be True or False, got None"),
        ({"options": {"reduction": "average"}}, ValueError, "Invalid reduction: reduction must be one of 'none', "),
    ],
)
def test_errors(kernel, change, error, message):
    problem = make_problem().replace(**change)
    with pytest.raises(error, match=message):
        kernel.tdt_loss_fused_joint(
            *problem.operands,
            *problem.labels,
            problem.blank,
            list(problem.durations),
            activation=problem.activation,
            **problem.options,
        )


@pytest.mark.parametrize("index", [-1, 45, 2**31 - 1, -(2**31)])
def test_node_indices_outside_the_batch(kernel, device, index):
    """On the host the ops refuse them; on a GPU, where nobody reads them first, nothing is read or written out of bounds."""
    problem, ops = make_problem(B=1, dtype=torch.float64, device=device), kernel.loss.ops
    logits = logits_of(problem.operands, "relu")
    shaping, arcs = (0.0, 0.0, 0.0), list(problem.durations)
    loss, node_lp, row_max, ll, alpha_beta, weights = ops.loss(
        logits, None, *problem.labels, problem.blank, arcs, 0.0, 0.0, *shaping, False, True, False, 0
    )
    saved, count = (node_lp, row_max, ll, alpha_beta), 45
    nodes = torch.tensor([3, index, 7], dtype=torch.int32, device=device)
    tile = logits.flatten(0, 2)[:3].clone()
    hidden, joint = tile.new_zeros(3, 24), (problem.encoder, problem.decoder, nodes, 0, 0.0, 0)
    row_of_node = torch.full((count,), -1, dtype=torch.int32, device=device)
    calls = [
        (ops.log_probs_tile_, tile, nodes, node_lp, row_max, *problem.labels, problem.blank, 21, 4, 0.0, 0.0),
        (ops.gradient_tile_, loss, weights, tile, nodes, *problem.labels, *saved, problem.blank, 21, arcs, *shaping),
        (ops.joint_hidden_, hidden, *joint),
        (ops.joint_hidden_backward_, torch.zeros_like(problem.encoder), None, hidden, *joint, row_of_node, 0),
    ]
    for op, *arguments in calls:
        if device == "cpu":
            with pytest.raises(RuntimeError, match=rf"nodes must be in \[0, {count}\), got {index}"):
                op(*arguments)
        else:
            op(*arguments)
            torch.cuda.synchronize()
