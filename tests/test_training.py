"""A training step as people run it: autocast, loss scaling, checkpointing, threads, and all of it in one CUDA graph."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import same_bits
from support.small_model import FUNCTIONS, loss_and_gradients, make_model, make_speech
from torch.utils.checkpoint import checkpoint

every_function = pytest.mark.parametrize("function", FUNCTIONS)
# Largest norm of the error of a gradient under autocast, of the norm of the gradient; and of the loss.
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}
every_16_bit_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

# The functions, and gradients in place where they can be had.
KINDS = {
    **{name: (name, {}) for name in FUNCTIONS},
    "tdt_loss_joint in place": ("tdt_loss_joint", {"inplace_grad": True}),
    "rnnt_loss in place": ("rnnt_loss", {"inplace_grad": True}),
}
DENSE_KINDS = {name: kind for name, kind in KINDS.items() if "fused" not in name}
every_kind = pytest.mark.parametrize("function, options", KINDS.values(), ids=KINDS.keys())
every_dense_kind = pytest.mark.parametrize("function, options", DENSE_KINDS.values(), ids=DENSE_KINDS.keys())


def assert_close(actual, expected, tolerance):
    (loss, grads), (expected_loss, expected_grads) = actual, expected
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= tolerance * grad.norm(), name


def assert_same_bits(actual, expected):
    (loss, grads), (expected_loss, expected_grads) = actual, expected
    assert same_bits(loss, expected_loss)
    for name, grad in expected_grads.items():
        assert same_bits(grads[name], grad), name


# Autocast and loss scaling


@every_kind
@every_16_bit_dtype
def test_autocast(kernel, device, function, options, dtype):
    model, inputs = make_model(kernel, function, device=device, **options), make_speech(device=device)
    expected = loss_and_gradients(model, *inputs)
    with torch.autocast(device, dtype=dtype):
        loss = model(*inputs)
    model.zero_grad()
    loss.backward()  # outside, as torch recommends
    assert loss.dtype == torch.float32
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not same_bits(loss.detach(), expected[0])  # it did compute in 16 bits
    assert_close((loss.detach(), grads), expected, TOLERANCE[dtype])


@every_16_bit_dtype
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_dtype_of_logits_alone(kernel, device, api, dtype, logits_dtype):
    batch = make_batch(B=2, T=6, U=3, dtype=logits_dtype, device=device)
    expected = loss_and_grads(kernel, batch, api)
    with torch.autocast(device, dtype=dtype):
        outcome = loss_and_grads(kernel, batch, api)
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name), getattr(expected, name)), name


def scaled_step(model, inputs, scaler, optimizer, device):
    """A step of training in float16; returns the loss and the gradients without their scale."""
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = model(*inputs)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), grads


@every_kind
def test_grad_scaler(kernel, device, function, options):
    """The gradients do not know the scale; one too large for float16 is found out; a sample without alignment is no overflow."""
    model, inputs = make_model(kernel, function, device=device, **options), make_speech(device=device)
    expected = loss_and_gradients(model, *inputs)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def same_as_before():
        return all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())

    scaler = torch.amp.GradScaler(device, init_scale=2.0**30)
    scaled_step(model, inputs, scaler, optimizer, device)
    assert scaler.get_scale() == 2.0**29 and same_as_before()

    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    outcome = scaled_step(model, inputs, scaler, optimizer, device)
    assert scaler.get_scale() == 2.0**10 and not same_as_before()
    assert_close(outcome, expected, TOLERANCE[torch.float16])

    inputs[2][1] = 0  # no frames
    loss, _ = scaled_step(model, inputs, scaler, optimizer, device)
    assert loss.isinf() and scaler.get_scale() == 2.0**10


# Checkpointing


@every_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoint_around_joint_network_and_loss(kernel, device, function, options, use_reentrant, autocast):
    """The bits of the same without a checkpoint, dropout included."""
    model = make_model(kernel, function, dropout=0.3, device=device, **options)
    inputs = make_speech(device=device)

    def checkpointed(features, *labels):
        encoded = model.encode(features, labels[0])
        return checkpoint(model.joint_and_loss, *encoded, *labels, use_reentrant=use_reentrant)

    outcomes = []
    for forward in (model, checkpointed):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = forward(*inputs)
        loss.backward()
        outcomes.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert_same_bits(*outcomes)


@every_function
def test_compiled_checkpoint(kernel, device, function):
    model, inputs = make_model(kernel, function, device=device), make_speech(device=device)
    expected = loss_and_gradients(model, *inputs)

    def checkpointed(features, *labels):
        encoded = model.encode(features, labels[0])
        return checkpoint(model.joint_and_loss, *encoded, *labels, use_reentrant=False)

    torch._dynamo.reset()
    loss = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")(*inputs)
    model.zero_grad()
    loss.backward()
    assert_close((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected, 1e-5)


# Threads


@every_function
def test_several_threads_at_once(kernel, device, function):
    models = [make_model(kernel, function, device=device) for _ in range(4)]
    inputs = [make_speech(B=3, T=40, U=12, seed=seed, device=device) for seed in range(4)]
    expected = [loss_and_gradients(model, *speech) for model, speech in zip(models, inputs)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            outcomes = pool.map(lambda model, speech: loss_and_gradients(model, *speech), models, inputs)
            for outcome, reference in zip(outcomes, expected):
                assert_same_bits(outcome, reference)


@pytest.mark.cuda
@pytest.mark.two_gpus
@every_function
def test_two_threads_on_two_gpus(kernel, function):
    """The first GPU is the current one in both threads."""
    models = [make_model(kernel, function, device=device) for device in ("cuda:0", "cuda:1")]
    inputs = [make_speech(B=3, T=40, U=12, device=device) for device in ("cuda:0", "cuda:1")]
    loss, grads = loss_and_gradients(models[0], *inputs[0])
    start = threading.Barrier(2)

    def train(model, speech):
        start.wait()
        outcomes = [loss_and_gradients(model, *speech) for _ in range(20)]
        assert torch.cuda.current_device() == 0
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        for outcomes, device in zip(pool.map(train, models, inputs), ("cuda:0", "cuda:1")):
            for outcome in outcomes:
                expected = (loss.to(device), {name: grad.to(device) for name, grad in grads.items()})
                assert outcome[0].device == torch.device(device)
                assert_same_bits(outcome, expected)


# One CUDA graph


@pytest.mark.cuda
@every_dense_kind
def test_a_captured_training_step(kernel, function, options):
    """Encoder, joint network, loss, backward and optimizer, replayed with five other batches: what eager training does."""
    sizes = {"B": 4, "T": 30, "U": 12, "device": "cuda"}
    model, static = make_model(kernel, function, hidden=32, device="cuda", **options), make_speech(**sizes)
    # A large eps, so that where a gradient is 0 but for rounding the step is too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, capturable=True)

    def step(model, optimizer, inputs):
        optimizer.zero_grad(set_to_none=True)
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        replayed = step(model, optimizer, static)

    eager = make_model(kernel, function, hidden=32, device="cuda", **options)
    eager.load_state_dict(model.state_dict())
    eager_optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2, eps=1e-3, capturable=True)
    eager_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses = []
    for seed in range(1, 6):
        fresh = make_speech(**sizes, seed=seed)
        for tensor, contents in zip(static, fresh):
            tensor.copy_(contents)
        graph.replay()
        losses.append(replayed.item())
        expected = step(eager, eager_optimizer, fresh)
        torch.testing.assert_close(replayed, expected, rtol=1e-5, atol=0)
        for parameter, reference in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(parameter, reference, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=1e-5)
    assert len(set(losses)) == 5
