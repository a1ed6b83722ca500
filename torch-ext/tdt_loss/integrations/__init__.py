"""The losses of this package in other people's models and in the place of other people's losses.

``use_fused_loss(model)`` and ``use_loss(model)`` patch models of transformers and NeMo; ``restore_loss(model)`` undoes it.
``integrations.torchaudio``, ``integrations.speechbrain`` and ``integrations.espnet`` hold losses with the arguments of these
packages. None of the frameworks is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from . import espnet, nemo, speechbrain, torchaudio, transformers
from .patch import SETTINGS, unpatch

__all__ = ["espnet", "nemo", "restore_loss", "speechbrain", "torchaudio", "use_fused_loss", "use_loss"]


def use_fused_loss(model: nn.Module, **options: Any) -> None:
    r"""Make a model compute its training loss without the logits of its joint network, the largest tensor of a training step.

    For transformers' ``ParakeetForTDT``, ``ParakeetForRNNT``, ``NemotronAsrStreamingForRNNT`` and ``Nemotron3_5AsrForRNNT``
    and for NeMo's transducer models with a TDT or RNN-T loss; also where such a model is wrapped (DistributedDataParallel,
    PEFT, ``torch.compile``, AveragedModel). The loss and its gradients are those of the model's own forward, but for rounding;
    the Nemotron models have no loss of their own in transformers, and get the RNN-T loss.

    What changes, in place: the class of the model (transformers), or of the model and its joint network (NeMo), becomes a subclass
    of the same name. With labels, the joint network is not called and ``output.logits`` is None; without labels, as in
    ``generate``, nothing is different. Weights, buffers and ``state_dict`` are untouched. Call it again to change the
    options, and :func:`restore_loss` to undo it. Copies of a patched model are patched, and use their own weights.

    Where the joint network does more than its layers say (an adapter, a hook, a quantised or wrapped head, an activation other
    than relu and tanh), the loss is computed from the logits, as by :func:`use_loss`, and a warning says why.

    Args:
        model: the model, or a module that holds exactly one.
        options: ``reduction``, ``sigma``, ``delay_penalty``, ``fastemit_lambda``, ``clamp``, ``zero_infinity``,
            ``max_tile_bytes``, ``occupancy_threshold``, ``tolerance`` and, for TDT, ``omega``: as in
            :func:`tdt_loss_fused_joint` and :func:`rnnt_loss_fused_joint`. The defaults are the model's own: reduction
            ``"mean"`` for ``ParakeetForTDT``, ``"mean_volume"`` for the others in transformers; all that ``model.cfg``
            says in NeMo.

    Raises:
        TypeError: the model is none of those above, an option is unknown or of the wrong type.
        ValueError: an option's value is out of range, there is more than one such model, or its ``forward`` was replaced.

    Example:
        >>> from kernels import get_kernel
        >>> from transformers import ParakeetForTDT  # doctest: +SKIP
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> model = ParakeetForTDT.from_pretrained("nvidia/parakeet-tdt-0.6b-v3")  # doctest: +SKIP
        >>> kernel.use_fused_loss(model)  # doctest: +SKIP
        >>> model(**batch).loss.backward()  # doctest: +SKIP
    """
    _use(model, True, options)


def use_loss(model: nn.Module, **options: Any) -> None:
    r"""Make a model compute its training loss with the kernels of this package, from the logits of its joint network.

    For the models of :func:`use_fused_loss`, which needs less memory; this one leaves ``output.logits`` in place. What it
    changes and how it is undone is said there.

    Args:
        model: the model, or a module that holds exactly one.
        options: ``reduction``, ``sigma``, ``delay_penalty``, ``fastemit_lambda``, ``clamp``, ``zero_infinity`` and, for TDT,
            ``omega``: as in :func:`tdt_loss` and :func:`rnnt_loss`; defaults as in :func:`use_fused_loss`.

    Raises:
        TypeError, ValueError: as :func:`use_fused_loss`.

    Example:
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> kernel.use_loss(model, reduction="mean_batch")  # doctest: +SKIP
        >>> model(**batch).loss.backward()  # doctest: +SKIP
    """
    _use(model, False, options)


def restore_loss(model: nn.Module) -> None:
    """Undo :func:`use_fused_loss` and :func:`use_loss`: the model computes its loss as it did before.

    A model that is not patched stays as it is.

    Args:
        model: the model, or a module that holds it.

    Example:
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> kernel.restore_loss(model)  # doctest: +SKIP
    """
    for module in list(model.modules()):
        settings = vars(module).get(SETTINGS)
        if settings is not None and "undo_nemo" in settings:
            nemo.undo(module, settings)
        unpatch(module)


def _use(model: nn.Module, fused: bool, options: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [module for module in model.modules() if transformers.model_name(module) or nemo.is_transducer(module)]
    if not found:
        raise TypeError(
            f"model must be, or hold, one of transformers' {', '.join(transformers.MODELS)}, or a transducer of NeMo; "
            f"got {type(model).__name__}"
        )
    if len(found) > 1:
        raise ValueError(f"model must hold one transducer, got {len(found)}: patch them one by one")
    framework = transformers if transformers.model_name(found[0]) else nemo
    framework.use(found[0], fused, options)
