"""The fused losses within autograd, autocast, checkpoints and torch.compile, and how exact they are in 16 bits."""

import pytest
import torch
from support.comparisons import same_bits
from support.fused import NAMES, RAGGED, errors, expected, fused, make_problem, unfused


def test_gradcheck(kernel, device):
    problem = make_problem(B=2, T=4, U=2, V=5, H=6, dtype=torch.float64, activation="tanh", device=device)
    leaves = [x.requires_grad_() for x in problem.operands]

    def loss(*operands):
        torch.manual_seed(0)
        return kernel.tdt_loss_fused_joint(*operands, *problem.labels, problem.blank, [0, 1, 2, 3], dropout=0.3)

    torch.autograd.gradcheck(loss, leaves)


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
    eager = fused(kernel, problem, "mean" if durations else "mean_volume", dropout=dropout, tolerance=1e-6)
    assert same_bits(loss.detach(), eager.loss)
    assert leaves[1].grad is None
    for name, leaf in zip(NAMES, leaves):
        assert name == "decoder" or same_bits(leaf.grad, eager.grads[name])


# Precision


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
