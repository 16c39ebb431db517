"""Six programs that edit their inputs in place, compiled, against the same in eager.

Each goes through ``aot_function``, through ``torch.compile`` with a backend made with
``aot_autograd(fw_compiler=...)``, where all edits of data reach the mutation epilogue,
and through ``torch.compile(backend="aot_eager")``, which keeps most edits in its graph.
The generated epilogues are printed. Ends with status 1 if anything differs from eager.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from functorch.compile import nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function


Program = Callable[..., Any]

ROUTES: dict[str, Callable[[Program], Program]] = {
    "aot_function": lambda program: aot_function(program, nop),
    "torch.compile, own backend": lambda program: torch.compile(
        program, backend=aot_autograd(fw_compiler=nop)
    ),
    "torch.compile, aot_eager": lambda program: torch.compile(
        program, backend="aot_eager"
    ),
}


@dataclass
class Case:
    """A program, and a way to make fresh arguments for each of its calls.

    `start` returns what lives as long as the program: the tensors to compare, the
    leaves whose gradients are compared, and the arguments of each call.
    """

    title: str
    program: Program
    start: Callable[[], tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]]


def update_average(averages: list[Tensor], weights: list[Tensor]) -> None:
    with torch.no_grad():
        for average, weight in zip(averages, weights):
            average.lerp_(weight, 0.1)


def start_average() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    weights = list(model.parameters())
    averages = [torch.zeros_like(weight) for weight in weights]
    return averages, [], [(averages, weights)] * 3


def attend(
    keys: Tensor, values: Tensor, position: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    keys.index_copy_(1, position, key)
    values.index_copy_(1, position, key * 0.5)
    visible = torch.arange(keys.shape[1]) <= position
    scores = (query @ keys.transpose(1, 2)).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ values


def start_cache() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    keys, values = torch.zeros(2, 16, 8), torch.zeros(2, 16, 8)
    calls = [
        (keys, values, torch.tensor([step]), torch.randn(2, 1, 8), torch.randn(2, 1, 8))
        for step in range(4)
    ]
    return [keys, values], [], calls


def normalize(
    x: Tensor, mean: Tensor, variance: Tensor, seen: Tensor, weight: Tensor
) -> Tensor:
    seen.add_(1)
    return torch.nn.functional.batch_norm(x, mean, variance, weight, training=True)


def start_statistics() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    norm = torch.nn.BatchNorm1d(8)
    mean, variance, seen = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and variance is not None and seen is not None
    calls = [(torch.randn(16, 8), mean, variance, seen, norm.weight) for _ in range(3)]
    return [mean, variance, seen], [norm.weight], calls


def transpose_and_scale(x: Tensor) -> Tensor:
    x.transpose_(0, 1)
    x.mul_(2)
    return x.sum(0)


def start_transpose() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    storage = torch.randn(6, 8)
    x = storage[2:, 1::2]
    return [x, storage], [], [(x,)]


def step(
    parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
) -> None:
    with torch.no_grad():
        for parameter, gradient, momentum in zip(parameters, gradients, momenta):
            momentum.mul_(0.9).add_(gradient)
            parameter.sub_(momentum, alpha=0.1)


def start_step() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    parameters = list(torch.nn.Linear(8, 4).parameters())
    momenta = [torch.zeros_like(p) for p in parameters]
    calls = [
        (parameters, [torch.randn_like(p) for p in parameters], momenta)
        for _ in range(3)
    ]
    return [*parameters, *momenta], [], calls


def activate(hidden: Tensor, weight: Tensor) -> Tensor:
    torch.nn.functional.leaky_relu_(hidden, 0.1)
    return hidden @ weight


def start_activation() -> tuple[list[Tensor], list[Tensor], list[tuple[Any, ...]]]:
    weight = torch.randn(8, 4, requires_grad=True)
    source = torch.randn(16, 8, requires_grad=True)
    hidden = source * 2
    return [hidden], [source, weight], [(hidden, weight)]


CASES = [
    Case("Exponential moving average of weights", update_average, start_average),
    Case("Key/value cache, written at a position", attend, start_cache),
    Case("BatchNorm's running statistics", normalize, start_statistics),
    Case("Input transposed and scaled in place", transpose_and_scale, start_transpose),
    Case("Optimizer step on leaves", step, start_step),
    Case("Activation in place on a non-leaf", activate, start_activation),
]


@contextlib.contextmanager
def captured_epilogues() -> Iterator[list[str]]:
    """Collect the "mutation_epilogue" artifacts of the structured trace."""
    sources: list[str] = []

    class Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            artifact = getattr(record, "metadata", {}).get("artifact", {})
            if artifact.get("name") == "mutation_epilogue":
                sources.append(getattr(record, "payload", ""))

    trace_log = logging.getLogger("torch.__trace")
    handler, level = Capture(), trace_log.level
    trace_log.setLevel(logging.DEBUG)
    trace_log.addHandler(handler)
    try:
        yield sources
    finally:
        trace_log.removeHandler(handler)
        trace_log.setLevel(level)


def seen(tensor: Tensor) -> tuple[Any, ...]:
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
    return (layout, tensor.dtype, tensor.requires_grad, tensor.detach().clone())


def outcome(case: Case, route: Callable[[Program], Program]) -> list[Any]:
    """All that the caller can see after the calls: states, outputs and gradients."""
    torch.manual_seed(0)
    states, leaves, calls = case.start()
    program = route(case.program)
    outputs = [program(*arguments) for arguments in calls]
    results = [*(o for o in outputs if o is not None), *states]
    total = sum(r.sum() for r in results if r.requires_grad and r.grad_fn)
    gradients = torch.autograd.grad(total, leaves) if leaves else ()
    return [seen(tensor) for tensor in [*results, *gradients]]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        # AOTAutograd decomposes batch_norm, which rounds differently in the last bit.
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def main() -> int:
    try:
        import torch._functorch._aot_autograd.mutation_epilogue_codegen
    except ImportError:
        sys.exit(
            "This torch is not patched: run `python tools/overlay.py apply` first."
        )
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__} at {torch.__path__[0]}, patched")
    good = 0
    for case in CASES:
        print(f"\n{case.title}")
        eager = outcome(case, lambda program: program)
        printed: set[str] = set()
        for name, route in ROUTES.items():
            torch._dynamo.reset()
            with captured_epilogues() as sources:
                same = equal(outcome(case, route), eager)
            good += same
            verdict = "equals eager" if same else "DIFFERS FROM EAGER"
            kept = "" if sources else " (the edits stay in the graph: no epilogue)"
            print(f"  {name}: {verdict}{kept}")
            for source in sources:
                if source not in printed:
                    printed.add(source)
                    print("\n" + textwrap.indent(source, " " * 6) + "\n")
    total = len(CASES) * len(ROUTES)
    print(f"\n{good} of {total} programs equal eager's")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
