"""sigma and delay_penalty: the largest that the lattice can represent, what they give, and larger ones refused."""

import re

import pytest
import torch
from support.batches import make_batch
from support.comparisons import assert_losses_match

# Of batches with one row of logits and some frames and labels: the largest penalties that are accepted, and ones beyond.
PENALTIES = {  # T, U, accepted, refused
    "a label far from the middle": (561, 1, {"delay_penalty": 1e4}, {"delay_penalty": 1e4, "sigma": 1.0}),
    "labels that add up": (101, 360, {"delay_penalty": 1e4}, {"delay_penalty": 1e4, "sigma": -1.0}),
    "towards late labels": (561, 1, {"delay_penalty": -1e4}, {"delay_penalty": -1e4, "sigma": 1.0}),
    "many arcs": (17_990, 10, {"sigma": 1e4}, {"sigma": 1e4, "delay_penalty": 1e-4}),
    "many arcs of negative sigma": (17_990, 10, {"sigma": -1e4}, {"sigma": -1e4, "delay_penalty": 1e-4}),
}
every_penalty = pytest.mark.parametrize("T, U, accepted, refused", PENALTIES.values(), ids=PENALTIES.keys())


def calls_with_penalties(kernel, T, U, device):
    """Every public function as one of its options, by name; all logits are one row of four, repeated."""
    batch = make_batch(T=1, U=0, V=3, durations=(0, 1), device=device)
    joint = batch.joint.expand(1, T, U + 1, -1)
    labels = (torch.ones(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]))
    operands = (torch.zeros(1, T, 2), torch.zeros(1, U + 1, 2), torch.zeros(5, 2), None)
    operands = [None if x is None else x.to(device) for x in operands]
    tdt, rnnt, tokens = (*labels, 0, [0, 1]), (*labels, 0), joint[..., :3]
    arguments = {
        "tdt_loss": (tokens, joint[..., 3:], *tdt),
        "tdt_loss_joint": (joint, *tdt),
        "rnnt_loss": (tokens, *rnnt),
        "tdt_align": (tokens, joint[..., 3:], *tdt),
        "tdt_align_joint": (joint, *tdt),
        "rnnt_align": (tokens, *rnnt),
        "tdt_loss_fused_joint": (*operands, *tdt),
        "rnnt_loss_fused_joint": (*operands, *rnnt),
    }
    return {
        name: lambda name=name, args=args, **kw: getattr(kernel, name)(*args, **kw) for name, args in arguments.items()
    }


@every_penalty
def test_penalties_that_the_lattice_cannot_represent(kernel, device, T, U, accepted, refused):
    given = {"sigma": 0.0, "delay_penalty": 0.0} | refused
    words = f"sigma and delay_penalty are too large for {T} frames and {U} labels, got {given['sigma']} and "
    functions = calls_with_penalties(kernel, T, U, device)
    for function in functions.values():
        with pytest.raises(ValueError, match=re.escape(words + str(given["delay_penalty"]))):
            function(**refused)
    # And where the Python API does not check, under torch.compile, the op does.
    batch = make_batch(T=1, U=0, V=3, durations=(0, 1), device=device)
    joint = batch.joint.expand(1, T, U + 1, -1)
    labels = labels_on(device, T, U)
    with pytest.raises(
        RuntimeError, match=f"sigma and delay_penalty are too large for {T} frames and {U} labels, got "
    ):
        kernel.loss.ops.log_probs(joint, None, *labels, 0, 2, given["sigma"], given["delay_penalty"])


@every_penalty
def test_penalties_that_the_lattice_just_represents(kernel, device, T, U, accepted, refused):
    """The loss counts them, to its last digits."""
    batch = make_batch(T=1, U=0, V=3, durations=(0, 1), device=device)
    batch = batch.replace(
        token_logits=batch.token_logits.expand(1, T, U + 1, -1),
        duration_logits=batch.duration_logits.expand(1, T, U + 1, -1),
        **dict(zip(("targets", "logit_lengths", "target_lengths"), labels_on(device, T, U))),
        sigma=accepted.get("sigma", 0.0),
        options={name: value for name, value in accepted.items() if name != "sigma"},
    )
    assert_losses_match(kernel.tdt_loss(*batch.args, reduction="none", **batch.options), batch)
    functions = calls_with_penalties(kernel, T, U, device)
    for name in ("rnnt_loss", "tdt_loss_fused_joint", "rnnt_loss_fused_joint"):
        assert functions[name](**accepted).isfinite()


def labels_on(device, T, U):
    labels = (torch.ones(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]))
    return [label.to(device) for label in labels]
