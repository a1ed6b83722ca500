"""Arguments that change between forward and backward, and backward misused."""

import torch

from support.comparisons import same_bits
from support.fuzzing.arguments import LABELS, LOGITS, LOSSES, arguments, expect
from support.fuzzing.draws import Draw


def changed_in_between(kernel, draw: Draw, device: str) -> str:
    """torch notices, or the kernel has a copy and the gradient is what it was."""
    function = draw.choice(LOSSES)
    given = arguments(draw, function, device)
    name = draw.choice([n for n in (*LOGITS, *LABELS) if n in given])
    if name in LABELS and draw.maybe(0.3):
        given[name] = given[name].to(torch.int16)
    text = f"{function} with {name} changed in place between forward and backward"

    def verify():
        leaves = [given[n] for n in LOGITS if n in given]
        expected = torch.autograd.grad(getattr(kernel, function)(**given).sum(), leaves)
        loss = getattr(kernel, function)(**given)
        with torch.no_grad():
            given[name].add_(1)
        try:
            grads = torch.autograd.grad(loss.sum(), leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), str(error)
        else:
            assert all(map(same_bits, grads, expected)), "neither an error nor the gradient of what was given"

    return text, verify


def changed_behind_torchs_back(kernel, draw: Draw, device: str) -> str:
    """Labels and lengths that change without torch's notice spoil their own sample at most."""
    function = draw.choice(["tdt_loss", "tdt_loss_joint", "rnnt_loss"])
    given = arguments(draw, function, device)
    name, b = draw.choice(LABELS), draw.randrange(len(given["logit_lengths"]))
    wrong = draw.choice([-1, 0, 1, 3, 5, 100, 2**31 - 1, -(2**40)])
    text = f"{function} with {name}.data[{b}] = {wrong} between forward and backward"

    def verify():
        leaves = [given[n] for n in LOGITS if n in given]
        expected = torch.autograd.grad(getattr(kernel, function)(**given).sum(), leaves)
        loss = getattr(kernel, function)(**given)
        given[name].data[b] = wrong
        others = [i for i in range(len(loss)) if i != b]
        for before, after in zip(expected, torch.autograd.grad(loss.sum(), leaves)):
            assert same_bits(before[others], after[others]), "another sample changed"

    return text, verify


def misused_backward(kernel, draw: Draw, device: str) -> str:
    function = draw.choice(LOSSES)
    given = arguments(draw, function, device)
    kind = draw.choice(["twice", "double", "shape", "in place twice"])
    if kind == "in place twice":
        function = draw.choice(["tdt_loss_joint", "rnnt_loss"])
        given = arguments(draw, function, device) | {"inplace_grad": True}
    leaves = [given[n] for n in LOGITS if n in given]

    def misuse():
        loss = getattr(kernel, function)(**given)
        if kind == "shape":
            return torch.autograd.grad(loss, leaves, torch.ones(7, dtype=loss.dtype, device=device))
        grads = torch.autograd.grad(
            loss.sum(), leaves, create_graph=kind == "double", retain_graph=kind in ("in place twice", "double")
        )
        return torch.autograd.grad(sum(g.sum() for g in grads) if kind == "double" else loss.sum(), leaves)

    words = {
        "twice": "second time",
        "double": "double backward",
        "shape": "shape",
        "in place twice": "modified by an inplace operation",
    }
    return f"{function}: backward {kind}", lambda: expect(misuse, RuntimeError, (words[kind],))
