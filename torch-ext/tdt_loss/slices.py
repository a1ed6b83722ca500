"""One gradient for two adjoining slices of a joint tensor, through the user's own graph.

A model with one joint network for tokens and durations cuts its output in two. Autograd would turn the gradient of each slice
into a tensor of the size of the whole, mostly zeros, and add the two: three more passes over the largest tensor of a training
step. Here the gradient of the joint tensor is computed once, and the slices are handed its columns as :class:`GradientPart`.
Autograd passes these through every node between the loss and the joint network's output, with all the hooks that stand there;
where the backward of the two slices would add zeros, the parts become the whole again. Whatever else is done with a part, by a
hook say, is done with the tensor that it stands for.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_SLICE_BACKWARD = torch.ops.aten.slice_backward.default
_ADD = torch.ops.aten.add.Tensor
_CAT = torch.ops.aten.cat.default

# A leaf in the graph of every loss of two slices, which gets no gradient. Autograd says that it will visit it in `backward`, but
# not in `autograd.grad`, which hands the gradients of what it is asked for to the caller: these must be plain tensors.
# It is an ordinary tensor whatever mode the package is imported in.
with torch.inference_mode(False), _disable_current_modes():
    ANCHOR = torch.zeros((), requires_grad=True, device="cpu")


def adjoin(token_logits: Tensor, duration_logits: Tensor) -> bool:
    """Whether the two are column ranges of one (B, T, U+1, V + D) tensor in memory, tokens first."""
    return (
        type(token_logits) is Tensor
        and type(duration_logits) is Tensor
        and token_logits.stride() == duration_logits.stride()
        and token_logits.stride(3) == 1
        and duration_logits.storage_offset() == token_logits.storage_offset() + token_logits.shape[3]
        and duration_logits.untyped_storage()._cdata == token_logits.untyped_storage()._cdata
    )


def joint_of(token_logits: Tensor, duration_logits: Tensor) -> Tensor:
    """That tensor. Autograd must be excluded."""
    shape = (*token_logits.shape[:3], token_logits.shape[3] + duration_logits.shape[3])
    return token_logits.as_strided(shape, token_logits.stride(), token_logits.storage_offset())


class Watched:
    """Two slices, to ask at the time of backward whether somebody looks at the gradient of one itself."""

    def __init__(self, *tensors: Tensor):
        self.references = [weakref.ref(x) for x in tensors]

    def __bool__(self) -> bool:
        tensors = [reference() for reference in self.references]
        return any(x is not None and (x.retains_grad or bool(x._backward_hooks)) for x in tensors)


def meet_again(edges: Sequence, V: int, columns: int) -> bool:
    """Whether two edges of autograd's graph lead to the two slices of one tensor of this many columns, V of them in the first, and
    on to the gradient of that tensor. The third leads to ANCHOR."""
    (tokens, i), (durations, j), (anchor, _) = edges
    if tokens is None or durations is None:
        return False
    name = tokens.name()
    if tokens is durations:
        if name != "SplitWithSizesBackward0" or (i, j) != (0, 1):
            return False
        if tuple(tokens._saved_split_sizes) != (V, columns - V):
            return False
    elif name != "SliceBackward0" or durations.name() != name or tokens.next_functions != durations.next_functions:
        return False
    joint = tokens.next_functions[0][0]
    if joint is None:
        return False
    try:
        return torch._C._will_engine_execute_node(anchor) and torch._C._will_engine_execute_node(joint)
    except RuntimeError:  # autograd.grad does not say of leaves
        return False


def parts_of(grad: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """The gradients of the two slices of a joint tensor, from its gradient: columns [0, V) and the others."""
    return GradientPart(grad, 0, V, False), GradientPart(grad, V, grad.shape[3], False)


class GradientPart(Tensor):
    """Columns [begin, end) of the gradient of a joint tensor; if ``whole``, of its full width with zeros in all others.

    Two parts that complete each other add up to that gradient itself. Every other operation sees the tensor that the part
    stands for, and returns a plain tensor.
    """

    place: tuple[Tensor, int, int, bool]  # joint, begin, end, whole
    value: Tensor | None = None  # what it stands for, once somebody has asked

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, joint: Tensor, begin: int, end: int, whole: bool) -> GradientPart:
        shape, offset = joint.shape, joint.storage_offset()
        if not whole:
            shape, offset = (*shape[:3], end - begin), offset + begin
        self = Tensor._make_wrapper_subclass(cls, shape, joint.stride(), offset, dtype=joint.dtype, device=joint.device)
        self.place = (joint, begin, end, whole)
        return self

    # What torch does without an operation.

    def __repr__(self) -> str:
        return repr(self.plain())

    def __deepcopy__(self, memo) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol):
        return self.plain().__reduce_ex__(protocol)

    def numpy(self, *args, **kwargs):
        return self.plain().numpy(*args, **kwargs)

    def tolist(self) -> list:
        return self.plain().tolist()

    def data_ptr(self) -> int:
        return self.plain().data_ptr()

    def untyped_storage(self):
        return self.plain().untyped_storage()

    def plain(self) -> Tensor:
        if self.value is None:
            joint, begin, end, whole = self.place
            self.value = joint[..., begin:end]
            if whole:
                columns, self.value = self.value, torch.zeros_like(joint)
                self.value[..., begin:end] = columns
        return self.value

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        joined = _join(func, args) if not kwargs else None
        if joined is not None:
            return joined
        given = {}

        def plain(part: GradientPart) -> Tensor:
            value = part.plain()
            given[id(value)] = part
            return value

        args, kwargs = tree_map_only(GradientPart, plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return given.get(id(result), result)  # an operation in place returns the part that it was given


def _join(func, args) -> Tensor | None:
    """What the backward of two slices, or of a split, makes of parts; None for other operations."""
    if func is _SLICE_BACKWARD:
        part, shape, dim, start, end, step = args
        joint, begin, part_end, whole = part.place
        first, last, _ = slice(start, end).indices(shape[-1])  # either may count from the end
        same_place = first == begin and last == part_end and dim % 4 == 3 and step == 1
        if same_place and not whole and tuple(shape) == joint.shape:
            return GradientPart(joint, begin, part_end, True)
    elif func is _ADD:
        if len(args) == 2 and _complete(*args, whole=True):
            return args[0].place[0]
    elif func is _CAT:
        parts, dim = args if len(args) == 2 else (args[0], 0)
        if len(parts) == 2 and dim % 4 == 3 and _complete(*parts, whole=False):
            return parts[0].place[0]
    return None


def _complete(first, second, whole: bool) -> bool:
    """Whether these are two parts of one gradient, of one kind and in order, that nobody has changed apart from it."""
    if type(first) is not GradientPart or type(second) is not GradientPart:
        return False
    if whole and (first.value is not None or second.value is not None):
        return False
    joint, begin, end, first_whole = first.place
    other_joint, other_begin, other_end, second_whole = second.place
    if joint is not other_joint or not first_whole == second_whole == whole:
        return False
    if whole and begin > other_begin:
        begin, end, other_begin, other_end = other_begin, other_end, begin, end
    return begin == 0 and end == other_begin and other_end == joint.shape[3]
