"""Two slices of a joint tensor: one gradient for both, and the gradient that autograd alone would give, however they are cut and used.

Hooks on them are in test_slices_hooks.py, what autograd is asked for in test_slices_gradients.py, modes of torch in test_slices_modes.py.
"""

import pytest
import torch
from support.batches import make_batch
from support.memory import peak_extra_bytes
from support.slices import (
    CUTS,
    LOSSES,
    PLACES,
    D,
    V,
    assert_as_the_reference,
    assert_same,
    backward,
    every_loss,
    make_graph,
    nothing,
    parakeet,
    reference,
    run,
    slices,
    small_batch,
)


@every_loss
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_cuts(kernel, device, loss, cut):
    assert_as_the_reference(kernel, loss, small_batch(device), **cut)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(kernel, device, loss, dtype):
    for cut in ("slices", "split", "a leaf"):
        assert_as_the_reference(kernel, loss, small_batch(device, dtype), **CUTS[cut])


@every_loss
def test_label_positions_squeezed_away(kernel, device, loss):
    """As Parakeet does with a batch without labels; parakeet_tdt_loss takes such slices as they are."""

    def squeezed(x):
        parts = slices(x.squeeze(2))
        return parts if loss is parakeet else tuple(part.unsqueeze(2) for part in parts)

    batch = small_batch(device, U=0)
    expected = run(kernel, reference, batch, nothing, nothing, backward, cut=slices)
    assert_same(run(kernel, loss, batch, nothing, nothing, backward, cut=squeezed), expected)


@every_loss
def test_frames_left_out(kernel, device, loss):
    """Slices in two dimensions: the gradient of the frames that are left out is 0."""
    batch = small_batch(device)

    def cut(x):
        return x[:, 1:, :, :V], x[:, 1:, :, V:]

    batch.logit_lengths.clamp_(max=3)
    assert_as_the_reference(kernel, loss, batch, cut=cut)
    assert_as_the_reference(kernel, loss, batch, view=lambda x: x[:, 1:])


# Several uses of one tensor


def also_a_penalty(which):
    def finish(graph, value):
        return backward(graph, value + sum(getattr(graph, name).square().mean() for name in which))

    return finish


@pytest.mark.parametrize("which", PLACES.values(), ids=PLACES.keys())
def test_slices_used_elsewhere_too(kernel, device, which):
    for loss in LOSSES.values():
        for cut in ("slices", "split", "a leaf", "a padded product"):
            assert_as_the_reference(kernel, loss, small_batch(device), finish=also_a_penalty(which), **CUTS[cut])


@every_loss
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_two_losses_of_the_same_slices(kernel, device, loss, at_once):
    batch = small_batch(device)
    other = batch.replace(sigma=0.2, targets=batch.targets.flip(1))

    def run_two(loss):
        graph = make_graph(batch)
        values = [loss(kernel, graph.tokens, graph.durations, b) for b in (batch, other, batch)]
        values.append(kernel.rnnt_loss(graph.tokens, *batch.rnnt_args[1:]))
        values.append(loss(kernel, *slices(graph.root), other))
        if at_once:
            sum(values).backward()
        else:
            for value in values:
                value.backward(retain_graph=True)
        return [*(value.detach() for value in values), *(leaf.grad for leaf in graph.leaves)]

    assert_same(run_two(loss), run_two(reference))


@every_loss
def test_losses_of_several_batches_added_up(kernel, device, loss):
    def steps(loss):
        batch = small_batch(device)
        graph = make_graph(batch)
        for scale in (1.0, 2.0, 0.5):
            loss(kernel, *slices(graph.head(graph.hidden * scale)), batch).backward()
        return [leaf.grad for leaf in graph.leaves]

    assert_same(steps(loss), steps(reference))


# Changed in place


@every_loss
@pytest.mark.parametrize("which", ["root", "tokens", "durations"])
def test_changed_in_place_before_the_loss(kernel, device, loss, which):
    def change(graph):
        getattr(graph, which).mul_(2)

    assert_as_the_reference(kernel, loss, small_batch(device), before=change)


@every_loss
@pytest.mark.parametrize("which", ["root", "tokens", "durations"])
def test_changed_in_place_after_the_loss_is_an_error(kernel, device, loss, which):
    batch = small_batch(device)
    graph = make_graph(batch)
    value = loss(kernel, graph.tokens, graph.durations, batch)
    getattr(graph, which).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# What one gradient is for


def memory_of(step, device):
    """(most bytes held, bytes allocated in all) in a step."""
    step()  # what torch allocates once
    if device == "cpu":
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        events = profile.profiler.kineto_results.events()
        in_all = sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)
    else:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        step()
        torch.cuda.synchronize()
        in_all = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    return peak_extra_bytes(step, device), in_all


STOCK = {
    "slices of a leaf": {"leaf": True},
    "slices of a linear layer's output": {},
    "split": {"cut": lambda x: x.split([1000, D], dim=-1)},
    "counted from the end": {"cut": lambda x: (x[..., :-D], x[..., -D:])},
    "of a padded product": {"columns": 1008, "view": lambda x: x[..., : 1000 + D]},
}


@pytest.mark.kernels_ci
@every_loss
@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK.keys())
def test_one_gradient_for_both_slices(kernel, device, loss, stock):
    """No zeros of the size of the logits, no sum of two such: as much memory as tdt_loss_joint's, at most and in all."""
    batch = make_batch(B=2, T=20, U=9, V=1000, device=device)
    options = {"columns": 1000 + D, "cut": lambda x: (x[..., :1000], x[..., 1000:]), **stock}

    graph = make_graph(batch, **options)

    def step(loss):
        x = graph.hidden.detach().requires_grad_()
        root = x if graph.head is None else graph.head(x)
        logits = options.get("view", lambda root: root)(root)
        loss(logits).backward()
        for parameter in graph.head.parameters() if graph.head else ():
            parameter.grad = None

    ours = memory_of(lambda: step(lambda logits: loss(kernel, *options["cut"](logits), batch)), device)
    theirs = memory_of(lambda: step(lambda logits: kernel.tdt_loss_joint(logits, *batch.rest)), device)
    for actual, expected in zip(ours, theirs):
        assert actual <= 1.03 * expected
