# Owner(s): ["module: functorch"]

"""
Every operator of PyTorch that has an in-place variant, applied to an input of a
compiled function, against the same in eager: on a plain tensor, on a leaf under
no_grad, on a non-leaf, and on a view with an offset and gaps.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from functorch.compile import nop
from torch._functorch.aot_autograd import aot_function
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    skipIfTorchDynamo,
    TestCase,
)
from torch.testing._internal.opinfo.core import OpInfo, SampleInput


ROUTES: dict[str, Callable[..., Any]] = {
    "aot_function": lambda program: aot_function(program, nop),
    "aot_eager": lambda program: torch.compile(program, backend="aot_eager"),
}

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

OPERATORS = [
    op
    for op in op_db
    if op.get_inplace() is not None and op.supports_dtype(torch.float32, "cpu")
]


def plain(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = sample.detach().clone()
    return base, base


def leaf(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = sample.detach().clone().requires_grad_()
    return base, base


def nonleaf(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    root = sample.detach().clone().requires_grad_()
    return root * 1, root


def gaps(sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.zeros(sample.numel() * 2 + 3)
    stride = [2 * s for s in sample.contiguous().stride()]
    view = base.as_strided(sample.shape, stride, 3 if sample.numel() else 0)
    view.copy_(sample.detach())
    return view, base


INPUTS = {"plain": plain, "leaf under no_grad": leaf, "nonleaf": nonleaf, "gaps": gaps}


def first_sample(op: OpInfo) -> SampleInput | None:
    samples = op.sample_inputs("cpu", torch.float32)
    strided = (s for s in samples if s.input.layout == torch.strided)
    return next((s for s in strided if not s.broadcasts_input), None)


def observe(
    op: OpInfo, sample: SampleInput, kind: str, route: Callable[..., Any]
) -> Any:
    """What a caller sees of the input after the call, or that it raised."""
    inplace = op.get_inplace()
    context = torch.no_grad if kind == "leaf under no_grad" else contextlib.nullcontext

    def program(x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with context():
            inplace(x, *args, **kwargs)

    x, base = INPUTS[kind](sample.input)
    version = x._version
    torch.manual_seed(0)
    try:
        route(program)(x, *sample.args, **sample.kwargs)
    except Exception:
        return "raised"
    gradient = None
    if kind == "nonleaf" and x.requires_grad:
        weight = torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape)
        try:
            (gradient,) = torch.autograd.grad(
                (x * weight).sum(), base, allow_unused=True
            )
        except RuntimeError:
            return "raised"  # compiled, it raises in the call
        gradient = torch.zeros_like(base) if gradient is None else gradient
    layout = (x.size(), x.stride(), x.storage_offset(), x.requires_grad, x.is_leaf)
    return (x.detach(), base.detach(), gradient, layout, x._version > version)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(
            one, other, rtol=1e-4, atol=1e-5, equal_nan=True
        )
    return bool(one == other)


# Operator, and the reason, which lies before the epilogue; the inputs and routes.
ALL = tuple(INPUTS)
KNOWN_DIFFERENCES: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("polygamma", "its in-place form has no functional one", ALL, tuple(ROUTES)),
    ("normal", "fills in another order where strides differ", ("gaps",), tuple(ROUTES)),
    ("nn.functional.rrelu", "draws its noise in another order", ALL, ("aot_function",)),
    (
        "as_strided",
        "to the layout there is: no edit (has_metadata_mutation)",
        ("plain", "leaf under no_grad", "nonleaf"),
        ("aot_function",),
    ),
    (
        "squeeze.multiple",
        "of nothing: no edit (has_metadata_mutation)",
        ALL,
        ("aot_function",),
    ),
    (
        "resize_as_",
        "to the size there is: no edit (has_metadata_mutation)",
        ("plain", "gaps"),
        ("aot_function",),
    ),
    (
        "nn.functional.dropout3d",
        "with probability 0: no edit (has_data_mutation)",
        ALL,
        ("aot_function",),
    ),
]


# Before 2.15, a non-leaf that is edited in the graph's input and whose old value the
# derivative needs is saved as it is, so that backward finds it modified and raises.
SAVED_INPUT = """
abs acos asin atan atan2 cos cosh i0 log1p log log10 log2 nn.functional.silu
nn.functional.threshold mvlgamma pow sin sinc sinh square hypot digamma erf erfc erfinv
lgamma logit
"""


def known_difference(op: OpInfo, kind: str, route: str) -> str | None:
    saves_input = TORCH < (2, 15) and (route, kind) == ("aot_eager", "nonleaf")
    if saves_input and op.name in SAVED_INPUT.split():
        return "its old value is saved for backward as the input itself"
    if op.variant_test_name == "partial_views":
        return None
    name = f"{op.name}.{op.variant_test_name}" if op.name == "squeeze" else op.name
    for known, why, kinds, routes in KNOWN_DIFFERENCES:
        if name == known and kind in kinds and route in routes:
            return why
    return None


def different(op: OpInfo, kind: str, route: str) -> bool:
    sample = first_sample(op)
    if sample is None:
        return False
    torch._dynamo.reset()
    eager = observe(op, sample, kind, lambda program: program)
    return not equal(eager, observe(op, sample, kind, ROUTES[route]))


@skipIfTorchDynamo("compares compiled programs with eager ones")
class TestMutationEpilogueOperators(TestCase):
    @parametrize(
        "route,kind",
        [("aot_function", kind) for kind in INPUTS]
        + [("aot_eager", "nonleaf")],  # the edits of the others stay in the graph
    )
    def test_operators(self, route: str, kind: str) -> None:
        wrong = []
        for op in OPERATORS:
            why = known_difference(op, kind, route)
            if different(op, kind, route) != (why is not None):
                wrong.append(f"{op.formatted_name}: {why or 'differs from eager'}")
        if wrong:
            self.fail("\n".join(wrong))

    def test_all_operators_are_there(self) -> None:
        self.assertGreater(len(OPERATORS), 150)
        self.assertGreater(sum(first_sample(op) is not None for op in OPERATORS), 150)


instantiate_parametrized_tests(TestMutationEpilogueOperators)


def count() -> None:
    """Print how many calls differ from eager on this torch, patched or not."""
    for route in ROUTES:
        wrong = sum(different(op, kind, route) for op in OPERATORS for kind in INPUTS)
        print(f"{route}: {wrong} of {len(OPERATORS) * len(INPUTS)} calls differ")


if __name__ == "__main__":
    if sys.argv[1:] == ["--count"]:
        count()
    else:
        run_tests()
