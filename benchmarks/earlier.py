"""The kernel that was published as kernels-community/tdt-loss before this one, for benchmarks that time it in the same run.

It has `layers.TDTLoss` with the arguments of transformers' `tdt_loss`, and neither an RNN-T loss nor one without logits.
"""

import os
from pathlib import Path
from types import ModuleType

import torch
from kernels import get_kernel, get_local_kernel

REPO_ID = "kernels-community/tdt-loss"
HELP = "also time the kernel published before: the folder of a build of it, or a revision of the Hub repository"


def load(place: str) -> ModuleType:
    """Of a folder, as `kernels.get_local_kernel` takes it, or of a revision on the Hub."""
    if Path(place).is_dir():
        kernel = get_local_kernel(Path(place).resolve())
    else:
        override = os.environ.pop("LOCAL_KERNELS", None)  # which would put this checkout in its place
        try:
            kernel = get_kernel(REPO_ID, revision=place)
        finally:
            if override is not None:
                os.environ["LOCAL_KERNELS"] = override
    if hasattr(kernel, "use_fused_loss"):
        raise ValueError(f"{place} holds a build of this kernel, not of the one published before")
    return kernel


def tdt_loss(kernel: ModuleType, *arguments) -> torch.Tensor:
    """Of token logits, duration logits, targets, logit lengths, target lengths, blank, durations; the mean."""
    return kernel.layers.TDTLoss()(*arguments)
