"""torch.compile(fullgraph=True) and torch.export: the bits of eager, and no compilation per shape. The ops alone: test_opcheck.py.

The losses are opaque to the compiler, so what they compute is the same. What stands around them the compiler may sum in another order.
"""

import io
import shutil

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import same_bits
from support.small_model import DURATIONS, FUNCTIONS, loss_and_gradients, make_model, make_speech

LENGTHS = {"logit_lengths": [6, 4], "target_lengths": [2, 3]}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled_outcome(kernel, batch, api, backend, **options):
    """loss_and_grads through torch.compile(fullgraph=True)."""

    class Compiled:
        tdt_loss = staticmethod(torch.compile(kernel.tdt_loss, fullgraph=True, backend=backend))
        tdt_loss_joint = staticmethod(torch.compile(kernel.tdt_loss_joint, fullgraph=True, backend=backend))
        rnnt_loss = staticmethod(torch.compile(kernel.rnnt_loss, fullgraph=True, backend=backend))

    return loss_and_grads(Compiled, batch, api, **options)


def assert_same(outcome, expected):
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name), getattr(expected, name)), name


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fullgraph_equals_eager(kernel, device, api, dtype):
    batch = make_batch(B=2, T=6, U=3, sigma=0.05, dtype=dtype, device=device, **LENGTHS)
    assert_same(compiled_outcome(kernel, batch, api, "aot_eager"), loss_and_grads(kernel, batch, api))


@pytest.mark.parametrize("reduction", ["mean", "mean_batch", "mean_volume", "sum"])
def test_fullgraph_reductions(kernel, device, reduction):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS)
    outcome = compiled_outcome(kernel, batch, "separate", "aot_eager", reduction=reduction)
    assert_same(outcome, loss_and_grads(kernel, batch, reduction=reduction))


def test_inplace_grad_is_ignored(kernel, device):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS)
    outcome = compiled_outcome(kernel, batch, "joint", "aot_eager", inplace_grad=True)
    assert_same(outcome, loss_and_grads(kernel, batch.replace(), "joint"))


def test_lengths_are_not_checked_while_compiled(kernel, device):
    batch = make_batch(B=2, T=6, U=3, device=device)
    good = loss_and_grads(kernel, batch)
    batch.logit_lengths[0] = 7
    outcome = compiled_outcome(kernel, batch, "separate", "aot_eager")
    assert outcome.losses[0].isnan() and (outcome.grad_tokens[0] == 0).all()
    assert same_bits(outcome.grad_tokens[1], good.grad_tokens[1])


every_function = pytest.mark.parametrize("function", FUNCTIONS)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "gcc", "clang"))), reason="inductor needs a C++ compiler"
)
every_backend = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])


def make_call(function, device, B=2, T=9, U=6, V=11, H=8):
    """The arguments of a loss: those with a gradient, and the others. No two sizes are alike unless asked for."""
    durations = () if function.startswith("rnnt") else (*DURATIONS, 3)
    batch = make_batch(B, T, U, V, durations, logit_lengths=[T, *[T - 1] * (B - 1)], device=device)
    rest = batch.rest[:-1] if durations else batch.rest[:-2]
    if function.endswith("fused_joint"):
        torch.manual_seed(0)
        shapes = ((B, T, H), (B, U + 1, H), (V + len(durations), H), (V + len(durations),))
        return [torch.randn(shape).to(device).requires_grad_() for shape in shapes], rest
    if function == "tdt_loss":
        return [batch.token_logits.requires_grad_(), batch.duration_logits.requires_grad_()], rest
    return [(batch.joint if durations else batch.token_logits).detach().requires_grad_()], rest


def assert_compiled_has_the_bits_of_eager(compiled, eager, leaves, rest):
    outcomes = []
    for function in (compiled, eager):
        loss = function(*leaves, *rest)
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert all(map(same_bits, *outcomes))


@every_function
@every_backend
def test_every_function_has_the_bits_of_eager(kernel, device, function, backend):
    eager = getattr(kernel, function)
    compiled = torch.compile(eager, fullgraph=True, backend=backend)
    assert_compiled_has_the_bits_of_eager(compiled, eager, *make_call(function, device))


@every_function
@pytest.mark.parametrize("dynamic", [True, None])
def test_no_compilation_per_shape(kernel, device, function, dynamic):
    eager = getattr(kernel, function)
    compiled = torch.compile(eager, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compilations = 1 if dynamic else 2  # by default the second shape tells which sizes change
    for step, (B, T, U) in enumerate([(2, 9, 6), (4, 12, 3), (3, 30, 10), (2, 5, 2)]):
        leaves, rest = make_call(function, device, B, T, U)
        with torch.compiler.set_stance("default" if step < compilations else "fail_on_recompile"):
            assert_compiled_has_the_bits_of_eager(compiled, eager, leaves, rest)


@pytest.mark.parametrize(
    "function, backend",
    [
        *((name, "aot_eager") for name in FUNCTIONS),
        pytest.param("tdt_loss_joint", "inductor", marks=needs_compiler),
        pytest.param("tdt_loss_fused_joint", "inductor", marks=needs_compiler),
    ],
)
def test_a_compiled_model(kernel, device, function, backend):
    model, inputs = make_model(kernel, function, device=device), make_speech(device=device)
    loss, grads = loss_and_gradients(model, *inputs)
    model.compile(fullgraph=True, backend=backend)
    compiled_loss, compiled_grads = loss_and_gradients(model, *inputs)
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        assert (compiled_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("function", ["tdt_align", "tdt_align_joint", "rnnt_align"])
def test_compiled_alignments(kernel, device, function):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS)
    batch = batch.without_durations() if function == "rnnt_align" else batch
    args = {"tdt_align": batch.args, "tdt_align_joint": batch.joint_args, "rnnt_align": batch.rnnt_args}[function]
    eager = getattr(kernel, function)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*args), eager(*args)))


@pytest.mark.parametrize(
    "function, strict",
    [*((name, False) for name in FUNCTIONS), ("tdt_loss_joint", True), ("tdt_loss_fused_joint", True)],
)
def test_export(kernel, device, function, strict):
    """An exported model, kept and read back, takes every shape and gives loss and gradients of the model."""
    model = make_model(kernel, function, device=device)
    B, T, U = map(torch.export.Dim, "BTU")
    shapes = ({0: B, 1: T}, {0: B, 1: U}, {0: B}, {0: B})
    exported = torch.export.export(model, make_speech(device=device), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for B, T, U in [(4, 9, 4), (2, 12, 5), (1, 3, 2)]:
        inputs = make_speech(B, T, U, device=device)
        (loss, grads), (expected, expected_grads) = (loss_and_gradients(m, *inputs) for m in (module, model))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6)


def test_fused_losses_stay_out_of_cuda_graphs(kernel):
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no such tag")
    for op in (kernel.loss.ops.fused_loss, kernel.loss.ops.fused_gradient):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


@pytest.mark.cuda
@every_function
def test_cuda_graphs_of_the_compiler(kernel, function):
    model, copy = (make_model(kernel, function, device="cuda") for _ in range(2))
    torch._dynamo.utils.counters.clear()
    copy.compile(fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        inputs = make_speech(seed=seed, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        (loss, grads), (expected, expected_grads) = (loss_and_gradients(m, *inputs) for m in (copy, model))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5)
    if not function.endswith("fused_joint"):
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


class Head(torch.nn.Module):
    """The end of a model: a linear joint network whose output is cut in two."""

    def __init__(self, kernel, V, D):
        super().__init__()
        self.linear = torch.nn.Linear(8, V + D)
        self.loss = kernel.layers.TDTLoss()
        self.V = V

    def forward(self, hidden, *rest):
        logits = self.linear(hidden)
        return self.loss(logits[..., : self.V], logits[..., self.V :], *rest)


@every_backend
def test_layer_in_a_compiled_model(kernel, device, backend):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS)
    torch.manual_seed(0)
    model = Head(kernel, 7, 3).to(device)
    hidden = torch.randn(2, 6, 4, 8, device=device)
    eager = model(hidden, *batch.rest)
    expected = torch.autograd.grad(eager, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend=backend)(hidden, *batch.rest)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    for actual, reference in zip(torch.autograd.grad(compiled, list(model.parameters())), expected):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)
