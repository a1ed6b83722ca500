"""Which path ran: what this build is, and one log line for each function of the package that a process calls."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._ops import ops

__all__ = ["info"]

LOGGER = logging.getLogger("tdt_loss")

_ran: dict[str, str] = {}  # function: what the log line said of it


def report(function: str, tensor: Tensor, *, fused: bool = False, reason: str = "") -> None:
    """Log, the first time only, that ``function`` runs on ``tensor``'s device and dtype, without logits (fused) or with them.

    Every later call costs one lookup. Nothing is logged while torch.compile traces.
    """
    if function in _ran or torch.compiler.is_compiling() or not isinstance(tensor, Tensor):
        return
    path = "fused, without logits" if fused else "dense, on logits"
    dtype = str(tensor.dtype).replace("torch.", "")
    _ran[function] = f"{path}; {tensor.device.type} kernels of {ops.name}; {dtype}{reason and f'; {reason}'}"
    LOGGER.info("%s: %s", function, _ran[function])


def _metadata() -> dict[str, Any]:
    """What the builder wrote beside the package."""
    path = Path(__file__).parent / "metadata.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _runs_on(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether machine code or PTX of one of the architectures, such as "9.0" and "8.0+PTX", runs on the GPU.

    Machine code runs on its own major version, from its own minor version on; PTX is compiled for every later GPU.
    """
    for arch in archs:
        major, minor = (int(digits) for digits in arch.replace("+PTX", "").rstrip("af").split("."))
        same = major == capability[0] and minor <= capability[1]
        if same or (arch.endswith("+PTX") and (major, minor) <= capability):
            return True
    return False


def info() -> dict[str, Any]:
    """What this build is, where it runs, and which functions have run so far, without a profiler.

    The same is logged as it happens: the first call of each function in a process writes one line at level INFO to the logger
    ``"tdt_loss"``, which ``logging.basicConfig(); logging.getLogger("tdt_loss").setLevel("INFO")`` shows. It names the
    function, says whether it ran fused (without logits) or dense, on which kernels and in which dtype, and why the integrations
    have fallen back to the dense loss, where they have. Calls inside ``torch.compile`` are not recorded.

    Returns:
        A dict of plain values:

        - ``"build"``: the name of the ops' namespace, which is unique to the build;
        - ``"backend"``: ``"cpu"`` or ``"cuda"``, what the build was made for; a CUDA build runs CPU tensors too;
        - ``"archs"``: the compute capabilities that a CUDA build holds code for;
        - ``"folder"``: where the package lies;
        - ``"torch"``, ``"torch_cuda"``: the versions of torch and of its CUDA, None without;
        - ``"devices"``: for ``"cpu"`` and each visible ``"cuda:N"`` whether the build runs there;
        - ``"ran"``: for each function that has run what its log line said.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.rnnt_loss(torch.zeros(1, 2, 2, 4), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]), 3)
        >>> kernel.info()["ran"]["rnnt_loss"].split("; ")[0]
        'dense, on logits'
        >>> kernel.info()["devices"]["cpu"]
        True
    """
    backend = _metadata().get("backend", {})
    archs = backend.get("archs", [])
    kind = backend.get("type", "cuda" if "_cuda_" in ops.name else "cpu")
    devices = {"cpu": True}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = kind == "cuda" and _runs_on(torch.cuda.get_device_capability(index), archs)
    return {
        "build": ops.name,
        "backend": kind,
        "archs": list(archs),
        "folder": str(Path(__file__).parent),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "devices": devices,
        "ran": dict(_ran),
    }
