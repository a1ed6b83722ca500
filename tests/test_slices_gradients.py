"""Gradients that are asked for by name, of two slices of a joint tensor and of what they are cut from; asked for twice."""

import pytest
import torch
from support.slices import (
    CUTS,
    LOSSES,
    VIEWS,
    assert_as_the_reference,
    assert_same,
    every_loss,
    layer,
    make_graph,
    small_batch,
    with_change,
)

WANTED = {
    "the slices": lambda g: (g.tokens, g.durations),
    "one slice": lambda g: (g.tokens,),
    "the other slice": lambda g: (g.durations,),
    "root": lambda g: (g.root,),
    "the view": lambda g: (g.joint,),
    "hidden": lambda g: (g.hidden,),
    "parameters": lambda g: tuple(g.head.parameters()),
    "a slice and root": lambda g: (g.tokens, g.root),
    "root and the other slice": lambda g: (g.root, g.durations),
    "slices, root and parameters": lambda g: (g.tokens, g.durations, g.joint, g.root, *g.head.parameters()),
    "a slice and parameters": lambda g: (g.durations, *g.head.parameters()),
}
every_wish = pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED.keys())


@every_wish
def test_autograd_grad(kernel, device, wanted):
    def finish(graph, value):
        return torch.autograd.grad(value, wanted(graph))

    for loss in LOSSES.values():
        for cut in ("slices", "split", "a padded product"):
            graph_options = {"view": VIEWS["squeeze that squeezes nothing"], **CUTS[cut]}
            assert_as_the_reference(kernel, loss, small_batch(device), finish=finish, **graph_options)


@pytest.mark.parametrize(
    "wanted", [lambda g: (g.root,), lambda g: (g.tokens, g.root)], ids=["root", "a slice and root"]
)
def test_autograd_grad_of_a_leaf(kernel, device, wanted):
    def finish(graph, value):
        return torch.autograd.grad(value, wanted(graph))

    for loss in LOSSES.values():
        assert_as_the_reference(kernel, loss, small_batch(device), finish=finish, leaf=True)


@every_wish
def test_backward_with_inputs(kernel, device, wanted):
    def finish(graph, value):
        inputs = wanted(graph)
        for x in inputs:
            x.retain_grad()
        value.backward(inputs=inputs)
        return [*(x.grad for x in inputs), *(leaf.grad for leaf in graph.leaves)]

    for loss in LOSSES.values():
        assert_as_the_reference(kernel, loss, small_batch(device), finish=finish)


def test_gradient_edges(kernel, device):
    def finish(graph, value):
        edges = [torch.autograd.graph.get_gradient_edge(x) for x in (graph.tokens, graph.root)]
        return torch.autograd.grad(value, edges)

    for loss in LOSSES.values():
        assert_as_the_reference(kernel, loss, small_batch(device), finish=finish)


@pytest.mark.parametrize("observed", [(), ("tokens",), ("root",)], ids=str)
def test_backward_twice(kernel, device, observed):
    def finish(graph, value):
        first = torch.autograd.grad(value, graph.leaves, retain_graph=True)
        value.backward(torch.full_like(value, 2.0), retain_graph=True)
        value.backward()
        return [*first, *(leaf.grad for leaf in graph.leaves)]

    for loss in LOSSES.values():
        for cut in ("slices", "split", "a leaf"):
            before = with_change(observed, lambda grad: grad * 3)
            assert_as_the_reference(kernel, loss, small_batch(device), before=before, finish=finish, **CUTS[cut])


def test_a_second_backward_leaves_the_first_ones_gradients_alone(kernel, device):
    batch = small_batch(device)
    graph = make_graph(batch)
    value = layer(kernel, graph.tokens, graph.durations, batch)
    inputs = (graph.root, *graph.head.parameters())
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    copies = [grad.clone() for grad in first]
    for grad in torch.autograd.grad(value, inputs):
        grad.zero_()
    assert_same(list(first), copies)


@every_loss
def test_second_derivative_is_an_error(kernel, device, loss):
    for wanted in (lambda g: (g.root,), lambda g: (g.tokens, g.durations), lambda g: (g.hidden,)):
        batch = small_batch(device)
        graph = make_graph(batch)
        value = loss(kernel, graph.tokens, graph.durations, batch)
        with pytest.raises(RuntimeError, match="double backward"):
            grads = torch.autograd.grad(value, wanted(graph), create_graph=True)
            sum(grad.square().sum() for grad in grads).backward()


@every_loss
def test_gradients_with_create_graph(kernel, device, loss):
    """Whoever asks for a graph of the gradient and does not use it gets the same numbers."""

    def finish(graph, value):
        grads = torch.autograd.grad(value, graph.leaves, create_graph=True)
        return [grad.detach() for grad in grads]

    assert_as_the_reference(kernel, loss, small_batch(device), finish=finish)
