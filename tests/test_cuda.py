"""What only a GPU can show: streams, devices, graphs, synchronization, memory, sizes beyond 2^31."""

import pytest
import torch
from support.batches import make_batch
from support.calls import call, loss_and_grads
from support.comparisons import assert_matches, assert_same_bits, same_bits
from support.known_values import loss_of_rnnt
from support.memory import peak_extra_bytes

pytestmark = pytest.mark.cuda

LENGTHS = {"logit_lengths": [30, 21, 13, 30], "target_lengths": [12, 3, 7, 9]}


def training_batch(**changes):
    return make_batch(
        **{"B": 4, "T": 30, "U": 12, "V": 129, "durations": (0, 1, 2, 3, 4), "device": "cuda", **LENGTHS, **changes}
    )


ARCS = {
    "TDT": {},
    "both lattices": {"omega": 0.3, "fastemit_lambda": 0.5, "clamp": 0.05, "delay_penalty": 0.2},
    "RNN-T": {"durations": (), "fastemit_lambda": 0.5, "clamp": 0.05, "delay_penalty": 0.2},
}
every_arcs = pytest.mark.parametrize("arcs", ARCS.values(), ids=ARCS.keys())


@pytest.mark.kernels_ci
@every_arcs
def test_cuda_equals_cpu(kernel, api, arcs):
    on_cuda = loss_and_grads(kernel, training_batch(**arcs), api, return_occupancy=True)
    on_cpu = loss_and_grads(kernel, training_batch(device="cpu", **arcs), api, return_occupancy=True)
    for occ, expected in zip(on_cuda.occupancy, on_cpu.occupancy):
        torch.testing.assert_close(occ.cpu(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(on_cuda.losses.cpu(), on_cpu.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(on_cuda.grad_tokens.cpu(), on_cpu.grad_tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(on_cuda.grad_durations.cpu(), on_cpu.grad_durations, rtol=0, atol=1e-5)


@pytest.mark.kernels_ci
@every_arcs
def test_no_host_synchronization(kernel, api, arcs):
    batch = training_batch(**arcs)
    expected = loss_and_grads(kernel, batch, api, reduction="mean")
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = loss_and_grads(kernel, batch, api, reduction="mean", return_occupancy=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(outcome, expected)


def test_no_host_synchronization_with_pinned_lengths(kernel):
    batch = training_batch()
    expected = loss_and_grads(kernel, batch)
    pinned = batch.replace(
        **{name: getattr(batch, name).cpu().pin_memory() for name in ("targets", "logit_lengths", "target_lengths")}
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = loss_and_grads(kernel, pinned)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(outcome, expected)


def test_side_stream(kernel):
    # The inputs appear on the side stream late; a launch on any other stream would read zeros.
    batch = training_batch()
    expected = loss_and_grads(kernel, batch, reduction="mean")
    late = batch.replace(
        token_logits=torch.zeros_like(batch.token_logits), duration_logits=torch.zeros_like(batch.duration_logits)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.token_logits.copy_(batch.token_logits)
        late.duration_logits.copy_(batch.duration_logits)
        outcome = loss_and_grads(kernel, late, reduction="mean")
    stream.synchronize()
    assert_same_bits(outcome, expected)


@pytest.mark.two_gpus
def test_second_gpu_while_the_first_is_current(kernel, api):
    expected = loss_and_grads(kernel, training_batch(), api)
    assert torch.cuda.current_device() == 0
    outcome = loss_and_grads(kernel, training_batch(device="cuda:1"), api)
    assert outcome.losses.device == outcome.grad_tokens.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name).cpu(), getattr(expected, name).cpu())


@pytest.mark.two_gpus
def test_lengths_on_another_gpu(kernel):
    batch = training_batch()
    moved = batch.replace(logit_lengths=batch.logit_lengths.to("cuda:1"), targets=batch.targets.to("cuda:1"))
    assert_same_bits(loss_and_grads(kernel, moved), loss_and_grads(kernel, batch))


@every_arcs
@pytest.mark.parametrize("inplace_grad", [False, True])
def test_graph_of_forward_and_backward(kernel, inplace_grad, arcs):
    static = training_batch(**arcs)
    given = static.joint.clone()
    weight = torch.ones((), device="cuda", requires_grad=True)

    def step():
        logits = given * weight  # a fresh tensor each time, so that in-place gradients have something to overwrite
        loss, occupancy = call(kernel, static, [logits], "mean", inplace_grad=inplace_grad, return_occupancy=True)
        return loss.detach(), *torch.autograd.grad(loss, (logits, weight)), *occupancy

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(1, 6):
        fresh = training_batch(
            seed=seed, logit_lengths=[30 - seed, 21, 13 + seed, 30], target_lengths=[12, seed, 7, 9 - seed], **arcs
        )
        given.copy_(fresh.joint)
        for tensor, contents in zip(static.lengths, fresh.lengths):
            tensor.copy_(contents)
        graph.replay()
        for replayed, eager in zip(captured, step()):
            assert same_bits(replayed, eager)
        expected = loss_and_grads(kernel, fresh, "joint", reduction="mean")
        assert same_bits(captured[0], expected.losses)
        assert same_bits(captured[1][..., :129], expected.grad_tokens)


@pytest.mark.kernels_ci
@every_arcs
def test_same_bits_twenty_times(kernel, api, arcs):
    batch = training_batch(V=1025, dtype=torch.bfloat16, **arcs)
    first = loss_and_grads(kernel, batch, api)
    for _ in range(19):
        assert_same_bits(loss_and_grads(kernel, batch, api), first)


def test_same_bits_beside_other_work(kernel):
    batch = training_batch()
    first = loss_and_grads(kernel, batch)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(50):
            busy = busy @ busy * 1e-3
    for _ in range(5):
        assert_same_bits(loss_and_grads(kernel, batch), first)


MIB = 2**20


@pytest.mark.parametrize(
    "name, api, options, logits_beyond",
    [
        ("separate", "separate", {}, 1),
        ("joint", "joint", {}, 1),
        ("joint in place", "joint", {"inplace_grad": True}, 0),
        ("both lattices", "joint", {"inplace_grad": True, "omega": 0.5}, 0),
    ],
)
def test_peak_memory_of_a_training_step(kernel, name, api, options, logits_beyond):
    batch = make_batch(B=4, T=100, U=40, V=2049, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device="cuda")
    inputs = [batch.joint] if api == "joint" else [batch.token_logits, batch.duration_logits]
    inputs = [logits.detach().requires_grad_() for logits in inputs]
    function = kernel.tdt_loss_joint if api == "joint" else kernel.tdt_loss

    def step():
        torch.autograd.grad(function(*inputs, *batch.rest, **options), inputs)

    step()
    bytes_of_logits = sum(logits.numel() * logits.element_size() for logits in inputs)
    per_node = 76 if options.get("omega") else 60  # another alpha and beta
    assert peak_extra_bytes(step, "cuda") <= logits_beyond * bytes_of_logits + per_node * batch.valid.numel() + MIB


def test_peak_memory_without_grad(kernel):
    batch = make_batch(B=4, T=100, U=40, V=2049, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device="cuda")
    logits = batch.joint.requires_grad_()

    def evaluate():
        with torch.no_grad():
            kernel.tdt_loss_joint(logits, *batch.rest)

    assert peak_extra_bytes(evaluate, "cuda") <= 60 * batch.valid.numel() + MIB


def test_no_memory_from_outside_the_allocator_of_torch(kernel):
    batch = make_batch(B=4, T=100, U=40, V=2049, durations=(0, 1, 2, 3, 4), dtype=torch.bfloat16, device="cuda")
    loss_and_grads(kernel, batch, "joint")  # loads the kernels' code
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    for _ in range(3):
        loss_and_grads(kernel, batch, "joint")
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() == before


def test_memory_comes_back(kernel):
    batch = training_batch()
    loss_and_grads(kernel, batch)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        loss_and_grads(kernel, batch)
    assert torch.cuda.memory_allocated() == before


def test_one_sample_beyond_2_to_the_31_elements(kernel):
    T, U1, V = 1100, 500, 4096
    logits = torch.zeros(1, T, U1, V + 1, dtype=torch.bfloat16, device="cuda").requires_grad_()
    assert logits.numel() > 2**31
    targets = torch.ones(1, U1 - 1, dtype=torch.int64, device="cuda")
    lengths = torch.tensor([T], device="cuda"), torch.tensor([U1 - 1], device="cuda")
    loss = kernel.tdt_loss_joint(logits, targets, *lengths, 0, [1], reduction="sum", inplace_grad=True)
    small = make_batch(T=T, U=U1 - 1, V=2, durations=(1,), scale=0.0)
    # Durations [1]: each of the T arcs is one token of V, so only the logarithm of V differs.
    expected = small.expected.losses.item() + T * (torch.tensor(float(V)).log() - torch.tensor(2.0).log()).item()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)
    last = grad[0, -1, -1].double()
    assert last[0].item() == pytest.approx(1 / V - 1, rel=1e-2) and last[1:V].mean().item() == pytest.approx(
        1 / V, rel=1e-2
    )


def test_one_rnnt_sample_beyond_2_to_the_31_elements(kernel):
    T, U1, V = 1100, 500, 4096
    logits = torch.zeros(1, T, U1, V, dtype=torch.bfloat16, device="cuda").requires_grad_()
    assert logits.numel() > 2**31
    targets = torch.ones(1, U1 - 1, dtype=torch.int64, device="cuda")
    lengths = torch.tensor([T], device="cuda"), torch.tensor([U1 - 1], device="cuda")
    loss = kernel.rnnt_loss(logits, targets, *lengths, 0, "sum", inplace_grad=True)
    assert loss.item() == pytest.approx(loss_of_rnnt(T, U1 - 1, V), rel=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)
    last = grad[0, -1, -1].double()
    assert last[0].item() == pytest.approx(1 / V - 1, rel=1e-2)
    assert last[1:].mean().item() == pytest.approx(1 / V, rel=1e-2)


def test_many_tiny_samples(kernel):
    batch = make_batch(B=70_000, T=2, U=1, V=3, durations=(0, 1), device="cuda")
    outcome = loss_and_grads(kernel, batch)
    some = torch.tensor([0, 1, 65_535, 65_536, 69_999])
    few = batch.replace(
        **{
            name: getattr(batch, name)[some]
            for name in ("token_logits", "duration_logits", "targets", "logit_lengths", "target_lengths")
        }
    )
    outcome.losses, outcome.grad_tokens, outcome.grad_durations = (
        part[some] for part in (outcome.losses, outcome.grad_tokens, outcome.grad_durations)
    )
    assert_matches(outcome, few)
