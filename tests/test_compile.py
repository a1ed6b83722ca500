"""opcheck on every op, and torch.compile(fullgraph=True) with gradients equal to eager's."""

import shutil

import pytest
import torch
from conftest import loss_and_grads, make_batch, same_bits

LENGTHS = {"logit_lengths": [6, 4], "target_lengths": [2, 3]}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ARCS = {
    "separate": ("separate", {}),
    "joint": ("joint", {}),
    "two lattices": ("joint", {"omega": 0.5, "fastemit_lambda": 0.1, "clamp": 0.5, "delay_penalty": 0.1}),
    "RNN-T": ("separate", {"durations": (), "fastemit_lambda": 0.1, "clamp": 0.5, "delay_penalty": 0.1}),
}
every_arcs = pytest.mark.parametrize("api, arguments", ARCS.values(), ids=ARCS.keys())


def opcheck(kernel, name, args):
    """Two runs of an op must agree: those that return alpha_beta get full lengths here, since its padding is unspecified."""
    torch.library.opcheck(getattr(kernel.loss.ops, name).default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", [0, 3])
def test_opcheck_loss(kernel, device, api, dtype, reduction):
    batch = make_batch(B=2, T=6, U=3, dtype=dtype, sigma=0.05, device=device)
    opcheck(kernel, "loss", batch.loss_op_args(api, need_grad=False, reduction=reduction))
    for logits in (batch.token_logits, batch.duration_logits, batch.joint):
        logits.requires_grad_()
    opcheck(kernel, "loss", batch.loss_op_args(api, reduction=reduction))


@every_arcs
@pytest.mark.parametrize("reduction", [0, 3])
def test_opcheck_loss_with_options(kernel, device, api, arguments, reduction):
    batch = make_batch(B=2, T=6, U=3, device=device, **arguments)
    batch.op_logits(api)[0].requires_grad_()
    opcheck(kernel, "loss", batch.loss_op_args(api, zero_infinity=True, reduction=reduction))


@every_arcs
def test_opcheck_log_probs(kernel, device, api, arguments):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS, **arguments)
    blank, durations = batch.op_arcs
    opcheck(kernel, "log_probs", (*batch.op_logits(api), *batch.lengths, blank, len(durations), 0.05, 0.1))


@every_arcs
@pytest.mark.parametrize("need_grad", [True, False])
def test_opcheck_lattice(kernel, device, api, arguments, need_grad):
    batch = make_batch(B=2, T=6, U=3, device=device, **arguments)
    _, node_lp, *_ = kernel.loss.ops.loss(*batch.loss_op_args(api))
    args = (node_lp, *batch.lengths, list(batch.durations), batch.token_logits.shape[-1], batch.option("omega"))
    opcheck(kernel, "lattice", (*args, need_grad))


@every_arcs
@pytest.mark.parametrize("reduction", [0, 3])
def test_opcheck_reduce(kernel, device, api, arguments, reduction):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS, **arguments)
    _, _, ll, _, _ = kernel.loss.ops.loss(*batch.loss_op_args(api))
    opcheck(kernel, "reduce", (ll, batch.target_lengths, batch.token_logits, batch.option("omega"), True, reduction))


@every_arcs
@pytest.mark.parametrize("reduction", [0, 3])
def test_opcheck_gradient(kernel, device, api, arguments, reduction):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS, **arguments)
    loss, *saved, weights = kernel.loss.ops.loss(*batch.loss_op_args(api, reduction=reduction))
    args = batch.gradient_op_args(api, torch.ones_like(loss), weights, *saved)
    opcheck(kernel, "gradient", args)
    if args[3] is None:
        opcheck(kernel, "gradient_", (*args[:2], args[2].clone(), *args[4:]))


@every_arcs
def test_opcheck_occupancy(kernel, device, api, arguments):
    batch = make_batch(B=2, T=6, U=3, device=device, **LENGTHS, **arguments)
    _, node_lp, ll, alpha_beta, _ = kernel.loss.ops.loss(*batch.loss_op_args(api))
    args = (node_lp, ll, alpha_beta, *batch.lengths, list(batch.durations), batch.token_logits.shape[-1])
    opcheck(kernel, "occupancy", args)


def test_ops_live_in_a_namespace_of_their_own(kernel):
    namespace = kernel.loss.ops.loss.default.namespace
    assert "tdt_loss" in namespace and namespace != "tdt_loss"


def compiled_outcome(kernel, batch, api, backend, **options):
    """loss_and_grads through torch.compile(fullgraph=True)."""

    class Compiled:
        tdt_loss = staticmethod(torch.compile(kernel.tdt_loss, fullgraph=True, backend=backend))
        tdt_loss_joint = staticmethod(torch.compile(kernel.tdt_loss_joint, fullgraph=True, backend=backend))
        rnnt_loss = staticmethod(torch.compile(kernel.rnnt_loss, fullgraph=True, backend=backend))

    return loss_and_grads(Compiled, batch, api, **options)


def assert_same(outcome, expected):
    assert same_bits(outcome.grad_tokens, expected.grad_tokens) and same_bits(
        outcome.grad_durations, expected.grad_durations
    )
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-6, atol=0)


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


def test_dynamic_shapes(kernel, device):
    compiled = torch.compile(kernel.tdt_loss_joint, fullgraph=True, dynamic=True, backend="aot_eager")
    for T, U in [(6, 3), (9, 4), (5, 2)]:
        batch = make_batch(B=2, T=T, U=U, device=device)
        assert torch.equal(compiled(*batch.joint_args), kernel.tdt_loss_joint(*batch.joint_args))


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layer_in_a_compiled_model(kernel, device, backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("inductor needs a C++ compiler")
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
