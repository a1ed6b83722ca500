"""Well-formed arguments of every public function, to be spoilt; how a value is described and an exception expected."""

import torch

from support.batches import make_batch
from support.fused import NAMES, make_problem
from support.fuzzing.draws import Draw

KINDS = (ValueError, TypeError)  # of wrong arguments; wrong use of autograd and of the ops is a RuntimeError
LOSSES = ("tdt_loss", "tdt_loss_joint", "rnnt_loss", "tdt_loss_fused_joint", "rnnt_loss_fused_joint")
FUNCTIONS = (*LOSSES, "tdt_align", "tdt_align_joint", "rnnt_align")
LABELS = ("targets", "logit_lengths", "target_lengths")
LOGITS = ("token_logits", "duration_logits", "logits", "encoder", "decoder", "weight", "bias")


def describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor({value.dtype}, {tuple(value.shape)}, {value.device.type}, {value.layout})"
    return repr(value)[:60]


def expect(call, kinds, words) -> None:
    """The call raises one of these, with one of the words in its message."""
    try:
        result = call()
    except kinds as error:
        assert any(word in str(error) for word in words), (
            f"{type(error).__name__} names none of {words}: {str(error)[:300]}"
        )
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}, not {kinds}: {str(error)[:300]}") from error
    else:
        raise AssertionError(f"no exception, but {describe(result)}")


# Well-formed arguments, to be spoilt


def arguments(draw: Draw, function: str, device: str) -> dict:
    """Arguments of a call that is right, by name; the logits require grad."""
    D = 0 if function.startswith("rnnt") else draw.randint(1, 5)
    B, T, U, V = draw.randint(1, 3), draw.randint(2, 6), draw.randint(1, 4), draw.randint(2, 7)
    durations = tuple(draw.sample(range(D + 1), D)) if D > 1 else (1,) * D
    dtype, seed = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]), draw.getrandbits(60)
    lengths = {
        "logit_lengths": [draw.randint(1, T) for _ in range(B)],
        "target_lengths": [draw.randint(1, U) for _ in range(B)],
    }
    result = {}
    if "fused" in function:
        problem = make_problem(B, T, U, V, 5, durations, dtype=dtype, device=device, seed=seed, **lengths)
        result = dict(zip(NAMES, problem.operands))
        result |= dict(zip(LABELS, problem.labels))
    else:
        batch = make_batch(B, T, U, V, durations, dtype=dtype, device=device, seed=seed, **lengths)
        if function in ("tdt_loss", "tdt_align"):
            result = {"token_logits": batch.token_logits, "duration_logits": batch.duration_logits}
        else:
            result = {"logits": batch.joint.clone()}
        result |= dict(zip(LABELS, batch.lengths))
    for name in LOGITS:
        if name in result:
            result[name] = result[name].detach().requires_grad_()
    result["blank_token_id"] = draw.randint(-V, V - 1)
    if D:
        result["durations"] = list(durations)
    result["sigma"] = 0.0
    result["delay_penalty"] = 0.0
    if function in LOSSES:
        result |= {"reduction": "none", "fastemit_lambda": 0.0, "clamp": 0.0}
        if D:
            result["omega"] = 0.0
    if "fused" in function:
        result |= {"activation": "relu", "dropout": 0.0, "max_tile_bytes": 1 << 16, "occupancy_threshold": 0.0}
    return result
