"""Two steps on the host that torch.compile must take as they are: it would draw another seed, and read pinned memory late."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

__all__ = ["draw_seed", "to_device"]


def draw_seed() -> Tensor:
    """() int64 from torch's CPU generator, the same number in eager mode and compiled."""
    if torch.compiler.is_compiling():
        return ops.draw_seed()
    return _seed()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Labels or lengths where the kernels read them. Nothing waits for the stream, and once this has returned the tensor may be
    changed: of pinned memory, which the stream reads when it gets there, a copy is sent, and torch keeps that so long."""
    if tensor.device == device:
        return tensor if tensor.dtype == dtype else tensor.to(dtype)
    if not tensor.is_cpu or device.type != "cuda":
        return tensor.to(device=device, dtype=dtype, non_blocking=True)
    if torch.compiler.is_compiling():
        return ops.to_device(tensor, device, dtype)
    return _sent(tensor, device, dtype)


def _seed() -> Tensor:
    return torch.randint(2**63 - 1, (), device="cpu")


def _sent(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    # A CUDA graph reads the caller's memory at every replay: that is what it is captured for.
    if type(tensor) is Tensor and tensor.is_pinned() and not torch.cuda.is_current_stream_capturing():
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device=device, dtype=dtype, non_blocking=True)


_draw_seed = torch.library.custom_op(
    add_op_namespace_prefix("draw_seed"),
    _seed,
    mutates_args=(),
    schema="() -> Tensor",
    tags=[torch.Tag.nondeterministic_seeded],
)


@_draw_seed.register_fake
def _():
    return torch.empty((), dtype=torch.int64, device="cpu")


_to_device = torch.library.custom_op(
    add_op_namespace_prefix("to_device"),
    _sent,
    mutates_args=(),
    schema="(Tensor tensor, Device device, ScalarType dtype) -> Tensor",
)


@_to_device.register_fake
def _(tensor, device, dtype):
    return torch.empty_like(tensor, device=device, dtype=dtype)
