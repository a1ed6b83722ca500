"""Calls as other people's programs make them: pinned memory, default devices, fake and meta tensors, hooks on saved tensors, misspelt options.

`CALLS` has every public function once, on the tensors of `Inputs`; what holds for a call holds for each of them.
"""

import copy
import functools
import inspect
import shutil
import subprocess
import sys

import numpy as np
import pytest
import test_opcheck
import torch
from support.batches import make_batch
from support.calls import loss_and_grads
from support.comparisons import same_bits
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

V, DURATIONS, HIDDEN = 6, [0, 1, 2], 8
D = len(DURATIONS)


class Inputs:
    """Tensors of one batch, made where the current modes of torch want them: B=3, T=5, U=2."""

    def __init__(self, device="cpu", labels_device=None, dtype=torch.float32, pin=False):
        generator = None if device == "meta" else torch.Generator("cpu").manual_seed(0)

        def normal(*shape):
            x = torch.empty(*shape, device="cpu")
            x = x.normal_(generator=generator) if type(x) is torch.Tensor else x
            return x.to(device, dtype).requires_grad_()

        self.logits = normal(3, 5, 3, V + D)
        self.encoder, self.decoder = normal(3, 5, HIDDEN), normal(3, 3, HIDDEN)
        self.weight, self.bias = normal(V + D, HIDDEN), normal(V + D)
        labels = ([[1, 2], [3, -100], [5, 1]], [5, 4, 3], [2, 1, 2])
        self.labels = [torch.tensor(x, device="cpu").to(labels_device or device) for x in labels]
        if pin:
            self.labels = [x.pin_memory() for x in self.labels]

    @property
    def slices(self):
        return self.logits[..., :V], self.logits[..., V:]

    @property
    def head(self):
        return self.encoder, self.decoder, self.weight, self.bias

    @property
    def rnnt_head(self):
        return self.encoder, self.decoder, self.weight[:V], None if self.bias is None else self.bias[:V]

    @property
    def wanted(self):
        return self.logits, *self.head


CALLS = {
    "tdt_loss": lambda k, x, **o: k.tdt_loss(*x.slices, *x.labels, 0, DURATIONS, **o),
    "tdt_loss_joint": lambda k, x, **o: k.tdt_loss_joint(x.logits, *x.labels, 0, DURATIONS, **o),
    "rnnt_loss": lambda k, x, **o: k.rnnt_loss(x.logits, *x.labels, 0, **o),
    "tdt_loss_fused_joint": lambda k, x, **o: k.tdt_loss_fused_joint(*x.head, *x.labels, 0, DURATIONS, **o),
    "rnnt_loss_fused_joint": lambda k, x, **o: k.rnnt_loss_fused_joint(*x.rnnt_head, *x.labels, 0, **o),
    "parakeet_tdt_loss": lambda k, x, **o: k.parakeet_tdt_loss(*x.slices, *x.labels, 0, DURATIONS, **o),
    "parakeet_rnnt_loss": lambda k, x, **o: k.parakeet_rnnt_loss(x.logits, *x.labels, 0, **o),
    "TDTLoss": lambda k, x, **o: k.layers.TDTLoss()(*x.slices, *x.labels, 0, DURATIONS, **o),
    "RNNTLoss": lambda k, x, **o: k.layers.RNNTLoss()(x.logits, *x.labels, 0, **o),
    "tdt_align": lambda k, x, **o: k.tdt_align(*x.slices, *x.labels, 0, DURATIONS, **o),
    "tdt_align_joint": lambda k, x, **o: k.tdt_align_joint(x.logits, *x.labels, 0, DURATIONS, **o),
    "rnnt_align": lambda k, x, **o: k.rnnt_align(x.logits, *x.labels, 0, **o),
}
ALIGN = [name for name in CALLS if "align" in name]
LOSSES = [name for name in CALLS if "align" not in name]
FUSED = [name for name in CALLS if "fused" in name]
every_call = pytest.mark.parametrize("name", CALLS)
every_loss = pytest.mark.parametrize("name", LOSSES)


def outcome(kernel, name, inputs, **options):
    """What the call returns, and the gradients of what it can be differentiated by."""
    result = CALLS[name](kernel, inputs, **options)
    if name in ALIGN:
        return list(result)
    grads = torch.autograd.grad(result.sum(), inputs.wanted, allow_unused=True)
    assert any(grad is not None for grad in grads)
    return [result.detach(), *grads]


def assert_same_outcome(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected):
        assert (ours is None) == (theirs is None)
        assert ours is None or same_bits(ours, theirs)


def test_every_public_function_is_called_here(kernel):
    of_models = {"info", "restore_loss", "use_fused_loss", "use_loss"}  # take no tensors: test_integrations_*.py
    public = [name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name)) and name not in of_models]
    public += [
        name for name in dir(kernel.layers) if inspect.isclass(vars(kernel.layers)[name]) and name.endswith("Loss")
    ]
    assert of_models <= set(kernel.__all__) and sorted(public) == sorted(CALLS)


# Pinned labels and lengths

COMPILED = ("tdt_loss", "rnnt_loss", "tdt_loss_fused_joint", "tdt_align")


@pytest.mark.cuda
@pytest.mark.parametrize("which", [0, 1, 2], ids=["targets", "logit_lengths", "target_lengths"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pinned_memory_may_be_changed_after_the_call(kernel, which, compiled):
    """The stream has other work first, so a copy that it makes later finds the new numbers."""
    for name in COMPILED if compiled else CALLS:
        expected = outcome(kernel, name, Inputs("cuda"))
        inputs = Inputs("cuda", "cpu", pin=True)
        call = with_labels(kernel, name, inputs)
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager")
            call(*Inputs("cuda", "cpu", pin=True).labels)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # 0.1 s
        result = call(*inputs.labels)
        inputs.labels[which].fill_(1)
        if name not in ALIGN:
            grads = torch.autograd.grad(result[0].sum(), inputs.wanted, allow_unused=True)
            result = [result[0].detach(), *grads]
        torch.cuda.synchronize()
        assert_same_outcome(list(result), expected)


def with_labels(kernel, name, inputs):
    """The call as a function of the labels, which a compiler then takes for arguments."""

    def call(*labels):
        own = copy.copy(inputs)
        own.labels = labels
        result = CALLS[name](kernel, own)
        return tuple(result) if name in ALIGN else (result,)

    return call


def test_calls_with_compiled_labels(kernel, device):
    """What the test above compiles gives what eager mode gives."""
    for name in COMPILED:
        inputs = Inputs(device)
        torch._dynamo.reset()
        compiled = torch.compile(with_labels(kernel, name, inputs), backend="aot_eager")
        for ours, theirs in zip(compiled(*inputs.labels), with_labels(kernel, name, inputs)(*inputs.labels)):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.cuda
def test_a_staging_buffer_used_again(kernel):
    """One pinned buffer for the labels of every step, as a prefetcher has it."""
    first, second = Inputs("cuda"), Inputs("cuda")
    second.labels[0] = torch.tensor([[2, 1], [4, 3], [1, 5]]).cuda()
    expected = [CALLS["tdt_loss"](kernel, inputs).item() for inputs in (first, second)]
    assert expected[0] != expected[1]
    buffer = torch.empty(3, 2, dtype=torch.int64, device="cpu").pin_memory()
    losses = []
    torch.cuda._sleep(200_000_000)
    for inputs in (first, second) * 3:
        buffer.copy_(
            torch.tensor([[1, 2], [3, -100], [5, 1]]) if inputs is first else torch.tensor([[2, 1], [4, 3], [1, 5]])
        )
        inputs.labels[0] = buffer
        losses.append(CALLS["tdt_loss"](kernel, inputs))
    assert [loss.item() for loss in losses] == expected * 3


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in CALLS if name not in FUSED])
def test_pinned_memory_costs_no_wait(kernel, name):
    inputs = Inputs("cuda", "cpu", pin=True)
    outcome(kernel, name, inputs)  # memory that the caching allocators keep
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[name](kernel, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# mean_volume and a malformed sample

MALFORMED = {
    "U = -1": ("target_lengths", -1),
    "U = 10^12": ("target_lengths", 10**12),
    "U = -2^62": ("target_lengths", -(2**62)),
    "T beyond the tensor": ("logit_lengths", 7),
    "T = -1": ("logit_lengths", -1),
    "a label": ("targets", 99),
}
every_malformed = pytest.mark.parametrize("field, value", MALFORMED.values(), ids=MALFORMED.keys())
MEAN_VOLUME = 4  # of the ops
LENGTHS = {"logit_lengths": [6, 5, 4], "target_lengths": [3, 2, 1]}


def with_malformed_sample(durations, device, field, value):
    """A batch whose sample 1 is malformed, and the gradients of mean_volume of the other two, as the oracle has them."""
    good = make_batch(B=3, T=6, U=3, durations=durations, device=device, **LENGTHS)
    expected = torch.cat([good.expected.grad_tokens, good.expected.grad_durations], -1) / (3 + 1)
    expected[1] = 0
    malformed = good.replace(**{field: getattr(good, field).clone()})
    getattr(malformed, field)[1] = value
    return malformed, expected


@pytest.mark.kernels_ci
@every_malformed
def test_mean_volume_counts_no_malformed_sample(kernel, device, api, field, value):
    """Through the ops, as a sample on a GPU gets there: U = -1 made the neighbours' gradients 2.5 times as large."""
    for durations in ((0, 1, 2), ()):
        batch, expected = with_malformed_sample(durations, device, field, value)
        ops = kernel.loss.ops
        loss, *saved, weights = ops.loss(*batch.loss_op_args(api, reduction=MEAN_VOLUME))
        assert loss.isnan()
        grads = ops.gradient(*batch.gradient_op_args(api, torch.ones_like(loss), weights, *saved))
        grad = torch.cat([g for g in grads if g.dim() == 4], -1)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@every_malformed
def test_mean_volume_counts_no_malformed_sample_on_a_gpu(kernel, field, value):
    for durations in ((0, 1, 2), ()):
        batch, expected = with_malformed_sample(durations, "cuda", field, value)
        outcome = loss_and_grads(kernel, batch, "joint", reduction="mean_volume")
        assert outcome.losses.isnan()
        grad = torch.cat([outcome.grad_tokens, outcome.grad_durations], -1)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FUSED)
@every_malformed
def test_mean_volume_of_fused_losses_counts_no_malformed_sample(kernel, name, field, value):
    grads = []
    for is_malformed in (False, True):
        inputs = Inputs("cuda")
        if is_malformed:
            inputs.labels[["targets", "logit_lengths", "target_lengths"].index(field)][1] = value
            reduction = {"reduction": "mean_volume"}
        else:
            reduction = {"reduction": "none"}
        losses = CALLS[name](kernel, inputs, **reduction)
        total = losses if is_malformed else losses[[0, 2]].sum() / 4  # U = 2 each
        assert total.isnan() == is_malformed
        grads.append(torch.autograd.grad(total, (inputs.encoder, inputs.decoder)))
    for good, actual in zip(*grads):
        torch.testing.assert_close(actual[[0, 2]], good[[0, 2]], rtol=1e-4, atol=1e-6)
        assert (actual[1] == 0).all()


# Gradients in place, under saved-tensor hooks

SAVED = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "on the CPU": save_on_cpu,
    "on the CPU, pinned": lambda: save_on_cpu(pin_memory=torch.cuda.is_available()),
}
IN_PLACE = ("tdt_loss_joint", "rnnt_loss")


def logits_of(inputs):
    """As a model makes them: nobody else's memory."""
    leaf, inputs.logits = inputs.logits, inputs.logits * 1.5
    return leaf


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("hooks", SAVED.values(), ids=SAVED.keys())
def test_inplace_grad_under_saved_tensor_hooks(kernel, device, name, hooks):
    """Twice the same, and what else saved the logits before sees them as they were."""
    inputs = Inputs(device)
    leaf = logits_of(inputs)
    expected = torch.autograd.grad(CALLS[name](kernel, inputs) + inputs.logits.square().mean(), leaf)

    inputs = Inputs(device)
    leaf = logits_of(inputs)
    with hooks():
        penalty = inputs.logits.square().mean()
        loss = CALLS[name](kernel, inputs, inplace_grad=True)
    for retain_graph in (True, False):
        actual = torch.autograd.grad(loss + penalty, leaf, retain_graph=retain_graph)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inplace_grad_within_a_checkpoint(kernel, device, name, use_reentrant):
    results = []
    for inplace_grad in (False, True):
        inputs = Inputs(device)
        leaf = inputs.logits

        def step(leaf, inputs=inputs, inplace_grad=inplace_grad):
            inputs.logits = leaf * 1.5
            return CALLS[name](kernel, inputs, inplace_grad=inplace_grad)

        loss = checkpoint(step, leaf, use_reentrant=use_reentrant)
        loss.backward(retain_graph=True)
        first = leaf.grad.clone()
        loss.backward()
        torch.testing.assert_close(leaf.grad, 2 * first, rtol=0, atol=0)
        results.append(first)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


# Options


MISSPELT = (
    "omga",
    "fastemit_lamda",
    "zero_infinty",
    "delay_penality",
    "Reduction",
    "blank",
    "num_items_in_batches",
    "return_ocupancy",
    "loss_kwargs",
)


@pytest.mark.kernels_ci
@every_call
def test_misspelt_options(kernel, name):
    for option in MISSPELT:
        with pytest.raises(TypeError, match=option):
            functools.partial(CALLS[name], kernel, Inputs(), **{option: 0.9})()


@pytest.mark.parametrize("name", ["parakeet_tdt_loss", "parakeet_rnnt_loss"])
def test_options_of_other_functions(kernel, name):
    """Of the functions behind it, which a loss function has no use for or cannot return."""
    others = ("return_occupancy", "inplace_grad", "dropout", "targets", "target_lengths", "activation")
    for option in (*others, *(("omega",) if "rnnt" in name else ())):
        with pytest.raises(TypeError, match=option):
            CALLS[name](kernel, Inputs(), **{option: True})


@pytest.mark.parametrize("name", ["parakeet_tdt_loss", "parakeet_rnnt_loss"])
def test_keywords_that_transformers_passes_on(kernel, name):
    generic = pytest.importorskip("transformers.utils.generic")
    keywords = [key for key in generic.TransformersKwargs.__annotations__ if key != "num_items_in_batch"]
    assert {"output_attentions", "output_hidden_states", "position_ids"} <= set(keywords)
    plain = CALLS[name](kernel, Inputs())
    for value in (True, None):
        assert torch.equal(CALLS[name](kernel, Inputs(), **dict.fromkeys(keywords, value)), plain)


SWITCHES = ("zero_infinity", "return_occupancy", "inplace_grad", "return_stats")
NUMBERS = ("sigma", "omega", "fastemit_lambda", "clamp", "delay_penalty", "dropout", "occupancy_threshold")


def options_of(kernel, name):
    function = getattr(kernel, name, None) or getattr(kernel.layers, name).forward
    return inspect.signature(function).parameters


@every_call
def test_options_of_the_wrong_type(kernel, name):
    tested = name == "RNNTLoss"  # which has no options
    for option in options_of(kernel, name):
        if option in SWITCHES:
            for value in ("False", "", 0, 1, None, torch.tensor(True), np.bool_(False)):
                tested = True
                with pytest.raises(TypeError, match=f"{option} must be True or False"):
                    CALLS[name](kernel, Inputs(), **{option: value})
        if option in NUMBERS:
            for value in ("0.1", None, [0.1], torch.tensor(0.1), True):
                tested = True
                with pytest.raises(TypeError, match=f"{option} must be a number"):
                    CALLS[name](kernel, Inputs(), **{option: value})
    assert tested


WRONG_VALUES = {
    "sigma": (1e300, -1.1e4, float("nan")),
    "fastemit_lambda": (-0.1, 1e39, 1e300, float("inf"), float("nan")),
    "delay_penalty": (1e300, -1.1e4, float("nan")),
    "clamp": (float("inf"), float("nan")),
    "omega": (-0.1, 1.1, float("nan")),
}


@every_call
def test_options_out_of_range(kernel, name):
    for option, values in WRONG_VALUES.items():
        for value in values if option in options_of(kernel, name) else ():
            with pytest.raises(ValueError, match=option):
                CALLS[name](kernel, Inputs(), **{option: value})


def test_words_that_people_match(kernel):
    """As torch, transformers and the kernel before this one say it."""
    for name in LOSSES:
        with pytest.raises(ValueError, match="Invalid reduction"):
            CALLS[name](kernel, Inputs(), reduction="average")
    x = Inputs()
    for function in (kernel.tdt_loss, kernel.tdt_align):
        with pytest.raises(ValueError, match="non-negative"):
            function(*x.slices, *x.labels, 0, [-1, 1, 2])


# Options at their ends: an error or finite numbers, the right ones


@pytest.mark.parametrize("sigma", [-1e4, 1e4, 100.0, -7.5e3])
def test_sigma_of_many_frames(kernel, device, sigma):
    """148,000 arcs of 10,000 nats are beyond what a path can have."""
    T = 150_000
    logits = torch.zeros(1, T, 1, 2, device=device, requires_grad=True)
    labels = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([T]), torch.tensor([0]))
    try:
        loss = kernel.rnnt_loss(logits, *labels, 0, "sum", sigma=sigma)
    except ValueError as error:
        assert "too large for 150000 frames and 0 labels" in str(error) and abs(sigma) > 1000
        return
    loss.backward()
    assert loss.item() == pytest.approx(T * (np.log(2) + sigma), rel=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor([-0.5, 0.5], device=device).expand(1, T, 1, 2))


@pytest.mark.parametrize("delay_penalty", [1e4, -1e4, 1e3, -1e3, -10.0])
@pytest.mark.parametrize("kind", ["RNN-T", "TDT"])
def test_delay_penalty_of_labels_at_the_first_frame(kernel, device, delay_penalty, kind):
    """T=500, U=139: 139 labels that may stand at frame 0 alone cost 250 penalties each."""
    T, U = 500, 139
    durations = [] if kind == "RNN-T" else [0, 1]
    logits = torch.zeros(1, T, U + 1, 2 + len(durations), device=device)
    logits[:, 1:, :, 1] = -torch.inf
    logits.requires_grad_()
    labels = (torch.ones(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]))
    try:
        if durations:
            loss = kernel.tdt_loss_joint(logits, *labels, 0, durations, reduction="sum", delay_penalty=delay_penalty)
        else:
            loss = kernel.rnnt_loss(logits, *labels, 0, "sum", delay_penalty=delay_penalty)
    except ValueError as error:
        assert f"too large for {T} frames and {U} labels" in str(error) and abs(delay_penalty) > 100
        return
    loss.backward()
    arcs = (
        U * 2 + 1 + T - 1
    )  # of ln 2: labels and the first blank, then blanks of one token; a duration each where there are
    of_tokens = (U + 1) * np.log(2)
    of_durations = (U + T) * np.log(2) if durations else 0.0
    expected = of_tokens + of_durations - U * delay_penalty * (T - 1) / 2
    assert arcs > 0 and loss.item() == pytest.approx(expected, rel=1e-5)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_fastemit_lambda(kernel, device, dtype):
    for name in ("tdt_loss_joint", "rnnt_loss", "tdt_loss_fused_joint"):
        result = outcome(kernel, name, Inputs(device, dtype=dtype), fastemit_lambda=1e4)
        assert all(x.isfinite().all() for x in result if x is not None)


def test_penalties_through_the_ops(kernel, device):
    """A direct call finds no way round."""
    batch = make_batch(B=1, T=500, U=139, V=2, durations=(), device=device, delay_penalty=-1e4)
    with pytest.raises(RuntimeError, match="too large for 500 frames and 139 labels"):
        kernel.loss.ops.loss(*batch.loss_op_args())


# Dropout


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
        inputs.encoder, inputs.decoder, inputs.weight, inputs.bias, inputs.labels = (
            encoder,
            decoder,
            weight,
            bias,
            labels,
        )
        return CALLS[name](kernel, inputs, dropout=0.4)

    torch._dynamo.reset()
    assert_same_outcome(run(torch.compile(call, backend=backend)), run(call))


# Bad nodes

NODES_AT = {"log_probs_tile_": 1, "gradient_tile_": 3, "joint_hidden_": 3, "joint_hidden_backward_": 5}
SUMS_AT = {"log_probs_tile_": (2, 3), "gradient_tile_": (), "joint_hidden_": (), "joint_hidden_backward_": (0, 1)}


def guarded(x, room=4096, mark=7.0):
    """A copy of x within a larger tensor, and that tensor: what is written beside x shows."""
    around = torch.full((x.numel() + 2 * room,), mark, dtype=x.dtype, device=x.device)
    copy = around[room : room + x.numel()].view(x.shape).copy_(x)
    return copy, around


def fenced(x, around, room=4096, mark=7.0):
    return (around[:room] == mark).all() and (around[room + x.numel() :] == mark).all()


def cases_of(kernel, op, device):
    """Valid arguments, with the sums that the op writes to guarded, and how many nodes there are."""
    for args in getattr(test_opcheck, op)(kernel.loss.ops, device):
        args = list(args)
        guards = []
        for at in SUMS_AT[op]:
            if args[at] is not None:
                args[at], around = guarded(args[at].detach())
                guards.append((args[at], around))
        if op == "log_probs_tile_":
            count = args[2].shape[:3].numel()
        elif op == "gradient_tile_":
            count = args[7].shape[:3].numel()
        else:
            encoder, decoder = args[NODES_AT[op] - 2 : NODES_AT[op]]
            count = encoder.shape[0] * encoder.shape[1] * decoder.shape[1]
        yield args, guards, count


def with_nodes(op, args, row, value):
    args = list(args)
    args[NODES_AT[op]] = args[NODES_AT[op]].clone()
    args[NODES_AT[op]][row] = value
    return args


def bad_nodes(count):
    return (count, -1, count + 9, -20, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("op", NODES_AT)
def test_bad_nodes_on_the_host_are_an_error(kernel, op):
    for args, guards, count in cases_of(kernel, op, "cpu"):
        getattr(kernel.loss.ops, op)(*args)  # as they are they pass
        for value in bad_nodes(count):
            for row in (0, -1):
                with pytest.raises(RuntimeError, match=rf"nodes must be in \[0, {count}\), got {value}"):
                    getattr(kernel.loss.ops, op)(*with_nodes(op, args, row, value))
                assert all(fenced(*guard) for guard in guards)


@pytest.mark.cuda
@pytest.mark.parametrize("op", NODES_AT)
def test_bad_nodes_on_a_gpu_stay_within_the_tensors(kernel, op):
    """Nobody reads them back; the context lives, and nothing outside of the tensors changes."""
    expected = outcome(kernel, "tdt_loss", Inputs("cuda"))
    for args, guards, count in cases_of(kernel, op, "cuda"):
        for value in bad_nodes(count):
            for row in (0, -1):
                getattr(kernel.loss.ops, op)(*with_nodes(op, args, row, value))
                torch.cuda.synchronize()
                assert all(fenced(*guard) for guard in guards)
    assert_same_outcome(outcome(kernel, "tdt_loss", Inputs("cuda")), expected)


# Devices


@pytest.fixture
def default_device():
    """Sets torch's default device until the test is over."""
    yield torch.set_default_device
    torch.set_default_device(None)


@every_call
@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("labels_on_the_host", [False, True])
def test_default_device(kernel, device, default_device, name, default, labels_on_the_host):
    """What the package makes for itself lies where its arguments lie."""

    def inputs():
        return Inputs(device, "cpu" if labels_on_the_host else device)

    expected = outcome(kernel, name, inputs())
    given = [inputs(), inputs()]
    with torch.device(default):
        assert_same_outcome(outcome(kernel, name, given[0]), expected)
    default_device(default)
    assert_same_outcome(outcome(kernel, name, given[1]), expected)


OPTIONS = {
    "plain": {},
    "not reduced": {"reduction": "none"},
    "mean_volume": {"reduction": "mean_volume"},
    "omega": {"omega": 0.3},
    "occupancy": {"return_occupancy": True},
    "stats": {"return_stats": True},
    "dropout": {"dropout": 0.3},
    "in place": {"inplace_grad": True},
    "items": {"num_items_in_batch": 20, "reduction": "mean_volume"},
}


def described(kernel, name, inputs, options):
    """Shapes, strides and dtypes of what a call and its backward return."""
    if "inplace_grad" in options:
        logits_of(inputs)
    result = CALLS[name](kernel, inputs, **options)
    tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    grads = [None] * len(inputs.wanted)
    if name not in ALIGN:
        grads = torch.autograd.grad(tensors[0].sum(), inputs.wanted, allow_unused=True)
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in (*tensors, *grads)], {
        x.device.type for x in (*tensors, *grads) if x is not None
    }


@every_call
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("where", ["meta", "meta, labels on the host", "fake", "fake cuda"])
def test_tensors_without_numbers(kernel, name, options, where):
    """The shapes of a real call, as cross_entropy has them."""
    if not set(options) <= set(options_of(kernel, name)):
        pytest.skip("no such option")
    if where == "fake cuda" and not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA")
    expected, _ = described(kernel, name, Inputs(), options)
    if where.startswith("fake"):
        with FakeTensorMode():
            actual, devices = described(kernel, name, Inputs("cuda" if "cuda" in where else "cpu", "cpu"), options)
    else:
        actual, devices = described(kernel, name, Inputs("meta", "cpu" if "host" in where else "meta"), options)
    assert actual == expected
    assert devices == {"cuda" if "cuda" in where else "cpu" if where == "fake" else "meta"}


@every_call
def test_fake_logits_and_real_labels(kernel, name):
    """A model that is traced with the labels at hand."""
    expected, _ = described(kernel, name, Inputs(), {})
    real = Inputs()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = Inputs()
        inputs.labels = real.labels
        actual, _ = described(kernel, name, inputs, {})
    assert actual == expected


# Weights that hold nothing


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(0,), (0, 0), (0, HIDDEN), (V + D, 0), (72,)], ids=str)
def test_a_weight_that_is_not_gathered(kernel, name, shape):
    """ZeRO-3 and FSDP leave an empty or a flat tensor in the place of a sharded weight."""
    inputs = Inputs()
    inputs.weight, inputs.bias = torch.zeros(shape), None
    with pytest.raises(ValueError, match="weight must have"):
        CALLS[name](kernel, inputs)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("field", ["encoder", "decoder", "weight", "bias"])
def test_other_operands_of_the_wrong_shape(kernel, name, field):
    for shape in ((), (0,), (0, 0), (2, 2, 2, 2)):
        inputs = Inputs()
        setattr(inputs, field, torch.zeros(shape))
        if name.startswith("rnnt") and shape == () and field in ("weight", "bias"):
            continue  # this test's own slice of it fails
        with pytest.raises(ValueError, match=f"{field} must have"):
            CALLS[name](kernel, inputs)


IMPORT = """
import torch
from kernels import get_kernel
from torch._subclasses import FakeTensorMode

with {mode}:
    kernel = get_kernel("kernels-community/tdt-loss", version=1)
logits = torch.zeros(1, 3, 2, 4 + 3, requires_grad=True)
joint = logits * 1
rest = torch.tensor([[0]]), torch.tensor([3]), torch.tensor([1]), 3, [0, 1, 2]
kernel.tdt_loss(joint[..., :4], joint[..., 4:], *rest, sigma=0.05).backward()
assert abs(logits.grad[0, 0, 0, 0] + 0.64962804) < 1e-6
"""


@pytest.mark.parametrize(
    "mode", ["torch.inference_mode()", "torch.no_grad()", "FakeTensorMode()", "torch.device('meta')"]
)
def test_imported_in_any_mode(mode):
    result = subprocess.run(
        [sys.executable, "-c", IMPORT.format(mode=mode)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
