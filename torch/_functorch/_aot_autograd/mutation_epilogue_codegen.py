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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from .subclass_codegen import _compile_and_exec_source


if TYPE_CHECKING:
    from torch._guards import Source

    from .schemas import InputAliasInfo, ViewAndMutationMeta


try:
    # From 2.15, _compile_and_exec_source emits all wrappers' sources as one artifact.
    from .codegen import _RUNTIME_WRAPPERS_ARTIFACT_NAME  # noqa: F401
except ImportError:
    _SOURCES_ARE_FOLDED = False
else:
    _SOURCES_ARE_FOLDED = True

ARTIFACT_NAME = "mutation_epilogue"
_MAX_SOURCE_NAME = 80


class Replay(enum.Enum):
    """How the final state of a mutated input gets onto the caller's tensor."""

    SET_STORAGE = enum.auto()
    SHALLOW_COPY_DATA = enum.auto()
    RESTRIDE = enum.auto()
    RESTRIDE_AND_COPY = enum.auto()
    RESTRIDE_AND_COPY_LEAF = enum.auto()
    COPY = enum.auto()
    COPY_LEAF = enum.auto()


@dataclass(frozen=True)
class InputReplay:
    """The replay of one mutated input.

    ``input_index`` is its place among the wrapper's inputs, ``output_index`` that of
    its new version among the compiled function's mutated inputs. ``wrapped`` says that
    the new version arrives in a ``TensorAlias``. ``what`` tells a reader of the source
    what happened to the input.
    """

    input_index: int
    output_index: int
    replay: Replay
    wrapped: bool
    what: str


def plan_replays(
    runtime_metadata: ViewAndMutationMeta, *, trace_joint: bool
) -> list[InputReplay]:
    """Choose the replay of each mutated input, in the order of the compiled outputs.

    An output that shares the input's memory (anything but a data edit) is wrapped in a
    ``TensorAlias`` where the joint graph was traced.

    Raises RuntimeError for a data edit of a non-leaf on a user-specified stream, which
    cannot be replayed yet (https://github.com/pytorch/pytorch/issues/172522).
    """
    plan = []
    for output_index, input_index in enumerate(
        runtime_metadata.mutated_inp_runtime_indices
    ):
        info = runtime_metadata.input_info[input_index]
        if not (info.mutates_data or info.mutates_metadata):
            continue  # only its storage was resized, which stays in the graph
        replay, what = _choose_replay(info)
        if replay in (Replay.COPY, Replay.RESTRIDE_AND_COPY):
            _refuse_stream(runtime_metadata, input_index, output_index)
        aliases = replay in (
            Replay.SET_STORAGE,
            Replay.SHALLOW_COPY_DATA,
            Replay.RESTRIDE,
        )
        plan.append(
            InputReplay(
                input_index, output_index, replay, trace_joint and aliases, what
            )
        )
    return plan


def _choose_replay(info: InputAliasInfo) -> tuple[Replay, str]:
    """The replay table: the first row that applies, and the words for its comment."""
    if info.mutates_storage_metadata:
        if getattr(info, "mutation_is_shallow_copy_data", False):  # from 2.14
            return Replay.SHALLOW_COPY_DATA, "data assigned"
        return Replay.SET_STORAGE, "storage replaced"
    if not info.mutates_data:
        return Replay.RESTRIDE, "metadata edited"
    if info.mutates_metadata:
        if info.is_leaf:
            return Replay.RESTRIDE_AND_COPY_LEAF, "metadata and data of a leaf edited"
        return Replay.RESTRIDE_AND_COPY, "metadata and data edited"
    if info.is_leaf:
        return Replay.COPY_LEAF, "data of a leaf edited"
    return Replay.COPY, "data edited"


def _refuse_stream(
    runtime_metadata: ViewAndMutationMeta, input_index: int, output_index: int
) -> None:
    streams = runtime_metadata.mutated_inp_stream_indices
    if not streams or output_index >= len(streams) or streams[output_index] is None:
        return
    raise RuntimeError(
        f"Input {input_index} is mutated on a user-specified stream. "
        "Mutations on inputs with user-specified streams are not yet supported. "
        "See: https://github.com/pytorch/pytorch/issues/172522"
    )


def emit_source(plan: Sequence[InputReplay], names: Sequence[str] = ()) -> str:
    """The plan as Python source, with a comment above each replay.

    ``names[i]`` is what the user calls input ``i``; empty where that is not known.
    """
    lines = ["def _apply_mutations(orig_inputs, updated_inputs):"]
    for step in plan:
        name = f", {names[step.input_index]}" if names else ""
        lines.append(f"    # Input {step.input_index}{name}: {step.what}")
        lines += [f"    {line}" for line in _emit_replay(step)]
    if not plan:
        lines.append("    pass")
    return "\n".join(lines)


def _emit_replay(step: InputReplay) -> list[str]:
    target = f"orig_inputs[{step.input_index}]"
    updated = f"updated_inputs[{step.output_index}]"
    if step.wrapped:
        updated = f"_unwrap_tensoralias({updated})"
    name = f"updated_{step.output_index}"
    restride = [
        f"{name} = {updated}",
        f"{target}.as_strided_(",
        f"    {name}.size(), {name}.stride(), {name}.storage_offset()",
        ")",
    ]
    match step.replay:
        case Replay.SET_STORAGE:
            return ["with torch.no_grad():", f"    {target}.set_({updated})"]
        case Replay.SHALLOW_COPY_DATA:
            call = f"torch.ops.aten.shallow_copy_data_({target}, {updated})"
            return ["with torch.no_grad():", f"    {call}"]
        case Replay.RESTRIDE:
            return restride
        case Replay.RESTRIDE_AND_COPY:
            return [*restride, f"{target}.copy_({name})"]
        case Replay.RESTRIDE_AND_COPY_LEAF:
            return [*restride, *_emit_copy_leaf(target, name)]
        case Replay.COPY:
            return [f"{target}.copy_({updated})"]
        case Replay.COPY_LEAF:
            return _emit_copy_leaf(target, updated)


def _emit_copy_leaf(target: str, updated: str) -> list[str]:
    # A leaf that requires grad refuses a tracked edit, and the user's was not tracked.
    return [
        f"if {target}.requires_grad:",
        f"    {target}.detach().copy_({updated})",
        "else:",
        f"    {target}.copy_({updated})",
    ]


def _display_names(
    runtime_metadata: ViewAndMutationMeta, input_sources: Sequence[Source | None] | None
) -> list[str]:
    """What the user calls each input, safe to put into a comment; [] if not known.

    Removing duplicates and merging aliased inputs shifts positions, and then the number
    of sources differs from that of the inputs.
    """
    if input_sources is None or len(input_sources) != len(runtime_metadata.input_info):
        return []
    names = ["unnamed" if s is None else ascii(s.name)[1:-1] for s in input_sources]
    return [n if len(n) <= _MAX_SOURCE_NAME else n[:_MAX_SOURCE_NAME] + "..." for n in names]


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
