"""Options of every public function that are misspelt, of the wrong type or out of range, and those at the ends of their ranges."""

import functools
import inspect

import numpy as np
import pytest
import torch
from support.batches import make_batch
from support.public_calls import CALLS, LOSSES, Inputs, every_call, options_of, outcome


def test_every_public_function_is_called_here(kernel):
    of_models = {"info", "restore_loss", "use_fused_loss", "use_loss"}  # take no tensors: test_integrations_*.py
    public = [name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name)) and name not in of_models]
    public += [
        name for name in dir(kernel.layers) if inspect.isclass(vars(kernel.layers)[name]) and name.endswith("Loss")
    ]
    assert of_models <= set(kernel.__all__) and sorted(public) == sorted(CALLS)


MISSPELT = (
    "omga",
    "fastemit_lamda",
    "zero_infinty",
    "delay_penality",
    "Reduction",
    "blank",
    "num_items_in_batches",
    "return_ocupancy",
    "loss_kwargs",
)


@pytest.mark.kernels_ci
@every_call
def test_misspelt_options(kernel, name):
    for option in MISSPELT:
        with pytest.raises(TypeError, match=option):
            functools.partial(CALLS[name], kernel, Inputs(), **{option: 0.9})()


@pytest.mark.parametrize("name", ["parakeet_tdt_loss", "parakeet_rnnt_loss"])
def test_options_of_other_functions(kernel, name):
    """Of the functions behind it, which a loss function has no use for or cannot return."""
    others = ("return_occupancy", "inplace_grad", "dropout", "targets", "target_lengths", "activation")
    for option in (*others, *(("omega",) if "rnnt" in name else ())):
        with pytest.raises(TypeError, match=option):
            CALLS[name](kernel, Inputs(), **{option: True})


@pytest.mark.parametrize("name", ["parakeet_tdt_loss", "parakeet_rnnt_loss"])
def test_keywords_that_transformers_passes_on(kernel, name):
    generic = pytest.importorskip("transformers.utils.generic")
    keywords = [key for key in generic.TransformersKwargs.__annotations__ if key != "num_items_in_batch"]
    assert {"output_attentions", "output_hidden_states", "position_ids"} <= set(keywords)
    plain = CALLS[name](kernel, Inputs())
    for value in (True, None):
        assert torch.equal(CALLS[name](kernel, Inputs(), **dict.fromkeys(keywords, value)), plain)


SWITCHES = ("zero_infinity", "return_occupancy", "inplace_grad", "return_stats")
NUMBERS = ("sigma", "omega", "fastemit_lambda", "clamp", "delay_penalty", "dropout", "occupancy_threshold")


@every_call
def test_options_of_the_wrong_type(kernel, name):
    tested = name == "RNNTLoss"  # which has no options
    for option in options_of(kernel, name):
        if option in SWITCHES:
            for value in ("False", "", 0, 1, None, torch.tensor(True), np.bool_(False)):
                tested = True
                with pytest.raises(TypeError, match=f"{option} must be True or False"):
                    CALLS[name](kernel, Inputs(), **{option: value})
        if option in NUMBERS:
            for value in ("0.1", None, [0.1], torch.tensor(0.1), True):
                tested = True
                with pytest.raises(TypeError, match=f"{option} must be a number"):
                    CALLS[name](kernel, Inputs(), **{option: value})
    assert tested


WRONG_VALUES = {
    "sigma": (1e300, -1.1e4, float("nan")),
    "fastemit_lambda": (-0.1, 1e39, 1e300, float("inf"), float("nan")),
    "delay_penalty": (1e300, -1.1e4, float("nan")),
    "clamp": (float("inf"), float("nan")),
    "omega": (-0.1, 1.1, float("nan")),
}


@every_call
def test_options_out_of_range(kernel, name):
    for option, values in WRONG_VALUES.items():
        for value in values if option in options_of(kernel, name) else ():
            with pytest.raises(ValueError, match=option):
                CALLS[name](kernel, Inputs(), **{option: value})


def test_words_that_people_match(kernel):
    """As torch, transformers and the kernel before this one say it."""
    for name in LOSSES:
        with pytest.raises(ValueError, match="Invalid reduction"):
            CALLS[name](kernel, Inputs(), reduction="average")
    x = Inputs()
    for function in (kernel.tdt_loss, kernel.tdt_align):
        with pytest.raises(ValueError, match="non-negative"):
            function(*x.slices, *x.labels, 0, [-1, 1, 2])


# Options at their ends: an error or finite numbers, the right ones


@pytest.mark.parametrize("sigma", [-1e4, 1e4, 100.0, -7.5e3])
def test_sigma_of_many_frames(kernel, device, sigma):
    """148,000 arcs of 10,000 nats are beyond what a path can have."""
    T = 150_000
    logits = torch.zeros(1, T, 1, 2, device=device, requires_grad=True)
    labels = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([T]), torch.tensor([0]))
    try:
        loss = kernel.rnnt_loss(logits, *labels, 0, "sum", sigma=sigma)
    except ValueError as error:
        assert "too large for 150000 frames and 0 labels" in str(error) and abs(sigma) > 1000
        return
    loss.backward()
    assert loss.item() == pytest.approx(T * (np.log(2) + sigma), rel=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor([-0.5, 0.5], device=device).expand(1, T, 1, 2))


@pytest.mark.parametrize("delay_penalty", [1e4, -1e4, 1e3, -1e3, -10.0])
@pytest.mark.parametrize("kind", ["RNN-T", "TDT"])
def test_delay_penalty_of_labels_at_the_first_frame(kernel, device, delay_penalty, kind):
    """T=500, U=139: 139 labels that may stand at frame 0 alone cost 250 penalties each."""
    T, U = 500, 139
    durations = [] if kind == "RNN-T" else [0, 1]
    logits = torch.zeros(1, T, U + 1, 2 + len(durations), device=device)
    logits[:, 1:, :, 1] = -torch.inf
    logits.requires_grad_()
    labels = (torch.ones(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]))
    try:
        if durations:
            loss = kernel.tdt_loss_joint(logits, *labels, 0, durations, reduction="sum", delay_penalty=delay_penalty)
        else:
            loss = kernel.rnnt_loss(logits, *labels, 0, "sum", delay_penalty=delay_penalty)
    except ValueError as error:
        assert f"too large for {T} frames and {U} labels" in str(error) and abs(delay_penalty) > 100
        return
    loss.backward()
    # Frame 0 has two tokens to choose from, for U labels and a blank; the later ones have the blank alone. Each arc has one of two durations.
    of_tokens = (U + 1) * np.log(2)
    of_durations = (U + T) * np.log(2) if durations else 0.0
    expected = of_tokens + of_durations - U * delay_penalty * (T - 1) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_fastemit_lambda(kernel, device, dtype):
    for name in ("tdt_loss_joint", "rnnt_loss", "tdt_loss_fused_joint"):
        result = outcome(kernel, name, Inputs(device, dtype=dtype), fastemit_lambda=1e4)
        assert all(x.isfinite().all() for x in result if x is not None)


def test_penalties_through_the_ops(kernel, device):
    """A direct call finds no way round."""
    batch = make_batch(B=1, T=500, U=139, V=2, durations=(), device=device, delay_penalty=-1e4)
    with pytest.raises(RuntimeError, match="too large for 500 frames and 139 labels"):
        kernel.loss.ops.loss(*batch.loss_op_args())
