"""
Generates the mutation epilogue: the replay of a compiled function's input mutations.

AOTAutograd compiles a functionalized graph. What the user's function did in place to
its inputs comes out of that graph as new tensors, and the runtime wrapper has to replay
it on the caller's tensors. How each input was mutated is known when the wrapper is
built, so the replay is straight-line Python with every branch resolved:

    ViewAndMutationMeta -> plan_replays -> emit_source -> _build -> _apply_mutations

The first two steps are pure functions. The source is the "mutation_epilogue" artifact
of the structured trace.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from .subclass_codegen import _compile_and_exec_source


try:
    # From 2.15, _compile_and_exec_source emits all wrappers' sources as one artifact.
    from .codegen import _RUNTIME_WRAPPERS_ARTIFACT_NAME  # noqa: F401
except ImportError:
    _SOURCES_ARE_FOLDED = False
else:
    _SOURCES_ARE_FOLDED = True

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._guards import Source

    from .schemas import InputAliasInfo, ViewAndMutationMeta


ARTIFACT_NAME = "mutation_epilogue"
_MAX_NAME_LENGTH = 80


class Target(enum.Enum):
    """The tensor that an input's new data is copied into, and when not the input."""

    INPUT = ("", "")
    # Bumps the version counter, and autograd neither records the copy nor refuses it
    # for a leaf or for a view of a function that returns several.
    DETACHED = (".detach()", "")
    DETACHED_IF_INFERENCE = (".detach()", ".is_inference()")
    DETACHED_IF_REQUIRES_GRAD = (".detach()", ".requires_grad")
    # Leaves the version counter alone as well.
    HIDDEN = (".data", "")


@dataclass(frozen=True)
class InputReplay:
    """How the final state of one mutated input gets onto the caller's tensor.

    ``input_index`` is its place among the wrapper's inputs, ``output_index`` that of
    its new version among the compiled function's mutated inputs. What is to be done
    follows in the order of execution; ``what`` says for a reader why.
    """

    input_index: int
    output_index: int
    what: str
    # The call that gives the input `x` the storage of its version `updated`.
    set_storage: str | None = None
    # Give the input a new layout: that after `views`, or that of its new version.
    restride: bool = False
    views: tuple[tuple[Any, ...], ...] | None = None
    under_no_grad: bool = False
    # Copy the data of the new version.
    copy_into: Target | None = None
    # The new version arrives in a TensorAlias.
    wrapped: bool = False


def plan_replays(
    runtime_metadata: ViewAndMutationMeta, *, trace_joint: bool
) -> list[InputReplay]:
    """Choose the replay of each mutated input, in the order of the compiled outputs.

    Raises RuntimeError where no replay can be right: for a data edit of an input that
    overlaps itself, and for one on a user-specified stream
    (https://github.com/pytorch/pytorch/issues/172522).
    """
    plan = []
    for output_index, input_index in enumerate(
        runtime_metadata.mutated_inp_runtime_indices
    ):
        info = runtime_metadata.input_info[input_index]
        if info.mutates_data and not info.mutates_storage_metadata:
            _refuse_overlap(info, input_index)
            _refuse_stream(runtime_metadata, info, input_index, output_index)
        if info.mutates_data or info.mutates_metadata:  # else only a storage resize
            plan.append(_plan_replay(info, input_index, output_index, trace_joint))
    return plan


def _plan_replay(
    info: InputAliasInfo, input_index: int, output_index: int, trace_joint: bool
) -> InputReplay:
    """The replay table: the first row that applies."""

    def replay(what: str, **how: Any) -> InputReplay:
        return InputReplay(input_index, output_index, what, **how)

    if info.mutates_storage_metadata:
        call, what = "{x}.set_({updated})", "its storage was set"
        if getattr(info, "mutation_is_shallow_copy_data", False):  # from 2.14
            call = "torch.ops.aten.shallow_copy_data_({x}, {updated})"
            what = "its data was assigned"
        return replay(what, set_storage=call, wrapped=trace_joint)

    under_no_grad = info.requires_grad and info.tracked_by_autograd is False
    if not info.mutates_data:
        sight = ", out of autograd's sight" if under_no_grad else ""
        return replay(
            f"its layout changed{sight}",
            restride=True,
            under_no_grad=under_no_grad,
            wrapped=trace_joint,
        )

    copy_into, what = _choose_target(info)
    if not info.mutates_metadata:
        return replay(f"its data changed, {what}", copy_into=copy_into)
    return replay(
        f"its layout and its data changed, {what}",
        restride=True,
        views=info.in_place_views,
        under_no_grad=under_no_grad,
        copy_into=copy_into,
    )


def _choose_target(info: InputAliasInfo) -> tuple[Target, str]:
    if info.mutations_hidden_from_autograd:
        return Target.HIDDEN, "hidden from autograd"
    if info.data_tracked_by_autograd:
        return Target.INPUT, "seen by autograd"
    if info.data_tracked_by_autograd is None:
        # Metadata from a cache that a torch without this record filled. A leaf that
        # requires grad can only have been edited out of autograd's sight.
        if info.is_leaf:
            return Target.DETACHED_IF_REQUIRES_GRAD, "of a leaf"
        return Target.INPUT, "of a tensor that is not a leaf"
    if info.requires_grad:
        return Target.DETACHED, "out of autograd's sight"
    if info.edited_in_inference_mode:
        return Target.DETACHED_IF_INFERENCE, "under inference_mode"
    return Target.INPUT, "and nothing requires grad"


def _refuse_overlap(info: InputAliasInfo, input_index: int) -> None:
    if info.overlaps_itself:
        raise RuntimeError(
            f"Input {input_index} of the compiled function is edited in place, and "
            "several of its elements share one memory location (it was made by "
            "expand() or the like), so the edit cannot be replayed. Pass "
            "input.contiguous() or input.clone() instead."
        )


def _refuse_stream(
    runtime_metadata: ViewAndMutationMeta,
    info: InputAliasInfo,
    input_index: int,
    output_index: int,
) -> None:
    streams = runtime_metadata.mutated_inp_stream_indices or []
    on_stream = output_index < len(streams) and streams[output_index] is not None
    if on_stream and not info.is_leaf:
        raise RuntimeError(
            "Mutations on inputs with user-specified streams are not yet supported "
            f"(input {input_index}). "
            "See: https://github.com/pytorch/pytorch/issues/172522"
        )


def emit_source(plan: Sequence[InputReplay], names: Sequence[str] = ()) -> str:
    """The plan as Python source, with a comment above each replay.

    ``names[i]`` is what the user calls input ``i``; empty where that is not known.
    """
    lines = ["def _apply_mutations(orig_inputs, updated_inputs):"]
    for step in plan:
        name = f", {names[step.input_index]}" if names else ""
        lines.append(f"    # Input {step.input_index}{name}: {step.what}.")
        lines += [f"    {line}" for line in _emit_replay(step)]
    if not plan:
        lines.append("    pass")
    return "\n".join(lines)


def _emit_replay(step: InputReplay) -> list[str]:
    x = f"orig_inputs[{step.input_index}]"
    updated = f"updated_inputs[{step.output_index}]"
    if step.wrapped:
        updated = f"_unwrap_tensoralias({updated})"
    if step.set_storage is not None:
        call = step.set_storage.format(x=x, updated=updated)
        return ["with torch.no_grad():", f"    {call}"]
    lines = _emit_restride(step, x, updated) if step.restride else []
    if step.copy_into is not None:
        target, condition = step.copy_into.value
        if condition:
            name = f"target_{step.input_index}"
            lines += [
                f"{name} = {x}",
                f"if {name}{condition}:",
                f"    {name} = {name}{target}",
            ]
            x, target = name, ""
        lines.append(f"{x}{target}.copy_({updated})")
    return lines


def _emit_restride(step: InputReplay, x: str, updated: str) -> list[str]:
    layout = f"layout_{step.input_index}"
    views = "".join(
        f".{method}({', '.join(map(repr, arguments))})"
        for method, *arguments in step.views or ()
    )
    restride = [
        f"{x}.as_strided_(",
        f"    {layout}.size(), {layout}.stride(), {layout}.storage_offset()",
        ")",
    ]
    if step.under_no_grad:
        restride = ["with torch.no_grad():", *(f"    {line}" for line in restride)]
    if views:
        return [f"{layout} = {x}.detach(){views}", *restride]
    if step.copy_into is None:
        return [f"{layout} = {updated}", *restride]
    # The new version is a tensor of its own: its layout is the input's only if the
    # input began as one, too.
    return [
        f"if not {x}.is_contiguous() or {x}.storage_offset() != 0:",
        "    raise RuntimeError(",
        f'        "Layout and data of input {step.input_index} of the compiled "',
        '        "function are edited in place, and the layout is not known. Pass "',
        '        "input.clone() instead, or edit the layout out of place."',
        "    )",
        f"{layout} = {updated}",
        *restride,
    ]


def _display_names(
    runtime_metadata: ViewAndMutationMeta, input_sources: Sequence[Source | None] | None
) -> list[str]:
    """What the user calls each input, fit for a comment; empty where it is not known.

    Removing duplicates and merging aliases shifts the inputs, and then the number of
    sources is not that of the inputs.
    """
    if input_sources is None or len(input_sources) != len(runtime_metadata.input_info):
        return []
    names = ["unnamed" if s is None else ascii(s.name)[1:-1] for s in input_sources]
    return [
        n if len(n) <= _MAX_NAME_LENGTH else f"{n[:_MAX_NAME_LENGTH]}..." for n in names
    ]


def _build(source: str) -> Callable[[dict[int, torch.Tensor], list[Any]], None]:
    """Compile the source, and emit it as exactly one artifact of its own."""
    from .runtime_wrappers import _unwrap_tensoralias  # it imports this module

    if _SOURCES_ARE_FOLDED:
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": ARTIFACT_NAME, "encoding": "string"},
            payload_fn=lambda: source,
        )
    # aot_autograd.compile_to_python splices the source into a module of its own, and
    # can reproduce no other globals than these there.
    variables = {"torch": torch, "_unwrap_tensoralias": _unwrap_tensoralias}
    return _compile_and_exec_source(  # type: ignore[return-value]
        source, variables, "_apply_mutations", ARTIFACT_NAME
    )


def codegen_mutation_epilogue(
    runtime_metadata: ViewAndMutationMeta,
    *,
    trace_joint: bool,
    input_sources: Sequence[Source | None] | None = None,
) -> Callable[[dict[int, torch.Tensor], list[Any]], None]:
    """Generate ``_apply_mutations(orig_inputs, updated_inputs)`` for one wrapper.

    ``orig_inputs`` maps an input's index to the caller's tensor, ``updated_inputs``
    holds the compiled function's new version of each mutated input. ``input_sources``
    are dynamo's names of the inputs, for the comments of the generated source.

    Raises what :func:`plan_replays` raises.
    """
    plan = plan_replays(runtime_metadata, trace_joint=trace_joint)
    return _build(emit_source(plan, _display_names(runtime_metadata, input_sources)))
