"""TDT (Token-and-Duration Transducer) loss, arXiv 2304.06795, for CPU and CUDA."""

from . import layers
from .loss import tdt_loss, tdt_loss_joint

__all__ = ["layers", "tdt_loss", "tdt_loss_joint"]
