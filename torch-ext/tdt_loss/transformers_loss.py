"""The losses with the arguments with which transformers' Parakeet models call their ``loss_function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import holds_values
from .loss import tdt_loss
from .rnnt import rnnt_loss

__all__ = ["parakeet_rnnt_loss", "parakeet_tdt_loss"]

_PADDING = -100  # of labels, where torch's losses and transformers' Trainer look for it

# What transformers' models pass on to their loss function beside its own arguments: the keywords of a forward pass, which
# say nothing about the loss.
_OF_THE_MODEL = frozenset(
    (
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "output_attention_mask",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    )
)


def parakeet_tdt_loss(
    token_logits: Tensor,
    duration_logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    label_lengths: Tensor,
    blank_token_id: int,
    durations: Sequence[int] | Tensor,
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    num_items_in_batch: Tensor | int | None = None,
    delay_penalty: float = 0.0,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    **kwargs,
) -> Tensor:
    r"""The TDT loss as the ``loss_function`` of transformers' ``ParakeetForTDT``: ``model.loss_function = kernel.parakeet_tdt_loss``.

    The same loss and gradients as :func:`tdt_loss`, https://arxiv.org/abs/2304.06795: one gradient for the joint network's output,
    which the model cuts in two.
    ``functools.partial`` sets another reduction or an option: ``partial(kernel.parakeet_tdt_loss, reduction="mean_volume")``.

    Gradient accumulation: transformers' ``Trainer`` counts the labels of all batches of an optimizer step, passes the count as
    ``num_items_in_batch`` and adds up the gradients. With ``"mean_volume"`` the loss is then the batch's sum over that count, and the
    step is the one of a single large batch. The Trainer counts every label but -100, so pad with -100. No other reduction has use for
    the count: ``trainer.model_accepts_loss_kwargs = False`` makes the Trainer average the batches instead of adding them up.

    Args:
        token_logits, duration_logits, logit_lengths, blank_token_id, durations, sigma, delay_penalty, omega,
            fastemit_lambda, clamp, zero_infinity: as in :func:`tdt_loss`. Logits of a batch without any label may lack dimension 2, which
            the model squeezes.
        labels: (B, U), padded with the model's ``pad_token_id`` or with -100.
        label_lengths: (B,) as the model counts them, every label that is not ``pad_token_id``; -100 does not count here.
        reduction: as in :func:`tdt_loss`; ``"mean"`` is the model's default.
        num_items_in_batch: the labels of all batches of an optimizer step, for ``"mean_volume"``: an int or a tensor of one element.
            To compare it with the labels at hand costs one wait for a GPU.
        kwargs: keywords of the model's forward pass, such as ``output_hidden_states``, which transformers passes on; ignored. Any
            other keyword is an error.

    Returns:
        As :func:`tdt_loss`.

    Raises:
        TypeError, ValueError: as :func:`tdt_loss`; TypeError for an unknown keyword; and ValueError where ``num_items_in_batch`` counts padding.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> logits = torch.zeros(1, 3, 2, 4 + 3, requires_grad=True)  # B, T, U+1, V + D
        >>> loss = kernel.parakeet_tdt_loss(logits[..., :4], logits[..., 4:], labels=torch.tensor([[0]]), blank_token_id=3,
        ...                                 logit_lengths=torch.tensor([3]), label_lengths=torch.tensor([1]), durations=[0, 1, 2])
        >>> loss.backward()
    """
    _check_keywords("parakeet_tdt_loss", kwargs)
    return reduce_accumulated(
        lambda targets, target_lengths, reduction: tdt_loss(
            _with_positions(token_logits),
            _with_positions(duration_logits),
            targets,
            logit_lengths,
            target_lengths,
            blank_token_id,
            durations,
            sigma,
            reduction,
            delay_penalty=delay_penalty,
            omega=omega,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        labels,
        label_lengths,
        reduction,
        num_items_in_batch,
    )


def parakeet_rnnt_loss(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    label_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean_volume",
    *,
    num_items_in_batch: Tensor | int | None = None,
    sigma: float = 0.0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    zero_infinity: bool = False,
    **kwargs,
) -> Tensor:
    r"""The RNN-T loss as the ``loss_function`` of transformers' ``ParakeetForRNNT``: ``model.loss_function = kernel.parakeet_rnnt_loss``.

    The same loss and gradients as :func:`rnnt_loss`, https://arxiv.org/abs/1211.3711; torchaudio is not needed. What
    :func:`parakeet_tdt_loss` says about options and gradient accumulation holds; ``"mean_volume"`` is the default here.

    Args:
        logits, logit_lengths, blank_token_id, sigma, delay_penalty, fastemit_lambda, clamp, zero_infinity: as in :func:`rnnt_loss`.
            Logits of a batch without any label may lack dimension 2, which the model squeezes.
        labels: (B, U), padded with the model's ``blank_token_id`` or with -100.
        label_lengths: (B,) as the model counts them, every label that is not ``blank_token_id``; -100 does not count here.
        reduction, num_items_in_batch, kwargs: as in :func:`parakeet_tdt_loss`; ``"mean_volume"`` is the model's default.

    Returns:
        As :func:`rnnt_loss`.

    Raises:
        TypeError, ValueError: as :func:`rnnt_loss`; TypeError for an unknown keyword; and ValueError where ``num_items_in_batch`` counts padding.

    Example:
        >>> import torch
        >>> from kernels import get_kernel
        >>> kernel = get_kernel("kernels-community/tdt-loss", version=1)
        >>> loss = kernel.parakeet_rnnt_loss(torch.zeros(1, 3, 2, 4), labels=torch.tensor([[0]]), logit_lengths=torch.tensor([3]),
        ...                                  label_lengths=torch.tensor([1]), blank_token_id=3)
    """
    _check_keywords("parakeet_rnnt_loss", kwargs)
    return reduce_accumulated(
        lambda targets, target_lengths, reduction: rnnt_loss(
            _with_positions(logits),
            targets,
            logit_lengths,
            target_lengths,
            blank_token_id,
            reduction,
            sigma=sigma,
            delay_penalty=delay_penalty,
            fastemit_lambda=fastemit_lambda,
            clamp=clamp,
            zero_infinity=zero_infinity,
        ),
        labels,
        label_lengths,
        reduction,
        num_items_in_batch,
    )


def _check_keywords(function: str, keywords: dict) -> None:
    """A misspelt option must not pass for one of the model's keywords."""
    for name in keywords:
        if name not in _OF_THE_MODEL:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _with_positions(logits: Tensor) -> Tensor:
    """With the dimension of label positions, which the models squeeze away where no sample has a label."""
    return logits.unsqueeze(2) if logits.dim() == 3 else logits


def reduce_accumulated(
    loss: Callable[[Tensor, Tensor, str], Tensor],
    labels: Tensor,
    label_lengths: Tensor,
    reduction: str,
    num_items_in_batch: Tensor | int | None,
) -> Tensor:
    """``loss(labels, label_lengths, reduction)``, padding not counted and ``num_items_in_batch`` heeded."""
    unpadded = (labels != _PADDING).sum(-1)
    label_lengths = torch.minimum(label_lengths.to(unpadded.device), unpadded)
    if num_items_in_batch is None or reduction != "mean_volume":
        return loss(labels, label_lengths, reduction)
    return loss(labels, label_lengths, "sum") / _items(num_items_in_batch, unpadded, label_lengths)


def _items(num_items_in_batch: Tensor | int, unpadded: Tensor, label_lengths: Tensor) -> Tensor | int:
    """The labels of all batches of the optimizer step, at least 1, without the padding that the Trainer may have counted."""
    if torch.compiler.is_compiling() or not (
        holds_values(label_lengths) and holds_values(unpadded)
    ):  # taken at its word
        return torch.as_tensor(num_items_in_batch, device=label_lengths.device).reshape(()).clamp(min=1)
    items, counted, labels = int(num_items_in_batch), int(unpadded.sum()), int(label_lengths.sum())
    if items == counted:  # this batch is all there is
        return max(labels, 1)
    if counted != labels:
        raise ValueError(
            f"labels must be padded with {_PADDING} where reduction='mean_volume' and num_items_in_batch ({items}) counts more than "
            f"one batch: it counts every label that is not {_PADDING}, got {counted} of these for {labels} labels"
        )
    return max(items, 1)
