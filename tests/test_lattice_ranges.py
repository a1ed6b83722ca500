"""The op `lattice` where its numbers leave what plain doubles with a common exponent hold, and come back: every value as exact as elsewhere."""

import pytest
import torch
from conftest import BLANK_LP, DUR_LP, LABEL_LP, make_batch
from test_lattice import assert_lattice_matches

T, U, V = 70, 70, 5  # three strips of columns, and more than one chunk of steps in each


def lattices(device, dtype, change, durations=(0, 1, 2, 3, 4)):
    """A TDT lattice mixed with RNN-T's, and RNN-T's alone, with what `change` makes of the logits of blank and label."""
    for options in ({"durations": durations, "omega": 0.5}, {"durations": ()}):
        batch = make_batch(B=1, T=T, U=U, V=V, dtype=dtype, device=device, **options)
        batch.targets.fill_(1)
        change(batch.token_logits)
        yield batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nats", [30.0, 120.0, 1e3, 1e6])
def test_one_node_that_no_path_wants(kernel, device, dtype, nats):
    def change(logits):
        logits[:, T // 2, U // 2, [0, 1]] -= nats

    for batch in lattices(device, dtype, change):
        assert_lattice_matches(kernel, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nats", [30.0, 120.0, 1e3])
def test_columns_far_apart(kernel, device, dtype, nats):
    def change(logits):
        logits[:, :, ::2, 1] -= nats

    for batch in lattices(device, dtype, change):
        assert_lattice_matches(kernel, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nats", [30.0, 120.0, 1e3])
def test_frames_that_every_path_pays_for(kernel, device, dtype, nats):
    def change(logits):
        logits[:, T // 3 : T // 2, :, 2:] += nats

    for batch in lattices(device, dtype, change):
        ll = assert_lattice_matches(kernel, batch)
        assert (ll < -nats).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_masks_leave_may_be_improbable(kernel, device, dtype):
    # Alphas of column u > 0 come from one arc alone, worth exp(-300) of what lies beside it.
    def change(logits):
        logits[:, : T // 2, :, 1] = -torch.inf
        logits[:, T // 2 :, :, 1] -= 300.0
        logits[:, T // 2 :, 0, 0] -= 200.0

    for batch in lattices(device, dtype, change):
        ll = assert_lattice_matches(kernel, batch)
        assert ll.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_beyond_one(kernel, device, dtype):
    batch = make_batch(B=1, T=T, U=U, V=V, dtype=dtype, device=device, omega=0.5, delay_penalty=4.0)
    assert_lattice_matches(kernel, batch)


@pytest.mark.parametrize("field", [BLANK_LP, LABEL_LP, DUR_LP])
def test_nan_amid_long_and_wide_lattices(kernel, device, field):
    batch = make_batch(B=2, T=T, U=U, V=V, durations=(0, 1, 2, 3, 4), omega=0.5, device=device)
    node_lp = torch.zeros(2, T, U + 1, 8, device=device).log_softmax(-1)
    call = kernel.loss.ops.lattice
    good, _ = call(node_lp, *batch.lengths, list(batch.durations), V, 0.5, True)
    node_lp[1, T // 2, U // 2, field] = torch.nan
    ll, _ = call(node_lp, *batch.lengths, list(batch.durations), V, 0.5, True)
    # The RNN-T lattice does not know durations.
    assert ll[:, 1].isnan().tolist() == [True, field != DUR_LP]
    assert torch.equal(ll[:, 0], good[:, 0])
