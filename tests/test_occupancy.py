"""`return_occupancy`, eq. 7: the posterior probability of every arc, against the oracle and by what must add up."""

import pytest
import torch
from support.batches import make_batch
from support.calls import call, loss_and_grads
from support.comparisons import assert_close, same_bits
from support.tolerances import DTYPES, grad_limit

RAGGED = {"B": 4, "T": 12, "U": 5, "logit_lengths": [12, 9, 5, 1], "target_lengths": [5, 2, 0, 3]}
TDT, RNNT = {"durations": (0, 1, 2, 3, 4)}, {"durations": ()}
ARCS = {
    "TDT": ("separate", TDT),
    "TDT, joint": ("joint", TDT),
    "shuffled": ("separate", {"durations": (2, 0, 3, 1, 1)}),
    "no zero, joint": ("joint", {"durations": (1, 2)}),
    "RNN-T": ("separate", RNNT),
}
every_arcs = pytest.mark.parametrize("api, arcs", ARCS.values(), ids=ARCS.keys())


def logits_of(batch, api="separate"):
    return [logits for logits in batch.op_logits(api) if logits is not None]


def occupancy_of(kernel, batch, api="separate", **options):
    _, occupancy = call(kernel, batch, logits_of(batch, api), return_occupancy=True, **options)
    return occupancy


def assert_occupancy_matches(occupancy, batch):
    columns = (len(batch.durations),) if batch.durations else ()
    for name in ("blank", "label"):
        actual, expected = getattr(occupancy, name), getattr(batch.expected, f"{name}_occ")
        assert actual.shape == (*batch.valid.shape, *columns)
        assert actual.dtype == (torch.float64 if batch.token_logits.dtype == torch.float64 else torch.float32)
        assert not actual.requires_grad
        assert (actual[~batch.valid] == 0).all(), f"{name}: not exactly 0 in the padding"
        limit = grad_limit(batch).view(-1, 1, 1, *(1 for _ in columns))
        assert_close(name, actual, expected, limit)


def assert_same_bits(occupancy, expected, samples=slice(None)):
    for actual, reference in zip(occupancy, expected):
        assert same_bits(actual[samples], reference[samples])


# Values


@pytest.mark.kernels_ci
@every_arcs
@pytest.mark.parametrize("dtype", DTYPES)
def test_posterior_of_every_arc(kernel, device, api, arcs, dtype):
    batch = make_batch(V=33, sigma=0.05, dtype=dtype, device=device, **arcs, **RAGGED)
    assert_occupancy_matches(occupancy_of(kernel, batch, api), batch)


@pytest.mark.parametrize("durations", [(1,), (2, 4), (0, 1, 9, 17, 2**40), tuple(range(64))])
def test_every_kind_of_durations(kernel, device, durations):
    batch = make_batch(B=2, T=20, U=3, V=6, durations=durations, device=device)
    assert_occupancy_matches(occupancy_of(kernel, batch), batch)


@pytest.mark.parametrize("T, U", [(1, 0), (1, 40), (9, 33), (6, 300), (70, 64)])
@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_every_kind_of_shape(kernel, device, durations, T, U):
    batch = make_batch(B=2, T=T, U=U, V=5, durations=durations, target_lengths=[U, max(U - 1, 0)], device=device)
    assert_occupancy_matches(occupancy_of(kernel, batch), batch)


def test_delay_penalty_and_sigma_count(kernel, device, api):
    plain = make_batch(durations=(0, 1, 2), device=device, **RAGGED)
    batch = plain.replace(sigma=0.5, options={"delay_penalty": 0.3})
    assert not torch.allclose(batch.expected.label_occ, plain.expected.label_occ, atol=0.01)
    assert_occupancy_matches(occupancy_of(kernel, batch, api), batch)


@pytest.mark.parametrize("options", [{"omega": 0.3}, {"omega": 1.0}, {"fastemit_lambda": 0.5}, {"clamp": 0.01}])
def test_what_changes_the_gradient_alone_does_not_count(kernel, device, api, options):
    batch = make_batch(durations=(0, 1, 2), device=device, **RAGGED)
    assert_same_bits(occupancy_of(kernel, batch, api, **options), occupancy_of(kernel, batch, api))


@pytest.mark.kernels_ci
@every_arcs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_must_add_up(kernel, device, api, arcs, dtype):
    T, U = [40, 31, 23], [12, 0, 9]
    batch = make_batch(
        B=3, T=40, U=12, V=17, logit_lengths=T, target_lengths=U, scale=3.0, dtype=dtype, device=device, **arcs
    )
    blank, label = (occ.double() for occ in occupancy_of(kernel, batch, api))
    if batch.durations:
        of_blank = of_label = torch.tensor(batch.durations, dtype=torch.float64, device=device)
    else:  # one column: a blank of one frame, a label of none
        blank, label = blank[..., None], label[..., None]
        of_blank, of_label = torch.ones(1).to(blank), torch.zeros(1).to(blank)
    assert (blank >= 0).all() and (label >= 0).all()
    assert blank.max() <= 1 + 1e-4 and label.max() <= 1 + 1e-4
    for b in range(3):
        # Every label is emitted once, every frame is consumed once, the first node is left once, a blank is the last of all.
        emitted = label[b].sum(dim=(0, 2))
        torch.testing.assert_close(emitted[: U[b]], torch.ones(U[b]).to(emitted), rtol=0, atol=1e-4)
        assert (emitted[U[b] :] == 0).all()
        consumed = (blank[b] * of_blank + label[b] * of_label).sum().item()
        assert consumed == pytest.approx(T[b], rel=1e-4)
        assert (blank[b, 0, 0] + label[b, 0, 0]).sum().item() == pytest.approx(1, abs=1e-4)
        leaving = torch.arange(T[b], device=device)[:, None] + of_blank == T[b]
        assert blank[b, : T[b], U[b]][leaving].sum().item() == pytest.approx(1, abs=1e-4)


def test_a_blank_never_lasts_no_frame(kernel, device):
    batch = make_batch(B=2, T=9, U=4, durations=(1, 0, 2, 0), device=device)
    occupancy = occupancy_of(kernel, batch)
    assert (occupancy.blank[..., [1, 3]] == 0).all() and (occupancy.label[..., [1, 3]] > 0).any()


def test_masked_arcs_have_none(kernel, device, api):
    batch = make_batch(B=2, T=8, U=3, V=9, durations=(0, 1, 2), device=device)
    batch.targets.fill_(3)
    batch.token_logits[0, :5, 0, 3] = -torch.inf  # the first label not before frame 5
    batch.duration_logits[1, ..., 2] = -torch.inf
    occupancy = occupancy_of(kernel, batch, api)
    assert (occupancy.label[0, :5] == 0).all() and (occupancy.label[1, ..., 2] == 0).all()
    assert (occupancy.blank[1, ..., 2] == 0).all()
    assert_occupancy_matches(occupancy, batch)


def test_it_is_the_derivative_of_the_loss_with_respect_to_the_durations(kernel, device):
    # eq. 9: what is left of a duration's gradient is minus the occupancy of its two arcs, once the softmax term is put back.
    batch = make_batch(V=9, durations=(0, 1, 2), dtype=torch.float64, device=device, **RAGGED)
    outcome = loss_and_grads(kernel, batch, return_occupancy=True)
    G_i = outcome.occupancy.blank + outcome.occupancy.label
    expected = batch.duration_logits.softmax(-1) * G_i.sum(-1, keepdim=True) - G_i
    torch.testing.assert_close(outcome.grad_durations, expected, rtol=0, atol=1e-12)


# What it does to the loss: nothing


@pytest.mark.kernels_ci
@every_arcs
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "mean_batch", "mean_volume"])
def test_loss_and_gradients_keep_their_bits(kernel, device, api, arcs, reduction):
    batch = make_batch(device=device, **arcs, **RAGGED)
    plain = loss_and_grads(kernel, batch, api, reduction=reduction)
    outcome = loss_and_grads(kernel, batch, api, reduction=reduction, return_occupancy=True)
    for name in ("losses", "grad_tokens", "grad_durations"):
        assert same_bits(getattr(outcome, name), getattr(plain, name))
    assert_occupancy_matches(outcome.occupancy, batch)


def test_with_inplace_gradients(kernel, device):
    for arcs in (TDT, RNNT):
        batch = make_batch(device=device, **arcs, **RAGGED)
        logits = logits_of(batch, "joint")[0].clone().requires_grad_() * 1
        losses, occupancy = call(kernel, batch, [logits], inplace_grad=True, return_occupancy=True)
        losses.sum().backward()
        assert_occupancy_matches(occupancy, batch)


@every_arcs
def test_without_a_gradient_and_without_grad_mode(kernel, device, api, arcs):
    batch = make_batch(device=device, **arcs, **RAGGED)
    losses, occupancy = call(kernel, batch, logits_of(batch, api), return_occupancy=True)
    assert not losses.requires_grad
    assert_occupancy_matches(occupancy, batch)
    trained = [logits.clone().requires_grad_() for logits in logits_of(batch, api)]
    with torch.no_grad():
        losses, in_no_grad = call(kernel, batch, trained, return_occupancy=True)
    assert not losses.requires_grad
    assert_same_bits(in_no_grad, occupancy)
    losses, in_training = call(kernel, batch, trained, return_occupancy=True)
    assert losses.requires_grad
    assert_same_bits(in_training, occupancy)


def test_it_is_returned_only_where_asked_for(kernel, device, api):
    batch = make_batch(device=device)
    assert isinstance(call(kernel, batch, logits_of(batch, api)), torch.Tensor)
    result = call(kernel, batch, logits_of(batch, api), return_occupancy=True)
    assert isinstance(result, tuple) and len(result) == 2
    assert result[1]._fields == ("blank", "label")


# Samples that have none


def test_no_alignment(kernel, device, api):
    batch = make_batch(B=3, T=6, U=3, durations=(1,), logit_lengths=[3, 6, 0], device=device)
    for options in ({}, {"zero_infinity": True}, {"omega": 1.0}, {"omega": 0.5}):
        occupancy = occupancy_of(kernel, batch, api, **options)
        assert_occupancy_matches(occupancy, batch)
        assert (occupancy.blank[[0, 2]] == 0).all() and (occupancy.label[[0, 2]] == 0).all()
        assert (occupancy.label[1] != 0).any()
    rnnt = batch.without_durations()
    assert_occupancy_matches(occupancy_of(kernel, rnnt), rnnt)


@pytest.mark.parametrize("T, B", [(0, 2), (4, 0)])
def test_no_frames_and_no_samples(kernel, device, T, B):
    for durations in ((0, 1), ()):
        batch = make_batch(B=B, T=T, U=2, durations=durations, device=device)
        assert_occupancy_matches(occupancy_of(kernel, batch), batch)


@every_arcs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_or_infinity_at_a_valid_node(kernel, device, api, arcs, bad):
    lengths = {"logit_lengths": [6, 4, 5], "target_lengths": [3, 2, 1]}
    batch = make_batch(B=3, T=6, U=3, device=device, **lengths, **arcs)
    good = occupancy_of(kernel, batch, api)
    batch.token_logits[1, 2, 1, 2] = bad
    batch = batch.replace()
    occupancy = occupancy_of(kernel, batch, api)
    for occ in occupancy:
        assert occ[1][batch.valid[1]].isnan().all() and (occ[1][~batch.valid[1]] == 0).all()
    assert_same_bits(occupancy, good, samples=[0, 2])


MALFORMED = [
    ("logit_lengths", 7),
    ("logit_lengths", -1),
    ("target_lengths", 4),
    ("target_lengths", 2**33),
    ("targets", 9),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name, value", MALFORMED)
@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_malformed_samples(kernel, device, name, value, durations):
    batch = make_batch(B=3, T=6, U=3, durations=durations, device=device)

    def run():
        """Past the checks on the host."""
        _, node_lp, _, ll, alpha_beta, _ = kernel.loss.ops.loss(*batch.loss_op_args())
        return kernel.loss.ops.occupancy(node_lp, ll, alpha_beta, *batch.lengths, list(durations), 7)

    good = run()
    getattr(batch, name)[1] = value
    occupancy = run()
    assert (occupancy[0][1] == 0).all() and (occupancy[1][1] == 0).all()
    assert_same_bits(occupancy, good, samples=[0, 2])
    if device == "cuda":
        assert_same_bits(occupancy_of(kernel, batch), occupancy)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("durations", [(0, 1, 2), ()])
def test_padding_is_never_read(kernel, device, api, durations, garbage):
    lengths = {"logit_lengths": [6, 3, 0], "target_lengths": [1, 3, 2]}
    batch = make_batch(B=3, T=6, U=3, durations=durations, device=device, **lengths)
    clean = occupancy_of(kernel, batch, api)
    for logits in (batch.token_logits, batch.duration_logits):
        logits[~batch.valid] = garbage
    assert_same_bits(occupancy_of(kernel, batch.replace(), api), clean)
    _, node_lp, _, ll, alpha_beta, _ = kernel.loss.ops.loss(*batch.loss_op_args(api))
    alpha_beta[~batch.valid.expand_as(alpha_beta)] = garbage
    args = (node_lp, ll, alpha_beta, *batch.lengths, list(durations), 7)
    assert_same_bits(kernel.loss.ops.occupancy(*args), clean)


@pytest.mark.kernels_ci
@every_arcs
def test_fullgraph_equals_eager(kernel, device, api, arcs):
    torch._dynamo.reset()
    batch = make_batch(B=2, T=6, U=3, logit_lengths=[6, 4], device=device, **arcs)

    def loss_of_half_and_occupancy(*logits):
        losses, occupancy = call(kernel, batch, logits, "mean", return_occupancy=True)
        return losses / 2, occupancy.blank, occupancy.label

    compiled = torch.compile(loss_of_half_and_occupancy, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, loss_of_half_and_occupancy):
        logits = [x.clone().requires_grad_() for x in logits_of(batch, api)]
        loss, *occupancy = function(*logits)
        loss.backward()
        assert not any(occ.requires_grad for occ in occupancy)
        results.append((*occupancy, *(x.grad for x in logits)))
    assert all(same_bits(actual, expected) for actual, expected in zip(*results))
    torch._dynamo.reset()
