"""Hooks on two slices of a joint tensor and around them: each sees the gradient and may change it."""

import copy
import pickle

import pytest
import torch
from support.slices import (
    CUTS,
    LOSSES,
    VIEWS,
    assert_as_the_reference,
    assert_same,
    every_loss,
    every_place,
    function,
    layer,
    make_graph,
    parakeet,
    reference,
    slices,
    small_batch,
    with_change,
)
from torch.autograd.graph import register_multi_grad_hook

CHANGES = {
    "scales": lambda g: g * 3,
    "zeroes": lambda g: g * 0,
    "clips": lambda g: g.clamp(-1e-3, 1e-3),
    "copies": lambda g: g.clone(),
    "returns the same": lambda g: g,
    "in place": lambda g: g.mul_(3),
    "in place, returns None": lambda g: None if g.mul_(3) is g else g,
    "writes into it": lambda g: g.index_fill_(1, torch.tensor([0], device=g.device), 0),
    "in another layout": lambda g: g.mT.contiguous().mT,
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
when = pytest.mark.parametrize("when", ["before", "after"])


@pytest.mark.kernels_ci
@every_place
@every_view
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_hook_that_changes_the_gradient(kernel, device, places, view, change):
    for loss, cut, when in ((layer, "slices", "before"), (parakeet, "slices", "after"), (function, "split", "before")):
        registers = {when: with_change(places, change)}
        assert_as_the_reference(kernel, loss, small_batch(device), view=view, **CUTS[cut], **registers)


@when
@every_place
def test_a_hook_that_only_looks(kernel, device, places, when):
    for loss in LOSSES.values():
        for leaf in (False, True):
            look = {when: with_change(places, lambda grad: None)}
            assert_as_the_reference(kernel, loss, small_batch(device), leaf=leaf, **look)


@pytest.mark.parametrize("on", ["tensors", "nodes"])
def test_a_hook_gets_a_tensor_like_any_other(kernel, device, on):
    """Also for what is no operation of torch: NumPy, pickle, deepcopy, addresses, printing."""

    def register(graph):
        def look(grads):
            for grad in grads:
                graph.seen.append(torch.from_numpy(grad.cpu().numpy().copy()).to(grad.device))
                graph.keep(copy.deepcopy(grad))
                graph.keep(pickle.loads(pickle.dumps(grad)))
                graph.keep(torch.tensor(grad.tolist(), dtype=grad.dtype))
                assert grad.data_ptr() != 0 and "tensor(" in repr(grad)
                assert grad.dtype == torch.float64 and grad.shape[:3] == graph.root.shape[:3]

        for x in (graph.root, graph.joint, graph.tokens, graph.durations):
            if on == "tensors":
                x.register_hook(lambda grad: look([grad]))
            else:
                x.grad_fn.register_prehook(look)
                x.grad_fn.register_hook(lambda inputs, outputs: look(outputs))

    assert_as_the_reference(kernel, layer, small_batch(device), before=register)
    assert_as_the_reference(kernel, function, small_batch(device), before=register, **CUTS["split"])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", ["all", "any"])
@every_place
def test_multi_grad_hooks(kernel, device, places, mode):
    def register(graph):
        tensors = [getattr(graph, place) for place in places]
        keep_all = (lambda grads: [graph.keep(g) for g in grads]) if mode == "all" else graph.keep
        register_multi_grad_hook(tensors, keep_all, mode=mode)

    for loss in LOSSES.values():
        assert_as_the_reference(kernel, loss, small_batch(device), before=register)
        assert_as_the_reference(
            kernel, loss, small_batch(device), after=register, view=VIEWS["squeeze that squeezes nothing"]
        )


@when
@every_place
@pytest.mark.parametrize("change", [lambda g: g * 3, lambda g: g * 0, lambda g: None], ids=["scale", "zero", "look"])
def test_hooks_of_nodes(kernel, device, places, change, when):
    """Prehooks and hooks of the nodes of the graph; a split has one node for both slices."""

    def register(graph):
        def changed(grads):
            for grad in grads:
                graph.keep(grad)
            new = tuple(g if g is None else change(g) for g in grads)
            return None if None in new else new

        for node in {id(x.grad_fn): x.grad_fn for x in (getattr(graph, place) for place in places)}.values():
            node.register_prehook(changed)
            node.register_hook(lambda inputs, outputs: [graph.keep(g) for g in outputs] and changed(inputs))

    for loss in LOSSES.values():
        for cut in ("slices", "split", "a padded product"):
            graph_options = {"view": VIEWS["squeeze that squeezes nothing"], **CUTS[cut]}
            assert_as_the_reference(kernel, loss, small_batch(device), **graph_options, **{when: register})


@every_place
def test_retained_gradients(kernel, device, places):
    def retain(graph):
        for place in places:
            getattr(graph, place).retain_grad()

    for loss in LOSSES.values():
        for at in ("before", "after"):
            for cut in ("slices", "split"):
                assert_as_the_reference(kernel, loss, small_batch(device), **CUTS[cut], **{at: retain})


@every_loss
def test_hooks_of_the_leaf(kernel, device, loss):
    def register(graph):
        graph.root.register_hook(lambda grad: grad * 3)
        graph.root.register_post_accumulate_grad_hook(lambda leaf: graph.keep(leaf.grad))

    assert_as_the_reference(kernel, loss, small_batch(device), before=register, leaf=True)


@every_loss
def test_module_hooks(kernel, device, loss):
    def run_with(loss):
        batch, seen = small_batch(device), []
        graph = make_graph(batch)
        graph.head.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
        graph.head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0] * 1))
        loss(kernel, *slices(graph.head(graph.hidden)), batch).backward()
        return [*(leaf.grad for leaf in graph.leaves), *seen]

    assert_same(run_with(loss), run_with(reference))
