"""Losses of two slices of a joint tensor, beside `tdt_loss` of copies of the slices, on graphs of their own.

What is computed for a copy cannot go past a node of the user's graph: that is the reference. Both run the same case, hooks and all, and
everything is compared: the loss, every gradient, and what the hooks saw.
"""

from dataclasses import dataclass, field

import pytest
import torch

from support.batches import make_batch

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


# From the head's output to what is cut: nothing, what ParakeetForTDT does, and views of views.
VIEWS = {
    "itself": lambda root: root,
    "squeeze that squeezes nothing": lambda root: root.squeeze(2),
    "a view of a view": lambda root: root.unsqueeze(0).squeeze(0),
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


def with_change(places, change):
    def register(graph):
        for place in places:

            def hook(grad):
                graph.keep(grad)
                return change(grad)

            getattr(graph, place).register_hook(hook)

    return register
