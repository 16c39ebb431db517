"""
What the mutation epilogue must know of an input's edits, and can only learn in tracing.

run_functionalized_fw_and_collect_metadata() has the input as the traced function left
it; these functions read off it what goes into InputAliasInfo beside upstream's own
fields. The values are plain data, so that metadata stays picklable, and readable by a
torch that does not know the fields.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._C import _functionalization
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import is_concrete_int


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .schemas import InputAliasInfo


# In-place view operators, as functionalization names them, and their pure counterparts.
_VIEW_METHODS = {
    "as_strided_": "as_strided",
    "squeeze_": "squeeze",
    "squeeze__dim": "squeeze",
    "squeeze__dims": "squeeze",
    "t_": "t",
    "transpose_": "transpose",
    "unsqueeze_": "unsqueeze",
}

# What autograd calls the nodes of views. Those at the end of an input's history are
# its tracked layout edits since its last tracked data edit.
_VIEW_NODES = (
    "AliasBackward",
    "AsStridedBackward",
    "SqueezeBackward",
    "TBackward",
    "TransposeBackward",
    "UnsqueezeBackward",
)
_INITIAL_NODES = ("torch::autograd::AccumulateGrad", "torch::autograd::Error")


def tracked_by_autograd(f_arg: object) -> bool:
    """Whether autograd saw any of a traced input's edits.

    A functionalized input starts with no grad_fn, or with a placeholder that only
    raises. It ends with a real one if and only if an edit was recorded: edits under
    no_grad or inference_mode, of ``detach()`` or ``.data``, and by custom operators
    leave the one it had.
    """
    grad_fn = _grad_fn(f_arg)
    return grad_fn is not None and grad_fn.name() not in _INITIAL_NODES


def data_tracked_by_autograd(f_arg: object) -> bool:
    """Whether autograd saw an edit of a traced input's data, and not of its layout."""
    grad_fn = _grad_fn(f_arg)
    while grad_fn is not None and grad_fn.name().startswith(_VIEW_NODES):
        grad_fn = grad_fn.next_functions[0][0]
    return grad_fn is not None and grad_fn.name() not in _INITIAL_NODES


def _grad_fn(f_arg: object) -> Any:
    if not isinstance(f_arg, torch.Tensor):
        return None
    with FunctionalTensorMode():  # rebasing a view's history runs view operators
        return f_arg.grad_fn


def in_place_views(f_arg: object) -> tuple[tuple[Any, ...], ...] | None:
    """The metadata edits of a traced input, each as ``(method, *arguments)``.

    Called one after the other on any tensor, the methods give the layout that the same
    edits in place give it. None if an edit has symbolic arguments or cannot be told, as
    for tensor subclasses.
    """
    if not isinstance(f_arg, FunctionalTensor):
        return None
    views = []
    for view in _functionalization.get_view_meta_sequence(f_arg.elem):
        kind = type(view).__name__.removesuffix("_ViewMeta")
        if view.has_symbolic_inputs or kind not in _VIEW_METHODS:
            return None
        # as_tuple() begins with three facts that functionalization keeps for itself.
        arguments = [
            tuple(a) if isinstance(a, list) else a for a in view.as_tuple()[3:]
        ]
        views.append((_VIEW_METHODS[kind], *arguments))
    return tuple(views)


def overlaps_itself(arg: object) -> bool:
    """Whether elements of an input share memory because it was expanded."""
    if not isinstance(arg, torch.Tensor) or arg.layout != torch.strided:
        return False
    return any(
        is_concrete_int(stride)
        and stride == 0
        and not (is_concrete_int(size) and size == 1)
        for size, stride in zip(arg.size(), arg.stride())
    ) and not any(is_concrete_int(size) and size == 0 for size in arg.size())


def edited_in_inference_mode(f_arg: object) -> bool:
    """Whether the last edit of all of a traced input was made under inference_mode.

    Only there may an inference tensor be edited, and its new value is one as well. For
    an edit of a part of the input this says False.
    """
    if not isinstance(f_arg, FunctionalTensor):
        return False
    return torch._from_functional_tensor(f_arg.elem).is_inference()


def merged_inference_mode(
    input_info: Sequence[InputAliasInfo], indices: Sequence[int]
) -> bool | None:
    """Whether an alias of a synthetic base was last edited under inference_mode."""
    return any(input_info[i].edited_in_inference_mode for i in indices)


def merged_tracking(
    input_info: Sequence[InputAliasInfo], indices: Sequence[int]
) -> bool | None:
    """Whether autograd saw an edit of the data of any alias of a synthetic base."""
    tracked = [input_info[i].data_tracked_by_autograd for i in indices]
    return None if None in tracked else any(tracked)


def merged_in_place_views(
    input_info: Sequence[InputAliasInfo], indices: Sequence[int]
) -> tuple[tuple[Any, ...], ...] | None:
    """A synthetic base keeps its layout; the aliases' are replayed elsewhere."""
    return input_info[indices[0]].in_place_views if len(indices) == 1 else ()


def merged_overlap(
    input_info: Sequence[InputAliasInfo], indices: Sequence[int]
) -> bool | None:
    """A synthetic base is a tensor of its own and does not overlap itself."""
    return input_info[indices[0]].overlaps_itself if len(indices) == 1 else False
