"""Node indices outside the batch, given to the ops of the fused losses: refused on the host, harmless on a GPU."""

import pytest
import torch
from support import op_cases
from support.public_calls import Inputs, assert_same_outcome, outcome

NODES_AT = {"log_probs_tile_": 2, "gradient_tile_": 6, "joint_hidden_": 3, "joint_hidden_backward_": 5}
SUMS_AT = {"log_probs_tile_": (3, 4), "gradient_tile_": (0, 1), "joint_hidden_": (), "joint_hidden_backward_": (0, 1)}


def guarded(x, margin=4096, mark=7.0):
    """A copy of x within a larger tensor, and that tensor: what is written beside x shows."""
    around = torch.full((x.numel() + 2 * margin,), mark, dtype=x.dtype, device=x.device)
    copy = around[margin : margin + x.numel()].view(x.shape).copy_(x)
    return copy, around


def fenced(x, around, margin=4096, mark=7.0):
    return (around[:margin] == mark).all() and (around[margin + x.numel() :] == mark).all()


def cases_of(kernel, op, device):
    """Valid arguments, with the sums that the op writes to guarded, and how many nodes there are."""
    for args in getattr(op_cases, op)(kernel.loss.ops, device):
        args = list(args)
        guards = []
        for at in SUMS_AT[op]:
            if args[at] is not None:
                args[at], around = guarded(args[at].detach())
                guards.append((args[at], around))
        if op == "log_probs_tile_":
            count = args[3].shape[:3].numel()
        elif op == "gradient_tile_":
            count = args[10].shape[:3].numel()
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
