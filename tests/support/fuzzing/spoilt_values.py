"""NaN and infinities in the logits, labels and lengths out of range: the documented NaN, in that sample alone."""

from math import inf, nan

import torch

from support.batches import make_batch
from support.calls import Outcome, through_the_ops
from support.comparisons import same_bits
from support.fuzzing.arguments import FUNCTIONS, LABELS, LOSSES, arguments
from support.fuzzing.draws import Draw


def run(kernel, function: str, given: dict) -> list[torch.Tensor]:
    """What a call gives for each sample: the loss and the gradients, or the alignment."""
    result = getattr(kernel, function)(**given)
    if "align" in function:
        return list(result)
    leaves = [
        given[name] for name in ("token_logits", "duration_logits", "logits", "encoder", "decoder") if name in given
    ]
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def bad_values(kernel, draw: Draw, device: str) -> str:
    """NaN or +inf at a valid node, or a node without any token: that sample is NaN, no other changes."""
    function = draw.choice(FUNCTIONS)
    given = arguments(draw, function, device)
    if function in LOSSES and draw.maybe(0.3):
        given |= {"fastemit_lambda": 0.3, "clamp": 0.1, "zero_infinity": True}
    name = draw.choice([n for n in ("token_logits", "duration_logits", "logits", "encoder", "decoder") if n in given])
    b = draw.randrange(len(given["logit_lengths"]))
    t, u = draw.randrange(int(given["logit_lengths"][b])), draw.randint(0, int(given["target_lengths"][b]))
    x = given[name].detach().clone()
    place = {"encoder": (b, t), "decoder": (b, u)}.get(name, (b, t, u))
    bad = nan if name in ("encoder", "decoder") else draw.choice([nan, inf, -inf])
    x[(*place, draw.randrange(x.shape[-1]))] = bad
    if bad == -inf:
        x[place] = bad
    spoilt = given | {name: x.requires_grad_()}
    text = f"{function} with {bad} in {name}{list(place)}"

    def verify():
        good, bad_outcome = run(kernel, function, given), run(kernel, function, spoilt)
        assert_one_is_nan(function, good, bad_outcome, b, gradient_is_nan=True)

    return text, verify


def unchanged(function: str, before: torch.Tensor, after: torch.Tensor) -> bool:
    """The bits of a dense function; a product of other rows beside may move the last ones of a fused one."""
    if "fused" not in function:
        return same_bits(before, after)
    unit = 8 * torch.finfo(before.dtype).eps
    return torch.allclose(before, after, rtol=unit, atol=unit * (before.abs().max().item() if before.numel() else 0.0))


def assert_one_is_nan(function: str, good, outcome, b: int, gradient_is_nan: bool) -> None:
    align = "align" in function
    value = outcome[-1] if align else outcome[0]
    assert value[b].isnan(), f"sample {b} has {value[b].item()}, not NaN"
    others = [i for i in range(len(value)) if i != b]
    for before, after in zip(good, outcome):
        assert unchanged(function, before[others], after[others]), "another sample changed"
    if align:
        assert all((x[b] == -1).all() for x in outcome[:-1]), "an alignment of a NaN"
    elif not gradient_is_nan:
        assert all((x[b] == 0).all() for x in outcome[1:]), "a malformed sample has a gradient"


def bad_labels(kernel, draw: Draw, device: str) -> str:
    """Lengths and labels out of range where nobody checks them on the host: NaN, gradient 0, no other sample changes."""
    function = draw.choice([f for f in FUNCTIONS if device == "cuda" or "fused" not in f])
    given = arguments(draw, function, device)
    name, b = draw.choice(LABELS), draw.randrange(len(given["logit_lengths"]))
    value = given[name].clone()
    wrong = draw.choice([-1, 100, 2**31 - 1, -(2**31), 2**33, -(2**62)])
    if name == "targets":
        value[b, draw.randrange(int(given["target_lengths"][b]))] = wrong
    else:
        value[b] = wrong
    text = f"{function} with {wrong} in {name}[{b}], not on the host"

    def verify():
        if device == "cuda":
            outcomes = [run(kernel, function, given | {name: labels}) for labels in (given[name], value)]
        else:
            outcomes = [run_ops(kernel, function, given | {name: labels}) for labels in (given[name], value)]
        assert_one_is_nan(function, *outcomes, b, gradient_is_nan=False)

    return text, verify


def batch_of(given: dict):
    """The arguments as a Batch."""
    batch = make_batch(durations=given.get("durations", ()))
    D = len(batch.durations)
    if "logits" in given:
        V = given["logits"].shape[-1] - D
        parts = given["logits"].detach().split([V, D], dim=-1)
    else:
        parts = given["token_logits"].detach(), given["duration_logits"].detach()
    labels = {name: given[name] for name in LABELS}
    return batch.replace(
        token_logits=parts[0].contiguous(),
        duration_logits=parts[1].contiguous(),
        blank=given["blank_token_id"],
        **labels,
    )


def run_ops(kernel, function: str, given: dict) -> list[torch.Tensor]:
    batch, ops = batch_of(given), kernel.loss.ops
    V, D = batch.token_logits.shape[-1], len(batch.durations)
    if "align" in function:
        node_lp, _ = ops.log_probs(*batch.op_logits(), *batch.lengths, batch.blank % V, D, 0.0, 0.0)
        return list(ops.align(node_lp, *batch.lengths, list(batch.durations), V))
    outcome: Outcome = through_the_ops(kernel, batch, "joint" if "logits" in given else "separate")
    return [outcome.losses, outcome.grad_tokens, outcome.grad_durations]
