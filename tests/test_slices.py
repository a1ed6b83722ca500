"""Two slices of a joint tensor: one gradient for both, and the gradient that autograd alone would give, whatever stands in the graph.

The reference is `tdt_loss` of copies of the slices: what is computed for a copy cannot go past a node of the user's graph. Both run
the same case, hooks and all, on graphs of their own, and everything is compared: the loss, every gradient, and what the hooks saw.
"""

import copy
import pickle
import threading
from dataclasses import dataclass, field

import pytest
import torch
from support.batches import make_batch
from support.memory import peak_extra_bytes
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

V, D = 7, 3
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
    torch.float32: {"rtol": 1e-5, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-5},
    torch.float16: {"rtol": 2**-9, "atol": 1e-5},
}


def layer(kernel, tokens, durations, batch, **options):
    return kernel.layers.TDTLoss()(tokens, durations, *batch.rest)


def function(kernel, tokens, durations, batch, **options):
    return kernel.tdt_loss(tokens, durations, *batch.rest, **options)


def parakeet(kernel, tokens, durations, batch, **options):
    names = ("labels", "logit_lengths", "label_lengths", "blank_token_id", "durations", "sigma")
    return kernel.parakeet_tdt_loss(tokens, durations, **dict(zip(names, batch.rest)), **options)


def reference(kernel, tokens, durations, batch, **options):
    return kernel.tdt_loss(tokens.clone(), durations.clone(), *batch.rest, **options)


LOSSES = {"TDTLoss": layer, "tdt_loss": function, "parakeet_tdt_loss": parakeet}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@dataclass
class Graph:
    """hidden -> head -> root -> joint, a view of root or root itself -> tokens, durations -> loss."""

    hidden: torch.Tensor
    head: torch.nn.Linear | None
    root: torch.Tensor
    joint: torch.Tensor
    tokens: torch.Tensor
    durations: torch.Tensor
    seen: list = field(default_factory=list)  # what hooks were given, as plain copies

    def keep(self, grad):
        self.seen.append(None if grad is None else grad.detach().clone())

    @property
    def leaves(self):
        return [self.hidden] if self.head is None else [self.hidden, *self.head.parameters()]


def small_batch(device, dtype=torch.float64, U=2, **options):
    lengths = {"logit_lengths": [4, 3], "target_lengths": [U, U // 2]}
    return make_batch(B=2, T=4, U=U, V=V, sigma=0.05, dtype=dtype, device=device, **lengths, **options)


def slices(joint):
    return joint[..., :V], joint[..., V:]


def make_graph(batch, view=lambda root: root, cut=slices, columns=V + D, leaf=False):
    torch.manual_seed(0)
    *nodes, _ = batch.joint.shape
    like = {"device": batch.joint.device, "dtype": batch.joint.dtype}
    if leaf:
        root = torch.randn(*nodes, columns, **like).requires_grad_()
        hidden, head = root, None
    else:
        head = torch.nn.Linear(5, columns, **like)
        hidden = torch.randn(*nodes, 5, **like).requires_grad_()
        root = head(hidden)
    joint = view(root)
    return Graph(hidden, head, root, joint, *cut(joint))


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for k, (ours, theirs) in enumerate(zip(actual, expected)):
        assert (ours is None) == (theirs is None), k
        if ours is not None:
            assert type(ours) is torch.Tensor, f"{k}: {type(ours)}"
            torch.testing.assert_close(ours, theirs, **TOLERANCE[theirs.dtype], msg=lambda m, k=k: f"{k}: {m}")


def backward(graph, loss):
    loss.backward()
    return [leaf.grad for leaf in graph.leaves]


def run(kernel, loss, batch, before, after, finish, **graph_options):
    graph = make_graph(batch, **graph_options)
    before(graph)
    value = loss(kernel, graph.tokens, graph.durations, batch)
    after(graph)
    grads = finish(graph, value)
    kept = [x.grad for x in (graph.root, graph.joint, graph.tokens, graph.durations) if x.retains_grad]
    return [value.detach(), *grads, *kept, *graph.seen]


def nothing(graph):
    pass


def assert_as_the_reference(kernel, loss, batch, *, before=nothing, after=nothing, finish=backward, **graph_options):
    steps = (batch, before, after, finish)
    expected = run(kernel, reference, *steps, **graph_options)
    assert_same(run(kernel, loss, *steps, **graph_options), expected)
    return expected


# How the slices are cut


def of_view(view):
    return {"view": view}


CUTS = {
    "slices": {},
    "a leaf": {"leaf": True},
    "split": {"cut": lambda x: x.split([V, D], dim=-1)},
    "split of a leaf": {"cut": lambda x: x.split([V, D], dim=-1), "leaf": True},
    "tensor_split": {"cut": lambda x: x.tensor_split([V], dim=-1)},
    "narrow": {"cut": lambda x: (x.narrow(-1, 0, V), x.narrow(-1, V, D))},
    "a slice and a part of a split": {"cut": lambda x: (x[..., :V], x.split([V, D], dim=-1)[1])},
    "parts of two splits": {"cut": lambda x: (x.split([V, D], dim=-1)[0], x.split([V, D], dim=-1)[1])},
    "counted from the end": {"cut": lambda x: (x[..., :-D], x[..., -D:])},
    "an end beyond the tensor": {"cut": lambda x: (x[..., :V], x[..., V:1000])},
    "slices of slices": {"cut": lambda x: (x[..., : V + 1][..., :V], x[..., V - 1 :][..., 1:])},
    "slices of two views": {"cut": lambda x: (x.view_as(x)[..., :V], x[..., V:])},
    "one of a detached tensor": {"cut": lambda x: (x[..., :V], x.detach()[..., V:])},
    "the other of a detached tensor": {"cut": lambda x: (x.detach()[..., :V], x[..., V:])},
    "views of the slices": {"cut": lambda x: tuple(part.unsqueeze(0)[0] for part in slices(x))},
    "a view of one slice": {"cut": lambda x: (x[..., :V].view_as(x[..., :V]), x[..., V:])},
    "a view of the tensor": of_view(lambda x: x.unsqueeze(0).squeeze(0)),
    "transposed twice": of_view(lambda x: x.transpose(0, 1).transpose(0, 1)),
    "unflattened": of_view(lambda x: x.flatten(0, 2).unflatten(0, x.shape[:3])),
    "transposed": of_view(lambda x: x.contiguous().mT.contiguous().mT),
    "a copy": of_view(lambda x: x.flip(1)),
    "times two": of_view(lambda x: x * 2),
    "changed in place": of_view(lambda x: (x * 1).mul_(2)),
    "a padded product": {"columns": 16, "view": lambda x: x[..., : V + D]},
    "slices of a padded product": {"columns": 16, "cut": lambda x: (x[..., :V], x[..., V : V + D])},
    "split of a padded product": {"columns": 16, "cut": lambda x: x.split([V, D, 6], dim=-1)[:2]},
    "a padded product, padded in front": {"columns": 16, "view": lambda x: x[..., 6:]},
    "slices that overlap": {"cut": lambda x: (x[..., :V], x[..., V - 1 : V - 1 + D])},
    "slices with a gap": {"columns": 16, "cut": lambda x: (x[..., :V], x[..., V + 1 : V + 1 + D])},
    "durations in front": {"cut": lambda x: (x[..., D:], x[..., :D])},
}


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


# Hooks

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
PLACES = {
    "root": ("root",),
    "a view": ("joint",),
    "tokens": ("tokens",),
    "durations": ("durations",),
    "both slices": ("tokens", "durations"),
    "everywhere": ("root", "joint", "tokens", "durations"),
}
every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
when = pytest.mark.parametrize("when", ["before", "after"])


# From the head's output to what is cut: nothing, what ParakeetForTDT does, and views of views.
VIEWS = {
    "itself": lambda root: root,
    "squeeze that squeezes nothing": lambda root: root.squeeze(2),
    "a view of a view": lambda root: root.unsqueeze(0).squeeze(0),
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


def with_change(places, change):
    def register(graph):
        for place in places:

            def hook(grad):
                graph.keep(grad)
                return change(grad)

            getattr(graph, place).register_hook(hook)

    return register


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


# Which gradients are asked for

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


# Around it


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
