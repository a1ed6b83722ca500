"""Dropout of the fused losses: its generator, its mask, and the loss and gradients under it."""

import shutil

import pytest
import torch
from support.comparisons import same_bits
from support.fused import RAGGED, assert_matches, assert_same_bits, dropout_factors, expected, fused, make_problem
from support.public_calls import CALLS, Inputs, assert_same_outcome


def philox(seed, node, group):
    """Philox 4x32-10, from the paper."""
    counter, key = [node, group, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        (high0, low0), (high1, low1) = (divmod(m * counter[i], 1 << 32) for m, i in ((0xD2511F53, 0), (0xCD9E8D57, 2)))
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
    return counter


def test_the_generator_is_philox(kernel, device):
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # published
    seed = 0x123456789ABCDEF0
    factors = dropout_factors(kernel, 0.5, seed, H=22, device=device)
    kept = [
        [philox(seed, node, unit // 4)[unit % 4] >= 1 << 31 for unit in range(22)]
        for node in range(factors[..., 0].numel())
    ]
    assert torch.equal(factors.cpu() > 0, torch.tensor(kept).view(factors.shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_statistics(kernel, device, p):
    factors = dropout_factors(kernel, p, 7, B=4, T=32, U1=32, H=128, device=device).double()
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
    other = (dropout_factors(kernel, p, 8, B=4, T=32, U1=32, H=128, device=device) == 0).double()
    assert abs(((dropped - p) * (other - p)).mean() / spread**2) < 5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_draws_the_same_mask(kernel, device, dtype):
    for H in (64, 61):
        single, other = (
            dropout_factors(kernel, 0.3, 5, H=H, dtype=d, device=device) == 0 for d in (torch.float32, dtype)
        )
        assert torch.equal(single, other)


@pytest.mark.cuda
def test_cpu_and_cuda_draw_the_same_mask(kernel):
    for H in (64, 61):
        masks = [dropout_factors(kernel, 0.3, 1 << 61, H=H, device=device).cpu() for device in ("cpu", "cuda")]
        assert same_bits(*masks)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("H", [24, 21])
def test_dropout_against_its_explicit_mask(kernel, device, activation, H):
    problem = make_problem(activation=activation, H=H, dtype=torch.float64, device=device, **RAGGED)
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    shape = {"B": 4, "T": 9, "U1": 5, "H": H}
    factors = dropout_factors(kernel, 0.4, seed, **shape, dtype=torch.float64, device=device).cpu()
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


@pytest.mark.parametrize(
    "name, backend", [("rnnt_loss_fused_joint", "aot_eager"), ("tdt_loss_fused_joint", "inductor")]
)
def test_compiled_dropout_has_the_bits_of_eager_mode(kernel, device, name, backend):
    if backend == "inductor" and not any(map(shutil.which, ("g++", "gcc", "clang"))):
        pytest.skip("inductor needs a C++ compiler")

    def run(call):
        inputs = Inputs(device)
        torch.manual_seed(7)
        losses = [call(*inputs.head, *inputs.labels) for _ in range(2)]
        assert losses[0] != losses[1]  # another seed for every call
        return [*(loss.detach() for loss in losses), *torch.autograd.grad(sum(losses), inputs.head), torch.rand(1)]

    def call(encoder, decoder, weight, bias, *labels):
        inputs = Inputs.__new__(Inputs)
        inputs.encoder, inputs.decoder, inputs.weight, inputs.bias = encoder, decoder, weight, bias
        inputs.labels = labels
        return CALLS[name](kernel, inputs, dropout=0.4)

    torch._dynamo.reset()
    assert_same_outcome(run(torch.compile(call, backend=backend)), run(call))
