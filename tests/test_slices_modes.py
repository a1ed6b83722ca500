"""Two slices of a joint tensor under what torch puts around a step: saved-tensor hooks, checkpoints, anomaly mode, compiler, autocast, threads."""

import threading

import pytest
import torch
from support.slices import (
    CUTS,
    D,
    Graph,
    V,
    assert_as_the_reference,
    assert_same,
    every_loss,
    make_graph,
    reference,
    slices,
    small_batch,
)
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def with_other_strides(x):
    """Of the logits; what else the loss saves is its own."""
    is_logits = x.dim() == 4 and x.shape[3] in (V, D)
    return x.transpose(0, 1).contiguous().transpose(0, 1) if is_logits else x


SAVED = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()),
    "other strides": lambda: saved_tensors_hooks(lambda x: x.clone(), with_other_strides),
    "on the CPU": save_on_cpu,
}


@every_loss
@pytest.mark.parametrize("hooks", SAVED.values(), ids=SAVED.keys())
def test_saved_tensor_hooks(kernel, device, loss, hooks):
    def run_with(loss):
        batch = small_batch(device)
        with hooks():
            graph = make_graph(batch)
            value = loss(kernel, graph.tokens, graph.durations, batch)
        value.backward(retain_graph=True)
        value.backward()
        return [leaf.grad for leaf in graph.leaves]

    assert_same(run_with(loss), run_with(reference))


@every_loss
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(kernel, device, loss, use_reentrant):
    batch = small_batch(device)

    def run_with(around, loss, of_the_loss):
        graph = make_graph(batch)
        graph.head.zero_grad()

        def step(hidden):
            logits = graph.head(hidden)
            return loss(kernel, *slices(logits), batch) if of_the_loss else logits

        value = around(step, graph.hidden)
        (value if of_the_loss else loss(kernel, *slices(value), batch)).backward()
        return [leaf.grad for leaf in graph.leaves]

    def checkpointed(step, hidden):
        return checkpoint(step, hidden, use_reentrant=use_reentrant)

    for of_the_loss in (True, False):
        expected = run_with(lambda step, hidden: step(hidden), reference, of_the_loss)
        assert_same(run_with(checkpointed, loss, of_the_loss), expected)


@every_loss
@pytest.mark.parametrize("cut", ["slices", "split", "a padded product"])
def test_anomaly_mode(kernel, device, loss, cut):
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_as_the_reference(kernel, loss, small_batch(device), **CUTS[cut])


@every_loss
def test_anomaly_mode_finds_nan(kernel, device, loss):
    batch = small_batch(device)
    graph = make_graph(batch)
    graph.hidden.data[0, 0, 0, 0] = torch.nan
    graph = Graph(graph.hidden, graph.head, root := graph.head(graph.hidden), root, *slices(root))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan values"):
        loss(kernel, graph.tokens, graph.durations, batch).backward()


@every_loss
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_compiled_model(kernel, device, loss, inside):
    def run_with(loss, compiled):
        batch = small_batch(device)
        graph = make_graph(batch)

        def model(hidden):
            logits = graph.head(hidden)
            return loss(kernel, *slices(logits), batch) if inside else logits

        if compiled:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        value = model(graph.hidden)
        if not inside:
            value.register_hook(lambda grad: grad * 3)
            value = loss(kernel, *slices(value), batch)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in graph.leaves)]

    assert_same(run_with(loss, True), run_with(reference, False))


@every_loss
def test_autocast(kernel, device, loss):
    """The head's output is of 16 bits, and so is what arrives there."""

    def run_with(loss):
        batch = small_batch(device, torch.float32)
        graph = make_graph(batch)
        with torch.autocast(device, dtype=torch.bfloat16):
            root = graph.head(graph.hidden)
            seen = []
            root.register_hook(lambda grad: seen.append(grad * 1))
            value = loss(kernel, *slices(root), batch)
        value.backward()
        assert root.dtype == seen[0].dtype == torch.bfloat16
        return [value.detach(), seen[0].float(), *(leaf.grad for leaf in graph.leaves)]

    assert_same(run_with(loss), run_with(reference))


@every_loss
def test_backward_in_another_thread(kernel, device, loss):
    def finish(graph, value):
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
        return [leaf.grad for leaf in graph.leaves]

    assert_as_the_reference(kernel, loss, small_batch(device), finish=finish)
