"""torch.library.opcheck on every op of the library: schema, autograd registration, fake implementation, tracing with dynamic shapes."""

import pytest
import torch
from support.op_cases import CASES


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases.__name__)
def test_opcheck(kernel, device, cases):
    ops = kernel.loss.ops
    calls = 0
    for args in cases(ops, device):
        torch.library.opcheck(getattr(ops, cases.__name__).default, args)
        calls += 1
    assert calls > 1


def test_every_op_is_checked(kernel):
    namespace = kernel.loss.ops.loss.default.namespace
    registered = torch._C._dispatch_get_all_op_names()
    ops = {name.partition("::")[2] for name in registered if name.startswith(f"{namespace}::")}
    assert ops == {cases.__name__ for cases in CASES}


def test_ops_live_in_a_namespace_of_their_own(kernel):
    namespace = kernel.loss.ops.loss.default.namespace
    assert "tdt_loss" in namespace and namespace != "tdt_loss"
