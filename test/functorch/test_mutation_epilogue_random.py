# Owner(s): ["module: functorch"]

"""
Random programs of one to six edits of one to four inputs, compiled, against eager.

MUTATION_EPILOGUE_EXAMPLES=N tries N new programs instead of a few that are always the
same ones.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from functorch.compile import nop
from hypothesis import given, HealthCheck, settings, strategies as st
from torch._functorch.aot_autograd import aot_function
from torch.testing._internal.common_utils import run_tests, skipIfTorchDynamo, TestCase


EXAMPLES = os.environ.get("MUTATION_EPILOGUE_EXAMPLES")

EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(1),
    "fill_": lambda x: x.fill_(3),
    "first": lambda x: x[:1].fill_(3),
    "columns": lambda x: x[..., 1:].mul_(3),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "detach": lambda x: x.detach().mul_(2),
    "transpose_": lambda x: x.transpose_(-1, -2),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(0),
}
LAYOUT_EDITS = ("transpose_", "unsqueeze_", "squeeze_")

# The tensor that is passed, the one that it is a part of, and the leaf above it.
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 8


def part(
    view: Callable[[torch.Tensor], torch.Tensor], *shape: int, grad: bool
) -> Callable[[], Made]:
    def make() -> Made:
        root = numbers(*shape).requires_grad_(grad)
        base = root * 1
        return view(base), base, root

    return make


INPUTS: dict[str, Callable[[], Made]] = {
    f"{name}{' that requires grad' if grad else ''}": part(view, *shape, grad=grad)
    for grad in (False, True)
    for name, view, shape in (
        ("whole", lambda x: x, (3, 4)),
        ("offset", lambda x: x[3:], (6, 4)),
        ("gaps", lambda x: x[1:, 1::2], (4, 8)),
        ("transposed", lambda x: x.t(), (4, 3)),
        ("unbound", lambda x: x.unbind(0)[1], (2, 3, 4)),
    )
}


def observe(run: Callable[..., Any], kinds: list[str]) -> Any:
    made = [INPUTS[kind]() for kind in kinds]
    versions = [x._version for x, _, _ in made]
    try:
        run(*(x for x, _, _ in made))
    except Exception:
        return "raised"
    seen = []
    for (x, base, root), version in zip(made, versions):
        gradient = None
        if x.requires_grad:
            try:
                (gradient,) = torch.autograd.grad(
                    (x * 2).sum(), root, allow_unused=True, retain_graph=True
                )
            except RuntimeError:  # the history of a view that cannot be had any more
                gradient = torch.full_like(root, torch.nan)
            if gradient is None:
                gradient = torch.zeros_like(root)
        layout = (x.size(), x.stride(), x.storage_offset(), x.requires_grad)
        seen.append((x.detach(), base.detach(), gradient, layout, x._version > version))
    return seen


@skipIfTorchDynamo("compares compiled programs with eager ones")
class TestMutationEpilogueRandomPrograms(TestCase):
    @settings(
        max_examples=int(EXAMPLES or 80),
        deadline=None,
        derandomize=EXAMPLES is None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        kinds=st.lists(st.sampled_from(sorted(INPUTS)), min_size=1, max_size=4),
        edits=st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from(sorted(EDITS)), st.booleans()),
            min_size=1,
            max_size=6,
        ),
    )
    def test_random_programs(
        self, kinds: list[str], edits: list[tuple[int, str, bool]]
    ) -> None:
        def program(*inputs: torch.Tensor) -> None:
            for index, name, tracked in edits:
                # A layout edit under no_grad fails in the joint trace.
                with torch.set_grad_enabled(tracked or name in LAYOUT_EDITS):
                    EDITS[name](inputs[index % len(inputs)])

        eager = observe(program, kinds)
        compiled = observe(aot_function(program, nop), kinds)
        # A layout edit that changes nothing, or is undone, is no edit when compiled.
        if eager == "raised" and any(name in LAYOUT_EDITS for _, name, _ in edits):
            return
        if eager != "raised" and compiled != "raised":
            edited = {
                i % len(kinds) for i, name, _ in edits if name not in LAYOUT_EDITS
            }
            for index in set(range(len(kinds))) - edited:
                eager[index] = eager[index][:-1]
                compiled[index] = compiled[index][:-1]
        self.assertEqual(compiled, eager)


if __name__ == "__main__":
    run_tests()
