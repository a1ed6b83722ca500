"""What a call is checked for before anything is launched, and how its index arguments reach the device.

Shapes, dtypes and devices are always checked. Values (lengths, labels) are checked where they can be read for free, on the
CPU; on a GPU only with ``TDT_LOSS_CHECK=1`` in the environment, because reading them back would stall the stream.
"""

import math
import numbers
import operator
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from .host_ops import to_device

REDUCTIONS = ("none", "sum", "mean_batch", "mean", "mean_volume")  # in the order of tdt_loss_common/reduction.h
MAX_DURATIONS = 64
MAX_SIGMA = 1e4  # nats an arc
MAX_DELAY_PENALTY = 1e4  # nats a frame
MAX_FASTEMIT_LAMBDA = 1e4  # a gradient of 16 bits overflows beyond
# Nats of an arc and of a path that the two penalties may add, as in tdt_loss_common/checks.h, where the numbers are derived.
_MOST_PENALTY_OF_ARC, _MOST_PENALTY_OF_PATH = 2.8e6, 1.8e8

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_FRAMES = 2**31 - 1
_NATIVE_INTS = (torch.int32, torch.int64)  # what the kernels read as it is
_OTHER_INTS = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def check_reduction(reduction: str) -> int:
    """The reduction as the ops know it."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"Invalid reduction: reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}"
        )
    return REDUCTIONS.index(reduction)


def check_bool(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_number(name: str, value: float) -> float:
    if type(value) is float:  # nearly always, and isinstance with an abstract class takes a microsecond
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float can hold") from None


def _within(name: str, value: float, limit: float) -> float:
    value = check_number(name, value)
    if not -limit <= value <= limit:
        raise ValueError(f"{name} must be in [-{limit:g}, {limit:g}], got {value}")
    return value


class Options(NamedTuple):
    """What changes the loss or its gradient beside the plain arguments, in the order of the public functions and of the ops."""

    sigma: float = 0.0
    delay_penalty: float = 0.0
    omega: float = 0.0
    fastemit_lambda: float = 0.0
    clamp: float = 0.0
    zero_infinity: bool = False

    @classmethod
    def checked(cls, **given: Union[float, bool]) -> "Options":
        given = cls(**given)
        omega = check_number("omega", given.omega)
        fastemit_lambda = check_number("fastemit_lambda", given.fastemit_lambda)
        clamp = check_number("clamp", given.clamp)
        if not 0 <= omega <= 1:
            raise ValueError(f"omega must be in [0, 1], got {omega}")
        if not 0 <= fastemit_lambda <= MAX_FASTEMIT_LAMBDA:
            raise ValueError(f"fastemit_lambda must be in [0, {MAX_FASTEMIT_LAMBDA:g}], got {fastemit_lambda}")
        if not -math.inf < clamp < math.inf:
            raise ValueError(f"clamp must be finite (0 or negative: off), got {clamp}")
        return cls(
            _within("sigma", given.sigma, MAX_SIGMA),
            _within("delay_penalty", given.delay_penalty, MAX_DELAY_PENALTY),
            omega,
            fastemit_lambda,
            clamp,
            check_bool("zero_infinity", given.zero_infinity),
        )


def check_tiling(max_tile_bytes: float, occupancy_threshold: float, tolerance: float) -> tuple[int, float, float]:
    """What only the losses without logits take."""
    max_tile_bytes = check_number("max_tile_bytes", max_tile_bytes)
    occupancy_threshold = check_number("occupancy_threshold", occupancy_threshold)
    if not 0 < max_tile_bytes < math.inf:
        raise ValueError(f"max_tile_bytes must be positive, got {max_tile_bytes}")
    if not occupancy_threshold >= 0:
        raise ValueError(f"occupancy_threshold must be at least 0, got {occupancy_threshold}")
    tolerance = check_number("tolerance", tolerance)
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must be in [0, 1], got {tolerance}")
    return int(max_tile_bytes), occupancy_threshold, tolerance


def check_penalties(options: Options, nodes: Sequence[int]) -> None:
    """Refuse penalties that would carry paths of this many frames and labels out of what the lattice can represent."""
    if options.sigma == options.delay_penalty == 0 or torch.compiler.is_compiling():
        return
    T, U = nodes[1], nodes[2] - 1
    of_label = abs(options.delay_penalty) * 0.5 * max(T - 1, 0)
    of_path = abs(options.sigma) * (T + U) + of_label * U
    if abs(options.sigma) + of_label > _MOST_PENALTY_OF_ARC or of_path > _MOST_PENALTY_OF_PATH:
        raise ValueError(
            f"sigma and delay_penalty are too large for {T} frames and {U} labels, got {options.sigma} and {options.delay_penalty}"
        )


def check_durations(durations: Union[Sequence[int], Tensor]) -> list[int]:
    """The durations as a list of ints."""
    if isinstance(durations, Tensor):
        if not _is_integer(durations.dtype):
            raise TypeError(f"durations must hold integers, got a tensor of {durations.dtype}")
        if durations.dim() != 1:
            raise ValueError(f"durations must be one-dimensional, got shape {tuple(durations.shape)}")
        if durations.device.type == "meta":
            raise ValueError("durations must be a tensor that holds data, got one on the meta device")
        durations = durations.tolist()
    try:
        durations = list(durations)
    except TypeError:
        raise TypeError(f"durations must be a sequence of integers or an integer tensor, got {durations!r}") from None
    durations = [_duration(duration, durations) for duration in durations]
    if not durations:
        raise ValueError("durations must not be empty")
    if len(durations) > MAX_DURATIONS:
        raise ValueError(f"durations: at most {MAX_DURATIONS} are supported, got {len(durations)}")
    if not any(durations):
        raise ValueError(
            f"durations must hold at least one positive value, got {durations}: no frame could ever be consumed"
        )
    return durations


def _duration(value: object, durations: list) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        duration = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        raise TypeError(f"durations must hold integers, got {value!r} in {durations}") from None
    if duration < 0:
        raise ValueError(f"durations must be non-negative, got {duration} in {durations}")
    return min(duration, _MOST_FRAMES)  # no alignment is that long, so it makes no difference


def check_float(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def check_logits(name: str, logits: Tensor) -> None:
    check_float(name, logits)
    if logits.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions (B, T, U+1, columns), got shape {tuple(logits.shape)}")
    if logits.shape[2] < 1:
        raise ValueError(
            f"{name} must have at least one label position (dimension 2 is U+1), got shape {tuple(logits.shape)}"
        )


def with_dense_rows(logits: Tensor) -> Tensor:
    if logits.shape[3] == 1 or logits.stride(3) == 1:
        return logits
    return logits.clone(memory_format=torch.contiguous_format)  # contiguous() leaves the strides of an empty tensor


def check_writable(logits: Tensor) -> None:
    """Every element at an address of its own, rows dense: what writing in place needs."""
    extent = 1
    for size, stride in sorted(zip(logits.shape, logits.stride()), key=lambda dim: dim[1]):
        if size > 1 and stride < extent:
            raise ValueError(
                f"inplace_grad needs logits whose elements do not share memory, got strides {logits.stride()} "
                f"for shape {tuple(logits.shape)}"
            )
        extent += (size - 1) * stride
    if logits.shape[3] > 1 and logits.stride(3) != 1:
        raise ValueError(
            f"inplace_grad needs logits that are contiguous in the last dimension, got strides {logits.stride()}"
        )


def check_vocab(name: str, columns: int, vocab: int, blank_token_id: int) -> int:
    """The blank as an index from the front."""
    if vocab < 1:
        raise ValueError(f"{name} must have at least one token column, got {columns} columns in all")
    if isinstance(blank_token_id, bool) or not isinstance(blank_token_id, (int, torch.SymInt)):
        raise TypeError(f"blank_token_id must be an int, got {blank_token_id!r}")
    if not -vocab <= blank_token_id < vocab:
        raise ValueError(f"blank_token_id must be in [-{vocab}, {vocab}) for {vocab} tokens, got {blank_token_id}")
    return blank_token_id % vocab


def check_duration_logits(token_logits: Tensor, duration_logits: Tensor, num_durations: int) -> None:
    check_logits("duration_logits", duration_logits)
    expected = (*token_logits.shape[:3], num_durations)
    if tuple(duration_logits.shape) != expected:
        raise ValueError(
            f"duration_logits must have shape {expected}, as token_logits with one column for each of {num_durations} durations, "
            f"got {tuple(duration_logits.shape)}"
        )
    if duration_logits.dtype != token_logits.dtype:
        raise TypeError(
            f"duration_logits must have the dtype of token_logits, {token_logits.dtype}, got {duration_logits.dtype}"
        )
    if duration_logits.device != token_logits.device:
        raise ValueError(
            f"duration_logits must be on the device of token_logits, {token_logits.device}, got {duration_logits.device}"
        )


class Labels:
    """Checked targets and lengths, with the dtype and device that the kernels read."""

    def __init__(
        self,
        nodes: Sequence[int],  # (B, T, U+1) of the logits
        device: torch.device,
        vocab: int,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
    ):
        batch, max_t, max_u1 = nodes
        _check_index("targets", targets, (batch, None), device)
        if targets.shape[1] < max_u1 - 1:
            raise ValueError(
                f"targets must have at least {max_u1 - 1} columns for logits with {max_u1} label positions, "
                f"got shape {tuple(targets.shape)}"
            )
        _check_index("logit_lengths", logit_lengths, (batch,), device)
        _check_index("target_lengths", target_lengths, (batch,), device)
        if not torch.compiler.is_compiling():
            _check_values(vocab, max_t, max_u1 - 1, targets, logit_lengths, target_lengths)
        self.targets, self.logit_lengths, self.target_lengths = (
            to_device(tensor, device, tensor.dtype if tensor.dtype in _NATIVE_INTS else torch.int64)
            for tensor in (targets, logit_lengths, target_lengths)
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.targets, self.logit_lengths, self.target_lengths


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype in _NATIVE_INTS or dtype in _OTHER_INTS


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def _check_index(name: str, tensor: Tensor, shape: Sequence[Optional[int]], device: torch.device) -> None:
    _check_tensor(name, tensor)
    if not _is_integer(tensor.dtype):
        raise TypeError(f"{name} must have an integer dtype, got {tensor.dtype}")
    if tensor.dim() != len(shape) or tensor.shape[0] != shape[0]:
        wanted = ", ".join("U" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must have shape ({wanted}{',' if len(shape) == 1 else ''}), got {tuple(tensor.shape)}"
        )
    if tensor.device.type == "meta" and device.type != "meta":
        raise ValueError(f"{name} must hold data for logits on {device}, got a tensor on the meta device")


def _check_values(
    vocab: int, max_t: int, max_u: int, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor
) -> None:
    everywhere = os.environ.get("TDT_LOSS_CHECK") == "1"
    T, U, labels = (_on_host(tensor, everywhere) for tensor in (logit_lengths, target_lengths, targets))
    for name, lengths, most in (("logit_lengths", T, max_t), ("target_lengths", U, max_u)):
        if lengths is not None:
            bad = (lengths < 0) | (lengths > most)
            if bad.any():
                sample = int(bad.nonzero()[0])
                raise ValueError(f"{name} must be in [0, {most}], got {int(lengths[sample])} for sample {sample}")
    if U is not None and labels is not None and labels.shape[1] > 0:
        valid = torch.arange(labels.shape[1], device="cpu") < U.unsqueeze(1)
        bad = valid & ((labels < 0) | (labels >= vocab))
        if bad.any():
            sample, position = bad.nonzero()[0].tolist()
            raise ValueError(
                f"targets must be in [0, {vocab}), got {int(labels[sample, position])} for sample {sample} at position {position}"
            )


def holds_values(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read: not those of a fake one, of the meta device, or of a batch under vmap."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    if type(tensor) is Tensor and not tensor.is_meta:
        return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor))


def _on_host(tensor: Tensor, everywhere: bool) -> Optional[Tensor]:
    """As int64 on the CPU, where it can be read for free, or at all if `everywhere`; else None."""
    if not (tensor.is_cpu or everywhere) or not holds_values(tensor):
        return None
    return tensor.to(device="cpu", dtype=torch.int64)
