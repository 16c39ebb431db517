# Owner(s): ["module: functorch"]

"""
Eager parity of compiled functions that edit their inputs in place.

A program is a kind of input, a way to edit it, whether the input is used afterwards,
a grad mode around the call, and a route from AOTAutograd's front ends. It is run in
eager and compiled, each on tensors of its own, and everything that a caller can see of
the input, of its base and of the gradients is compared. KNOWN_DIFFERENCES lists what
remains, with the reason for each, and an entry that no longer differs is an error.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module_simplified
from torch.testing._internal.common_utils import run_tests, skipIfTorchDynamo, TestCase
from torch.testing._internal.two_tensor import TwoTensor


# --------------------------------------------------------------------------------------
# Inputs


@dataclass
class Input:
    """An input `x`, a second one `y`, and the leaves whose gradients they reach."""

    x: torch.Tensor
    y: torch.Tensor = field(default_factory=lambda: torch.full((3, 4), 2.0))
    roots: list[torch.Tensor] = field(default_factory=list)
    base: torch.Tensor | None = None


def numbers(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = torch.arange(1.0, count + 1).reshape(shape) / 8
    return values.requires_grad_(requires_grad)


def plain(view: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Input:
    base = numbers(*shape)
    return Input(view(base), base=base)


def leaf(view: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Input:
    root = numbers(*shape, requires_grad=True)
    return Input(view(root), roots=[root], base=root)


def nonleaf(view: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Input:
    root = numbers(*shape, requires_grad=True)
    base = root * 1
    return Input(view(base), roots=[root], base=base)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ViewOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x[3:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(grad), grad])


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def offset(x: torch.Tensor) -> torch.Tensor:
    return x[3:]


def gaps(x: torch.Tensor) -> torch.Tensor:
    return x[1:, 1::2]


def under(
    context: Callable[[], Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def viewed(x: torch.Tensor) -> torch.Tensor:
        with context():
            return view(x)

    return viewed


def inference_tensor() -> Input:
    with torch.inference_mode():
        return Input(numbers(3, 4))


def two_tensor(requires_grad: bool = False) -> Input:
    root = TwoTensor(numbers(3, 4), numbers(3, 4) + 1).requires_grad_(requires_grad)
    return Input(root * 1, roots=[root] if requires_grad else [])


def nested_two_tensor() -> Input:
    inner = TwoTensor(numbers(3, 4), numbers(3, 4) + 1)
    return Input(TwoTensor(inner, inner + 1))


def duplicated() -> Input:
    made = nonleaf(same, 3, 4)
    made.y = made.x
    return made


def overlapping(make: Callable[..., Input]) -> Input:
    made = make(same, 4, 4)
    made.x, made.y = made.x[:3], made.x[1:]
    return made


INPUTS: dict[str, Callable[[], Input]] = {
    "plain": lambda: plain(same, 3, 4),
    "plain offset": lambda: plain(offset, 6, 4),
    "plain gaps": lambda: plain(gaps, 4, 8),
    "plain transposed": lambda: plain(torch.t, 4, 3),
    "plain expanded": lambda: plain(lambda x: x.expand(3, 4), 1, 4),
    "plain unbind": lambda: plain(lambda x: x.unbind(0)[1], 2, 3, 4),
    "plain channels-last": lambda: Input(
        numbers(2, 3, 4, 4).to(memory_format=torch.channels_last)
    ),
    "leaf": lambda: leaf(same, 3, 4),
    "leaf offset": lambda: leaf(offset, 6, 4),
    "leaf transposed": lambda: leaf(torch.t, 4, 3),
    "leaf no_grad view": lambda: leaf(under(torch.no_grad, offset), 6, 4),
    "parameter": lambda: Input(torch.nn.Parameter(numbers(3, 4))),
    "parameter offset": lambda: leaf(offset, 6, 4),
    "nonleaf": lambda: nonleaf(same, 3, 4),
    "nonleaf offset": lambda: nonleaf(offset, 6, 4),
    "nonleaf gaps": lambda: nonleaf(gaps, 4, 8),
    "nonleaf transposed": lambda: nonleaf(torch.t, 4, 3),
    "nonleaf expanded": lambda: nonleaf(lambda x: x.expand(3, 4), 1, 4),
    "nonleaf channels-last": lambda: nonleaf(
        lambda x: x.to(memory_format=torch.channels_last), 2, 3, 4, 4
    ),
    "nonleaf unbind": lambda: nonleaf(lambda x: x.unbind(0)[1], 2, 3, 4),
    "nonleaf split": lambda: nonleaf(lambda x: x.split(3)[1], 6, 4),
    "nonleaf chunk": lambda: nonleaf(lambda x: x.chunk(2)[1], 6, 4),
    "nonleaf unsafe_split": lambda: nonleaf(lambda x: x.unsafe_split(3)[1], 6, 4),
    "nonleaf no_grad view": lambda: nonleaf(under(torch.no_grad, offset), 6, 4),
    "nonleaf inference view": lambda: nonleaf(
        under(torch.inference_mode, offset), 6, 4
    ),
    "function identity": lambda: nonleaf(Identity.apply, 3, 4),
    "function view": lambda: nonleaf(ViewOf.apply, 6, 4),
    "function dirty": lambda: nonleaf(Dirty.apply, 3, 4),
    "inference": inference_tensor,
    "complex": lambda: Input(numbers(3, 4) * (1 + 2j)),
    "conjugated": lambda: Input((numbers(3, 4) * (1 + 2j)).conj()),
    "zero-size": lambda: nonleaf(same, 0, 4),
    "0-dim": lambda: nonleaf(lambda x: x[0], 2),
    "integer": lambda: Input(torch.arange(12).reshape(3, 4)),
    "bool": lambda: Input(torch.arange(12).reshape(3, 4) % 2 == 0),
    "subclass": two_tensor,
    "subclass nonleaf": lambda: two_tensor(requires_grad=True),
    "subclass nested": nested_two_tensor,
    "duplicated": duplicated,
    "aliased plain": lambda: overlapping(plain),
    "aliased nonleaf": lambda: overlapping(nonleaf),
}


# --------------------------------------------------------------------------------------
# Edits


@torch.library.custom_op("mutation_epilogue_parity::double", mutates_args={"x"})
def double(x: torch.Tensor) -> None:
    x.mul_(2)


Edit = Callable[[torch.Tensor, torch.Tensor], object]


def within(context: Callable[[], Any], edit: Edit) -> Edit:
    def edited(x: torch.Tensor, other: torch.Tensor) -> None:
        with context():
            edit(x, other)

    return edited


def then(*edits: Edit) -> Edit:
    def edited(x: torch.Tensor, other: torch.Tensor) -> None:
        for edit in edits:
            edit(x, other)

    return edited


def edit_slice(x: torch.Tensor, other: torch.Tensor) -> None:
    x[:2].mul_(3)


def edit_index_put(x: torch.Tensor, other: torch.Tensor) -> None:
    x[torch.tensor([0, 2])] = 5


def assign_data(x: torch.Tensor, other: torch.Tensor) -> None:
    x.data = x.detach() + 1


def mul(x: torch.Tensor, other: torch.Tensor) -> None:
    x.mul_(2)


def transpose(x: torch.Tensor, other: torch.Tensor) -> None:
    x.transpose_(0, 1)


def unsqueeze(x: torch.Tensor, other: torch.Tensor) -> None:
    x.unsqueeze_(0)


def detached_mul(x: torch.Tensor, other: torch.Tensor) -> None:
    x.detach().mul_(2)


no_grad_mul = within(torch.no_grad, mul)
no_grad_slice = within(torch.no_grad, edit_slice)
no_grad_transpose = within(torch.no_grad, transpose)

EDITS: dict[str, Edit] = {
    "mul_": mul,
    "copy_": lambda x, other: x.copy_(other),
    "fill_": lambda x, other: x.fill_(3),
    "zero_": lambda x, other: x.zero_(),
    "slice": edit_slice,
    "view": lambda x, other: x.view(-1).add_(1),
    "index_put_": edit_index_put,
    "index_copy_": lambda x, other: x.index_copy_(
        0, torch.tensor([1]), torch.ones_like(x[:1])
    ),
    "scatter_": lambda x, other: x.scatter_(0, torch.zeros_like(x[:1]).long(), 7),
    "masked_fill_": lambda x, other: x.masked_fill_(x > 1, 9),
    "no_grad mul_": no_grad_mul,
    "no_grad slice": no_grad_slice,
    "no_grad copy_": within(torch.no_grad, lambda x, other: x.copy_(other)),
    "enable_grad in no_grad": within(torch.no_grad, within(torch.enable_grad, mul)),
    "inference_mode mul_": within(torch.inference_mode, mul),
    "detach": detached_mul,
    "data": lambda x, other: x.data.mul_(2),
    "no_grad, mul_": then(no_grad_mul, mul),
    "mul_, detach": then(mul, detached_mul),
    "custom operator": lambda x, other: double(x),
    "custom function": lambda x, other: Dirty.apply(x),
    "transpose_": transpose,
    "t_": lambda x, other: x.t_(),
    "squeeze_": lambda x, other: x.squeeze_(0),
    "unsqueeze_": unsqueeze,
    "swapaxes_": lambda x, other: x.swapaxes_(0, 1),
    "as_strided_": lambda x, other: x.as_strided_((2, 2), (2, 1)),
    "resize_": lambda x, other: x.resize_(2, 2),
    "no_grad transpose_": no_grad_transpose,
    "mul_, transpose_": then(mul, transpose),
    "transpose_, mul_": then(transpose, mul),
    "unsqueeze_, mul_": then(unsqueeze, mul),
    "no_grad: mul_, transpose_": then(no_grad_mul, no_grad_transpose),
    "transpose_, slice": then(transpose, edit_slice),
    "transpose_, detach": then(no_grad_transpose, detached_mul),
    "transpose_, no_grad mul_": then(transpose, no_grad_mul),
    "no_grad mul_, unsqueeze_": then(no_grad_mul, unsqueeze),
    "unsqueeze_, detached": then(unsqueeze, detached_mul),
    "as_strided_, mul_": then(lambda x, other: x.as_strided_((2, 2), (2, 1)), mul),
    "set_": lambda x, other: x.set_(other.detach().clone()),
    "data =": assign_data,
    "requires_grad_": lambda x, other: x.requires_grad_(),
}


# --------------------------------------------------------------------------------------
# Routes and modes

Program = Callable[..., Any]


class _Module(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: torch.Tensor) -> Any:
        return self.program(*args)


def simplified(program: Program) -> Program:
    def call(*args: torch.Tensor) -> Any:
        return aot_module_simplified(_Module(program), list(args), nop)(*args)

    return call


ROUTES: dict[str, Callable[[Program], Program]] = {
    "aot_function": lambda program: aot_function(program, nop),
    "aot_module_simplified": simplified,
    "custom backend": lambda program: torch.compile(
        program, backend=aot_autograd(fw_compiler=nop)
    ),
    "aot_eager": lambda program: torch.compile(program, backend="aot_eager"),
}

MODES: dict[str, Callable[[], Any]] = {
    "training": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def program(edit: Edit, used: bool) -> Program:
    def run(x: torch.Tensor, y: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
        edit(x, other)
        result = (y * other).sum()
        return (result + x.sum() * 2,) if used else (result,)

    return run


# --------------------------------------------------------------------------------------
# What a caller sees


def values(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if isinstance(tensor, TwoTensor):
        return (values(tensor.a), values(tensor.b))
    return tensor.resolve_conj().clone().tolist()


def attempt(look: Callable[[], Any]) -> Any:
    """What a look at a tensor gives; autograd refuses some for good."""
    try:
        return look()
    except RuntimeError as error:
        return type(error).__name__


def gradients(result: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    if not result.requires_grad:
        return "requires no grad"
    real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
    found = torch.autograd.grad(
        real.sum(), leaves, allow_unused=True, retain_graph=True
    )
    # None and zeros are one: a compiled function is one node for all its inputs.
    return [
        values(torch.zeros_like(x) if gradient is None else gradient)
        for x, gradient in zip(leaves, found)
    ]


def observe(run: Program, made: Input, mode: Callable[[], Any]) -> dict[str, Any]:
    """All that a caller can see of a call, or that it raised."""
    x, y, base = made.x, made.y, made.base
    other = numbers(3, 4, requires_grad=True)
    leaves = [*made.roots, other]
    with_version = not x.is_inference()
    version = x._version if with_version else 0
    try:
        with mode():
            (out,) = run(x, y, other)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    storage = None if base is None else base.untyped_storage().data_ptr()
    seen = {
        "x": values(x),
        "y": values(y),
        "out": values(out),
        "base": values(base),
        "dtype": x.dtype,
        "layout": (x.size(), x.stride(), x.storage_offset()),
        "requires grad": x.requires_grad,
        "is leaf": attempt(lambda: x.is_leaf),
        "has grad_fn": attempt(lambda: x.grad_fn is not None),
        "version moved": with_version and x._version > version,
        "y's version": None if y.is_inference() else y._version > 0,
        "out requires grad": out.requires_grad,
        "out's gradients": attempt(lambda: gradients(out, leaves)),
        "x's gradients": attempt(lambda: gradients(x, leaves)),
    }
    if base is not None:
        seen["shares storage"] = x.untyped_storage().data_ptr() == storage
    return seen


def differences(eager: dict[str, Any], compiled: dict[str, Any]) -> list[str]:
    """The names of what differs; whether it raised, and not with what words."""
    if "raised" in eager or "raised" in compiled:
        same = ("raised" in eager) == ("raised" in compiled)
        return [] if same else ["raised"]
    return [name for name in eager if eager[name] != compiled[name]]


# --------------------------------------------------------------------------------------
# The matrix


@dataclass(frozen=True)
class Case:
    route: str
    mode: str
    input: str
    edit: str
    used: bool

    def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a caller sees of the program in eager, and compiled."""
        torch._dynamo.reset()
        run = program(EDITS[self.edit], self.used)
        make, mode = INPUTS[self.input], MODES[self.mode]
        eager = observe(run, make(), mode)
        return eager, observe(ROUTES[self.route](run), make(), mode)


CORE_INPUTS = (
    "plain",
    "plain gaps",
    "leaf",
    "leaf offset",
    "parameter",
    "nonleaf",
    "nonleaf gaps",
    "nonleaf unbind",
    "nonleaf no_grad view",
    "function identity",
    "function dirty",
    "inference",
    "subclass",
    "subclass nonleaf",
    "duplicated",
    "aliased nonleaf",
)
CORE_EDITS = (
    "mul_",
    "copy_",
    "slice",
    "no_grad mul_",
    "no_grad slice",
    "inference_mode mul_",
    "detach",
    "data",
    "no_grad, mul_",
    "custom operator",
    "custom function",
    "transpose_",
    "no_grad transpose_",
    "transpose_, mul_",
    "mul_, transpose_",
    "no_grad: mul_, transpose_",
)
# Those that a grad mode around the call may change.
MODE_EDITS = ("mul_", "no_grad mul_", "detach", "transpose_, mul_")
BOTH = (True, False)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Route, mode, inputs, edits, used afterwards or not.
MATRIX = [
    ("aot_function", "training", tuple(INPUTS), tuple(EDITS), (False,)),
    ("aot_function", "training", tuple(INPUTS), CORE_EDITS, (True,)),
    ("aot_function", "no_grad", CORE_INPUTS, CORE_EDITS, (True,)),
    ("aot_function", "inference", CORE_INPUTS, CORE_EDITS, (True,)),
    ("aot_module_simplified", "training", CORE_INPUTS, CORE_EDITS, (True,)),
    ("custom backend", "training", CORE_INPUTS, CORE_EDITS, BOTH),
    ("custom backend", "no_grad", CORE_INPUTS, MODE_EDITS, (True,)),
    ("custom backend", "inference", CORE_INPUTS, MODE_EDITS, (True,)),
    ("aot_eager", "training", CORE_INPUTS, CORE_EDITS, (False,)),
]


# --------------------------------------------------------------------------------------
# What remains different from eager


@dataclass(frozen=True)
class Known:
    """A difference that does not come from the epilogue, and where it comes from.

    `applies` is true of a case, given what eager did, exactly if the case differs.
    """

    why: str
    applies: Callable[[Case, dict[str, Any]], bool]


RESTRICTED_VIEWS = (
    "leaf no_grad view",
    "nonleaf unbind",
    "nonleaf split",
    "nonleaf chunk",
    "nonleaf no_grad view",
    "nonleaf inference view",
    "function identity",
    "function view",
)
UNTRACKED_EDITS = (
    "no_grad mul_",
    "no_grad slice",
    "no_grad copy_",
    "inference_mode mul_",
    "detach",
    "custom operator",
)


UNTRACKED_AFTER_LAYOUT = (
    "transpose_, no_grad mul_",
    "no_grad mul_, unsqueeze_",
    "unsqueeze_, detached",
)
SUBCLASSES = ("subclass", "subclass nonleaf", "subclass nested")
LAYOUT_EDITS = (
    "transpose_",
    "t_",
    "squeeze_",
    "unsqueeze_",
    "swapaxes_",
    "as_strided_",
    "resize_",
    "no_grad transpose_",
)


def layout_only(case: Case) -> bool:
    return case.edit in LAYOUT_EDITS


def data_edited(case: Case) -> bool:
    return not layout_only(case) and case.edit not in (
        "set_",
        "data =",
        "requires_grad_",
    )


def accepted(eager: dict[str, Any]) -> bool:
    return "raised" not in eager


def requires_grad(case: Case) -> bool:
    return case.input.startswith(("leaf", "parameter", "nonleaf", "function")) or (
        case.input
        in ("subclass nonleaf", "duplicated", "aliased nonleaf", "zero-size", "0-dim")
    )


def through_dynamo(case: Case) -> bool:
    return case.route in ("custom backend", "aot_eager")


KNOWN_DIFFERENCES = [
    Known(
        "layout edits of subclasses are refused before 2.14 "
        "(run_functionalized_fw_and_collect_metadata)",
        lambda case, eager: (
            TORCH < (2, 14)
            and case.input in SUBCLASSES
            and not through_dynamo(case)
            and accepted(eager)
            and case.edit != "squeeze_"
            and (
                layout_only(case)
                or any(
                    name in case.edit
                    for name in ("transpose_", "unsqueeze_", "as_strided_")
                )
            )
        ),
    ),
    Known(
        "functionalization sees `.data` as detach(), which bumps the version counter",
        lambda case, eager: (
            case.edit == "data"
            and accepted(eager)
            and not eager["version moved"]
            and case.input != "inference"
        ),
    ),
    Known(
        "a traced input's history is not invalidated by an untracked edit, as that of "
        "a view is which autograd restricts (FunctionalTensorWrapper has no such view)",
        lambda case, eager: (
            case.input in RESTRICTED_VIEWS
            and case.edit in UNTRACKED_EDITS
            and case.used
            and not through_dynamo(case)
            and not accepted(eager)
        ),
    ),
    Known(
        "an edit that leaves the layout as it was is none (has_metadata_mutation)",
        lambda case, eager: (
            (case.edit == "squeeze_" and case.input not in ("inference", "conjugated"))
            or (case.edit, case.input) == ("t_", "0-dim")
        ),
    ),
    Known(
        "type promotion is not checked on FakeTensor for in-place arithmetic on bool",
        lambda case, eager: (
            case.input == "bool"
            and "result type" in str(eager.get("raised"))
            and case.edit not in ("view", "custom operator")
        ),
    ),
    Known(
        "set_() is refused (_check_if_mutation_can_be_in_graph)",
        lambda case, eager: case.edit == "set_" and accepted(eager),
    ),
    Known(
        "assigning to .data is not seen as an edit by functionalization",
        lambda case, eager: (
            case.edit == "data ="
            and accepted(eager)
            and case.input not in (*SUBCLASSES, "zero-size")
        ),
    ),
    Known(
        "requires_grad_() is not recorded in the metadata",
        lambda case, eager: (
            case.edit == "requires_grad_"
            and accepted(eager)
            and not requires_grad(case)
        ),
    ),
    Known(
        "as_strided_scatter takes only contiguous inputs that require grad",
        lambda case, eager: (
            case.edit == "as_strided_, mul_"
            and case.input
            in (
                ("nonleaf gaps", "nonleaf expanded")
                if TORCH < (2, 15)
                else (
                    "nonleaf transposed",
                    "nonleaf channels-last",
                    "nonleaf gaps",
                    "nonleaf expanded",
                )
            )
        ),
    ),
    Known(
        "refused: an expanded input that is edited as a whole cannot be functionalized",
        lambda case, eager: (
            "expanded" in case.input
            and accepted(eager)
            and case.edit
            in ("fill_", "zero_", "index_put_", "masked_fill_", "as_strided_, mul_")
        ),
    ),
    Known(
        "the joint graph of a layout edit under no_grad has gradients of another shape "
        "than the input (create_joint)",
        lambda case, eager: (
            not through_dynamo(case)
            and case.mode == "training"
            and requires_grad(case)
            and accepted(eager)
            and (
                (
                    case.edit in ("no_grad: mul_, transpose_", "transpose_, detach")
                    and (case.input != "aliased nonleaf" or case.used)
                )
                or (case.edit == "no_grad transpose_" and case.used)
            )
        ),
    ),
    Known(
        "out keeps the node that accumulates the leaf's gradient, and with it the "
        "shape that the leaf had before the call",
        lambda case, eager: (
            case.route == "aot_function"
            and (case.mode, case.input, case.edit)
            == ("training", "leaf", "no_grad transpose_")
            and not case.used
        ),
    ),
    Known(
        "the gradient of a mutated subclass input is traced as a plain tensor "
        "(Note: AOTAutograd Tangent Subclassness for mutated inputs)",
        lambda case, eager: (
            case.mode == "training"
            and accepted(eager)
            and (
                (case.input in SUBCLASSES and case.edit == "copy_")
                or (
                    case.input == "subclass nonleaf"
                    and data_edited(case)
                    and not (
                        through_dynamo(case)
                        and case.edit
                        in ("custom function", "no_grad: mul_, transpose_")
                    )
                    and (
                        case.edit not in (*UNTRACKED_EDITS, *UNTRACKED_AFTER_LAYOUT)
                        or (
                            not case.used
                            and (case.route != "aot_eager" or case.edit == "detach")
                        )
                    )
                )
            )
        ),
    ),
    Known(
        "edits of a subclass in inference mode set the version counters of its parts",
        lambda case, eager: (
            case.mode == "inference"
            and (
                (
                    case.input == "subclass"
                    and case.edit in ("slice", "no_grad slice", "detach")
                )
                or (
                    case.input == "subclass nonleaf"
                    and accepted(eager)
                    and data_edited(case)
                    and case.edit
                    not in ("slice", "no_grad slice", "detach", "custom function")
                )
            )
        ),
    ),
    Known(
        "a forward pass that edits the layout of an aliased input saves its alias "
        "before the epilogue moves their common version counter",
        lambda case, eager: (
            case.input in ("duplicated", "aliased plain", "aliased nonleaf")
            and case.mode == "training"
            and not through_dynamo(case)
            and layout_only(case)
            and accepted(eager)
            and (case.input != "duplicated" or case.edit == "unsqueeze_")
            and not (
                case.input == "aliased nonleaf"
                and case.edit == "no_grad transpose_"
                and case.used
            )
        ),
    ),
    Known(
        "the joint graph of a synthetic base whose alias was restrided "
        "(create_synthetic_base_metadata)",
        lambda case, eager: (
            case.input == "aliased nonleaf"
            and case.mode == "training"
            and not through_dynamo(case)
            and (
                (
                    case.edit
                    in (
                        "transpose_, mul_",
                        "transpose_, slice",
                        "transpose_, no_grad mul_",
                    )
                    and case.used
                )
                or case.edit == "as_strided_, mul_"
                or case.edit == "transpose_, slice"
            )
        ),
    ),
    Known(
        "a synthetic base that is edited under no_grad "
        "(create_synthetic_base_metadata does not give what tracing it gives)",
        lambda case, eager: (
            case.input == "aliased nonleaf"
            and through_dynamo(case)
            and accepted(eager)
            and (
                case.edit
                in (
                    "no_grad mul_",
                    "no_grad slice",
                    "inference_mode mul_",
                    "custom operator",
                )
                if case.mode == "training"
                else case.edit
                in (
                    "mul_",
                    "slice",
                    "no_grad slice",
                    "detach",
                    "no_grad, mul_",
                    "copy_",
                    "no_grad mul_",
                    "inference_mode mul_",
                    "custom operator",
                    "data",
                )
            )
        ),
    ),
    Known(
        "dynamo looks at the grad_fn of a view which autograd restricts",
        lambda case, eager: (
            case.input in RESTRICTED_VIEWS
            and through_dynamo(case)
            and accepted(eager)
            and (
                case.edit in ("no_grad transpose_", "no_grad: mul_, transpose_")
                if case.mode == "training"
                else case.edit
                in (
                    "custom function",
                    "no_grad transpose_",
                    "mul_, transpose_",
                    "transpose_",
                    "transpose_, mul_",
                    "no_grad: mul_, transpose_",
                )
            )
        ),
    ),
    Known(
        "an edit that stays in the graph moves the version counter before the graph "
        "takes the view as an argument",
        lambda case, eager: (
            case.route == "aot_eager"
            and case.input == "nonleaf no_grad view"
            and accepted(eager)
            and case.edit
            in (
                "no_grad mul_",
                "no_grad slice",
                "inference_mode mul_",
                "custom operator",
            )
        ),
    ),
    Known(
        "the metadata does not tell a detached edit of an inference tensor from a "
        "plain one, which eager refuses",
        lambda case, eager: (
            case.input == "inference"
            and accepted(eager)
            and case.mode != "inference"
            and case.edit in ("detach", "data", "inference_mode slice")
        ),
    ),
]


def known_difference(case: Case, eager: dict[str, Any]) -> Known | None:
    for known in KNOWN_DIFFERENCES:
        if known.applies(case, eager):
            return known
    return None


def matrix_tests() -> Iterator[tuple[str, Callable[[TestCase], None]]]:
    for route, mode, inputs, edits, used in MATRIX:
        for input in inputs:
            uses = "_".join("used" if use else "unused" for use in used)
            name = f"test_{route}_{mode}_{input}_{uses}"
            cases = [
                Case(route, mode, input, edit, use) for edit in edits for use in used
            ]
            yield (
                re.sub(r"\W+", "_", name),
                functools.partialmethod(check_cases, cases=cases),
            )


def check_cases(test: TestCase, cases: list[Case]) -> None:
    wrong = []
    for case in cases:
        eager, compiled = case.run()
        different = differences(eager, compiled)
        known = known_difference(case, eager)
        if different and known is None:
            seen = {n: (eager.get(n), compiled.get(n)) for n in different}
            wrong.append(f"{case} differs from eager: {seen}")
        if known is not None and not different:
            wrong.append(f"{case} no longer differs from eager: {known.why}")
    if wrong:
        test.fail("\n".join(wrong))


# --------------------------------------------------------------------------------------
# Reuse of a graph

# Inputs of one shape and stride that neither dynamo nor aot_function tells apart.
REUSABLE = (
    ("plain", "plain offset", "plain unbind", "inference"),
    (
        "leaf",
        "parameter",
        "nonleaf",
        "nonleaf offset",
        "nonleaf unbind",
        "nonleaf no_grad view",
        "function identity",
    ),
)
REUSE_EDITS = (
    "mul_",
    "slice",
    "no_grad mul_",
    "detach",
    "no_grad, mul_",
    "custom operator",
    "transpose_",
    "transpose_, mul_",
)


def check_reuse(test: TestCase, route: str, traced: str) -> None:
    """Trace with one input and call with another: eager's result or eager's error."""
    edits, use = (REUSE_EDITS, BOTH)
    if route == "aot_eager":
        edits, use = REUSE_EDITS[:4], (False,)
    wrong = []
    (group,) = (group for group in REUSABLE if traced in group)
    for called in group:
        for edit in edits:
            for used in use:
                torch._dynamo.reset()
                case = Case(route, "training", called, edit, used)
                run = program(EDITS[edit], used)
                compiled_run = ROUTES[route](run)
                observe(compiled_run, INPUTS[traced](), contextlib.nullcontext)
                eager = observe(run, INPUTS[called](), contextlib.nullcontext)
                compiled = observe(
                    compiled_run, INPUTS[called](), contextlib.nullcontext
                )
                different = differences(eager, compiled)
                # An edit that stays in the graph: see KNOWN_DIFFERENCES.
                in_graph = through_dynamo(case) and edit == "no_grad mul_"
                known = known_difference(case, eager) is not None or (
                    in_graph and called in RESTRICTED_VIEWS and different == ["raised"]
                )
                if different and not known:
                    seen = {n: (eager.get(n), compiled.get(n)) for n in different}
                    wrong.append(f"{case}, traced with {traced}: {seen}")
    if wrong:
        test.fail("\n".join(wrong))


def reuse_tests() -> Iterator[tuple[str, Callable[[TestCase], None]]]:
    for route in ("aot_function", "aot_eager"):
        for traced in (name for group in REUSABLE for name in group):
            name = re.sub(r"\W+", "_", f"test_reuse_{route}_traced_with_{traced}")
            yield (
                name,
                functools.partialmethod(check_reuse, route=route, traced=traced),
            )


@skipIfTorchDynamo("compares compiled programs with eager ones")
class TestMutationEpilogueParity(TestCase):
    pass


for name, check in [*matrix_tests(), *reuse_tests()]:
    setattr(TestMutationEpilogueParity, name, check)


if __name__ == "__main__":
    run_tests()
