"""Every check on the host: the error names the argument and the value, whichever device the tensors are on."""

from math import inf, nan

import pytest
import torch
from support.batches import make_batch

# name of the case: (what to change in the arguments of tdt_loss, exception, words of the message)
SEPARATE = {
    "token_logits of 3 dimensions": ({"token_logits": lambda x: x[0]}, ValueError, ("token_logits", "(5, 4, 7)")),
    "token_logits of integers": ({"token_logits": lambda x: x.long()}, TypeError, ("token_logits", "int64")),
    "token_logits complex": (
        {"token_logits": lambda x: x.to(torch.complex64)},
        TypeError,
        ("token_logits", "complex64"),
    ),
    "token_logits sparse": (
        {"token_logits": lambda x: x.to_sparse()},
        TypeError,
        ("token_logits", "sparse_coo"),
    ),
    "token_logits not a tensor": ({"token_logits": lambda x: x.tolist()}, TypeError, ("token_logits", "list")),
    "token_logits without tokens": ({"token_logits": lambda x: x[..., :0]}, ValueError, ("token_logits", "0 columns")),
    "token_logits without a label position": (
        {"token_logits": lambda x: x[:, :, :0], "duration_logits": lambda z: z[:, :, :0]},
        ValueError,
        ("token_logits", "(2, 5, 0, 7)"),
    ),
    "duration_logits of 3 dimensions": (
        {"duration_logits": lambda z: z[0]},
        ValueError,
        ("duration_logits", "(5, 4, 3)"),
    ),
    "duration_logits of another dtype": (
        {"duration_logits": lambda z: z.double()},
        (TypeError, ValueError),
        ("duration_logits", "float64"),
    ),
    "duration_logits of another batch": (
        {"duration_logits": lambda z: z[:1]},
        ValueError,
        ("duration_logits", "(2, 5, 4, 3)", "(1, 5, 4, 3)"),
    ),
    "duration_logits of fewer frames": (
        {"duration_logits": lambda z: z[:, :4]},
        ValueError,
        ("duration_logits", "(2, 4, 4, 3)"),
    ),
    "duration_logits of other columns": (
        {"duration_logits": lambda z: z[..., :2]},
        ValueError,
        ("duration_logits", "(2, 5, 4, 2)"),
    ),
    "duration_logits on another device": (
        {"duration_logits": lambda z: z.to("meta")},
        ValueError,
        ("duration_logits", "meta"),
    ),
    "duration_logits not a tensor": ({"duration_logits": lambda z: None}, TypeError, ("duration_logits", "NoneType")),
}
SHARED = {
    "targets of 1 dimension": ({"targets": lambda y: y[0]}, ValueError, ("targets", "(3,)")),
    "targets of another batch": ({"targets": lambda y: y[:1]}, ValueError, ("targets", "(2, U)", "(1, 3)")),
    "targets too narrow": ({"targets": lambda y: y[:, :2]}, ValueError, ("targets", "(2, 2)")),
    "targets of floats": ({"targets": lambda y: y.float()}, TypeError, ("targets", "float32")),
    "targets of bools": ({"targets": lambda y: y > 0}, TypeError, ("targets", "bool")),
    "targets sparse": ({"targets": lambda y: y.to_sparse()}, TypeError, ("targets", "sparse_coo")),
    "targets without data": ({"targets": lambda y: y.to("meta")}, ValueError, ("targets", "meta")),
    "targets not a tensor": ({"targets": lambda y: y.tolist()}, TypeError, ("targets", "list")),
    "logit_lengths of 2 dimensions": ({"logit_lengths": lambda n: n[None]}, ValueError, ("logit_lengths", "(1, 2)")),
    "logit_lengths of another batch": ({"logit_lengths": lambda n: n[:1]}, ValueError, ("logit_lengths", "(1,)")),
    "logit_lengths of floats": ({"logit_lengths": lambda n: n.double()}, TypeError, ("logit_lengths", "float64")),
    "logit_lengths of bools": ({"logit_lengths": lambda n: n > 0}, TypeError, ("logit_lengths", "bool")),
    "target_lengths a scalar": ({"target_lengths": lambda n: n[0]}, ValueError, ("target_lengths", "()")),
    "target_lengths of another batch": (
        {"target_lengths": lambda n: n.repeat(2)},
        ValueError,
        ("target_lengths", "(4,)"),
    ),
    "target_lengths of halves": ({"target_lengths": lambda n: n.half()}, TypeError, ("target_lengths", "float16")),
    "target_lengths of bools": ({"target_lengths": lambda n: n > 0}, TypeError, ("target_lengths", "bool")),
    "blank too large": ({"blank_token_id": lambda b: 7}, ValueError, ("blank_token_id", "7")),
    "blank too negative": ({"blank_token_id": lambda b: -8}, ValueError, ("blank_token_id", "-8")),
    "blank not an integer": ({"blank_token_id": lambda b: 1.5}, TypeError, ("blank_token_id", "1.5")),
    "unknown reduction": (
        {"reduction": lambda r: "average"},
        ValueError,
        ("Invalid reduction: reduction must be one of", "'mean_volume'", "'average'"),
    ),
    "reduction not a string": ({"reduction": lambda r: None}, ValueError, ("Invalid reduction", "None")),
}
DURATIONS = {
    "no durations": ({"durations": lambda d: []}, ValueError, ("durations",)),
    "a negative duration": (
        {"durations": lambda d: [0, 1, -2]},
        ValueError,
        ("durations must be non-negative", "got -2 in [0, 1, -2]"),
    ),
    "no positive duration": ({"durations": lambda d: [0, 0, 0]}, ValueError, ("durations", "0, 0, 0")),
    "durations of floats": ({"durations": lambda d: [0, 1, 1.5]}, TypeError, ("durations", "1.5")),
    "durations a float tensor": (
        {"durations": lambda d: torch.tensor([0.0, 1.0, 2.0])},
        TypeError,
        ("durations", "float32"),
    ),
    "durations without data": (
        {"durations": lambda d: torch.tensor(d, device="meta")},
        ValueError,
        ("durations", "meta"),
    ),
    "durations with a float tensor": ({"durations": lambda d: [0, 1, torch.tensor(2.0)]}, TypeError, ("durations",)),
    "durations a matrix": ({"durations": lambda d: torch.tensor([[0, 1, 2]])}, ValueError, ("durations", "(1, 3)")),
    "durations not a sequence": ({"durations": lambda d: 3}, TypeError, ("durations", "3")),
}
NUMBERS = {
    "sigma not a number": ({"sigma": "0.1"}, TypeError, ("sigma", "'0.1'")),
    "sigma too large": ({"sigma": 10001}, ValueError, ("sigma", "10000", "10001")),
    "sigma NaN": ({"sigma": nan}, ValueError, ("sigma", "nan")),
    "sigma beyond a float": ({"sigma": 10**400}, ValueError, ("sigma", "a float can hold")),
    "fastemit_lambda negative": ({"fastemit_lambda": -0.5}, ValueError, ("fastemit_lambda", "-0.5")),
    "fastemit_lambda too large": ({"fastemit_lambda": 10001}, ValueError, ("fastemit_lambda", "[0, 10000]", "10001")),
    "fastemit_lambda infinite": ({"fastemit_lambda": inf}, ValueError, ("fastemit_lambda", "inf")),
    "fastemit_lambda NaN": ({"fastemit_lambda": nan}, ValueError, ("fastemit_lambda", "nan")),
    "fastemit_lambda not a number": ({"fastemit_lambda": None}, TypeError, ("fastemit_lambda", "None")),
    "clamp infinite": ({"clamp": inf}, ValueError, ("clamp", "inf")),
    "clamp minus infinity": ({"clamp": -inf}, ValueError, ("clamp", "-inf")),
    "clamp NaN": ({"clamp": nan}, ValueError, ("clamp", "nan")),
    "clamp not a number": ({"clamp": "1"}, TypeError, ("clamp", "'1'")),
    "delay_penalty too large": ({"delay_penalty": 10001}, ValueError, ("delay_penalty", "10000", "10001")),
    "delay_penalty too negative": ({"delay_penalty": -1e5}, ValueError, ("delay_penalty", "-100000")),
    "delay_penalty infinite": ({"delay_penalty": inf}, ValueError, ("delay_penalty", "inf")),
    "delay_penalty NaN": ({"delay_penalty": nan}, ValueError, ("delay_penalty", "nan")),
    "delay_penalty not a number": ({"delay_penalty": [0.1]}, TypeError, ("delay_penalty", "[0.1]")),
}
FLAGS = {
    "zero_infinity": ["separate", "joint", "rnnt"],
    "return_occupancy": ["separate", "joint", "rnnt"],
    "inplace_grad": ["joint", "rnnt"],
}
OMEGAS = {
    "negative": (-0.1, ValueError, ("omega", "[0, 1]", "-0.1")),
    "above 1": (1.5, ValueError, ("omega", "[0, 1]", "1.5")),
    "NaN": (nan, ValueError, ("omega", "nan")),
    "infinite": (inf, ValueError, ("omega", "inf")),
    "not a number": ("half", TypeError, ("omega", "half")),
    "None": (None, TypeError, ("omega", "None")),
}
ON_THE_HOST = {
    "negative logit length": ("logit_lengths", -1, ("logit_lengths", "sample 1", "-1")),
    "logit length beyond the frames": ("logit_lengths", 6, ("logit_lengths", "sample 1", "6")),
    "negative target length": ("target_lengths", -3, ("target_lengths", "sample 1", "-3")),
    "target length beyond the labels": ("target_lengths", 4, ("target_lengths", "sample 1", "4")),
}


@pytest.fixture(params=["separate", "joint", "rnnt"])
def api(request):
    """tdt_loss, tdt_loss_joint, rnnt_loss."""
    return request.param


def arguments_of(batch, api):
    arguments = {
        "targets": batch.targets,
        "logit_lengths": batch.logit_lengths,
        "target_lengths": batch.target_lengths,
        "blank_token_id": batch.blank,
        "reduction": "mean",
    }
    if api == "rnnt":
        return {"logits": batch.token_logits, **arguments}
    arguments["durations"] = list(batch.durations)
    if api == "joint":
        return {"logits": batch.joint, **arguments}
    return {"token_logits": batch.token_logits, "duration_logits": batch.duration_logits, **arguments}


def call(kernel, arguments):
    if "token_logits" in arguments:
        return kernel.tdt_loss(**arguments)
    return (kernel.tdt_loss_joint if "durations" in arguments else kernel.rnnt_loss)(**arguments)


def assert_raises(kernel, arguments, exception, words):
    with pytest.raises(exception) as raised:
        call(kernel, arguments)
    message = str(raised.value)
    assert all(word in message for word in words), f"{words} not all in: {message}"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("changes, exception, words", SEPARATE.values(), ids=SEPARATE.keys())
def test_logits(kernel, device, changes, exception, words):
    arguments = arguments_of(make_batch(B=2, device=device), "separate")
    call(kernel, arguments)
    assert_raises(
        kernel, arguments | {name: change(arguments[name]) for name, change in changes.items()}, exception, words
    )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("changes, exception, words", SHARED.values(), ids=SHARED.keys())
def test_other_arguments(kernel, device, api, changes, exception, words):
    arguments = arguments_of(make_batch(B=2, device=device), api)
    call(kernel, arguments)
    assert_raises(
        kernel, arguments | {name: change(arguments[name]) for name, change in changes.items()}, exception, words
    )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("changes, exception, words", DURATIONS.values(), ids=DURATIONS.keys())
def test_durations(kernel, device, changes, exception, words):
    for api in ("separate", "joint"):
        arguments = arguments_of(make_batch(B=2, device=device), api)
        durations = changes["durations"](arguments["durations"])
        assert_raises(kernel, arguments | {"durations": durations}, exception, words)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("changes, exception, words", NUMBERS.values(), ids=NUMBERS.keys())
def test_options(kernel, device, api, changes, exception, words):
    assert_raises(kernel, arguments_of(make_batch(B=2, device=device), api) | changes, exception, words)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("omega, exception, words", OMEGAS.values(), ids=OMEGAS.keys())
def test_omega(kernel, device, omega, exception, words):
    for api in ("separate", "joint"):
        assert_raises(kernel, arguments_of(make_batch(B=2, device=device), api) | {"omega": omega}, exception, words)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("value", [1, 0, None, "False", 0.0, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flags(kernel, device, name, value):
    """What passes for true or false is not what was meant."""
    for api in FLAGS[name]:
        arguments = arguments_of(make_batch(B=2, device=device), api)
        assert_raises(kernel, arguments | {name: value}, TypeError, (name, "True or False", repr(value)))


def test_options_at_the_ends_of_their_ranges(kernel, device, api):
    arguments = arguments_of(make_batch(B=2, device=device), api)
    accepted = [
        {"fastemit_lambda": 0},
        {"fastemit_lambda": 10000},
        {"clamp": -1},
        {"clamp": 1e300},
        {"delay_penalty": 10000},
        {"delay_penalty": -1e4},
        {"sigma": 1e4},
    ]
    for options in accepted + ([] if api == "rnnt" else [{"omega": 0}, {"omega": 1}]):
        assert call(kernel, arguments | options).isfinite()


def test_rnnt_logits(kernel, device):
    arguments = arguments_of(make_batch(B=2, device=device), "rnnt")
    logits = arguments["logits"]
    for bad, exception, words in [
        (logits[0], ValueError, ("logits", "(5, 4, 7)")),
        (logits.int(), TypeError, ("logits", "int32")),
        (logits[..., :0], ValueError, ("logits", "0 columns")),
        (logits[:, :, :0], ValueError, ("logits", "(2, 5, 0, 7)")),
        (logits.tolist(), TypeError, ("logits", "list")),
    ]:
        assert_raises(kernel, arguments | {"logits": bad}, exception, words)


@pytest.mark.parametrize("name, value, words", ON_THE_HOST.values(), ids=ON_THE_HOST.keys())
def test_lengths_on_the_host(kernel, device, api, name, value, words):
    arguments = arguments_of(make_batch(B=2, device=device), api)
    arguments[name] = torch.tensor([3, value])
    assert_raises(kernel, arguments, ValueError, words)


@pytest.mark.parametrize("label", [-1, 7, 2**31, -(2**40)])
def test_valid_labels_on_the_host(kernel, device, api, label):
    batch = make_batch(B=2, target_lengths=[3, 2], device=device)
    arguments = arguments_of(batch.replace(targets=batch.targets.cpu(), target_lengths=batch.target_lengths.cpu()), api)
    arguments["targets"][1, 2] = label  # padding: nobody minds
    call(kernel, arguments)
    arguments["targets"][1, 1] = label
    assert_raises(kernel, arguments, ValueError, ("targets", "sample 1", str(label)))


def test_more_than_64_durations(kernel, device):
    batch = make_batch(B=2, V=3, durations=range(65), device=device)
    for api in ("separate", "joint"):
        assert_raises(kernel, arguments_of(batch, api), ValueError, ("durations", "64", "65"))


def test_durations_beyond_an_integer_of_the_ops_never_land(kernel, device):
    for api in ("separate", "joint"):
        arguments = arguments_of(make_batch(B=2, device=device), api)
        losses = [call(kernel, arguments | {"durations": [0, 1, far]}) for far in (1000, 2**63, 10**30)]
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def test_joint_logits(kernel, device):
    arguments = arguments_of(make_batch(B=2, device=device), "joint")
    logits = arguments["logits"]
    assert_raises(kernel, arguments | {"logits": logits[0]}, ValueError, ("logits", "(5, 4, 10)"))
    assert_raises(kernel, arguments | {"logits": logits.int()}, TypeError, ("logits", "int32"))
    assert_raises(
        kernel, arguments | {"logits": logits[..., :3]}, ValueError, ("logits", "3 columns")
    )  # no column left for a token
    assert_raises(kernel, arguments | {"logits": logits[:, :, :0]}, ValueError, ("logits", "(2, 5, 0, 10)"))
    assert_raises(kernel, arguments | {"logits": None}, TypeError, ("logits", "None"))


def test_inplace_grad_needs_logits_it_can_overwrite(kernel, device):
    batch = make_batch(B=2, device=device)
    arguments = arguments_of(batch, "joint") | {"inplace_grad": True}
    expanded = batch.joint[:1].clone().requires_grad_().expand(2, -1, -1, -1)
    assert_raises(
        kernel, arguments | {"logits": expanded}, ValueError, ("inplace_grad", "share memory", "(0, 40, 10, 1)")
    )
    transposed = batch.joint.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    assert_raises(
        kernel, arguments | {"logits": transposed}, ValueError, ("inplace_grad", "last dimension", "(200, 40, 1, 4)")
    )
    expanded = batch.token_logits[:1].clone().requires_grad_().expand(2, -1, -1, -1)
    arguments = arguments_of(batch, "rnnt") | {"inplace_grad": True, "logits": expanded}
    assert_raises(kernel, arguments, ValueError, ("inplace_grad", "share memory", "(0, 28, 7, 1)"))


@pytest.mark.cuda
@pytest.mark.parametrize("moved", ["token_logits", "duration_logits"])
def test_logits_on_the_gpu_and_the_host(kernel, moved):
    arguments = arguments_of(make_batch(B=2, device="cuda"), "separate")
    arguments[moved] = arguments[moved].cpu()
    assert_raises(kernel, arguments, ValueError, ("duration_logits", "cuda", "cpu"))


@pytest.mark.cuda
@pytest.mark.parametrize("name, value, words", ON_THE_HOST.values(), ids=ON_THE_HOST.keys())
def test_environment_variable_checks_device_tensors(kernel, monkeypatch, name, value, words):
    arguments = arguments_of(make_batch(B=2, device="cuda"), "separate")
    arguments[name][1] = value
    assert call(kernel, arguments).isnan()
    monkeypatch.setenv("TDT_LOSS_CHECK", "1")
    assert_raises(kernel, arguments, ValueError, words)


@pytest.mark.cuda
def test_environment_variable_checks_device_labels(kernel, monkeypatch):
    arguments = arguments_of(make_batch(B=2, device="cuda"), "joint")
    arguments["targets"][1, 1] = 7
    assert call(kernel, arguments).isnan()
    monkeypatch.setenv("TDT_LOSS_CHECK", "1")
    assert_raises(kernel, arguments, ValueError, ("targets", "sample 1", "7"))
