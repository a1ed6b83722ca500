"""TDT (Token-and-Duration Transducer, arXiv 2304.06795) and RNN-T (arXiv 1211.3711) losses for CPU and CUDA."""

from . import integrations, layers
from .align import RNNTAlignment, TDTAlignment, rnnt_align, tdt_align, tdt_align_joint
from .forward import Occupancy
from .fused import FusedStats, rnnt_loss_fused_joint, tdt_loss_fused_joint
from .integrations import restore_loss, use_fused_loss, use_loss
from .loss import tdt_loss, tdt_loss_joint
from .report import info
from .rnnt import rnnt_loss
from .transformers_loss import parakeet_rnnt_loss, parakeet_tdt_loss

__all__ = [
    "FusedStats",
    "Occupancy",
    "RNNTAlignment",
    "TDTAlignment",
    "info",
    "integrations",
    "layers",
    "parakeet_rnnt_loss",
    "parakeet_tdt_loss",
    "restore_loss",
    "rnnt_align",
    "rnnt_loss",
    "rnnt_loss_fused_joint",
    "tdt_align",
    "tdt_align_joint",
    "tdt_loss",
    "tdt_loss_fused_joint",
    "tdt_loss_joint",
    "use_fused_loss",
    "use_loss",
]
