# Owner(s): ["module: functorch"]

"""
Real modules and training steps whose buffers, parameters or inputs are edited in place,
compiled for several steps, against the same in eager.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    skipIfTorchDynamo,
    TestCase,
)


BACKENDS: dict[str, Any] = {
    "custom": aot_autograd(fw_compiler=nop),
    "aot_eager": "aot_eager",
}


class Recurrent(torch.nn.Module):
    """A recurrent cell that writes its state into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.RNNCell(4, 4)
        self.register_buffer("state", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, self.state.clone())
        self.state.copy_(state.detach())
        return state


class Decoder(torch.nn.Module):
    """Attention over a cache that grows by one position at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(2, 8, 4))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        self.cache[:, length - 1] = self.project(x).detach()
        visible = self.cache[:, :length]
        weights = (visible @ x.unsqueeze(-1)).softmax(1)
        return (weights * visible).sum(1) + self.project(x)


def batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def spectral() -> torch.nn.Module:
    return torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4))


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm": batch_norm,
    "spectral_norm": spectral,
    "Recurrent": Recurrent,
}


def train(module: torch.nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
    """Train for four steps; return the losses, and the state that remains."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = run(torch.randn(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(t.detach() for t in module.state_dict().values())]


@skipIfTorchDynamo("compares compiled programs with eager ones")
class TestMutationEpilogueModules(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()

    @parametrize("backend", list(BACKENDS))
    @parametrize("name", list(MODULES))
    def test_training(self, name: str, backend: str) -> None:
        torch.manual_seed(0)
        eager = MODULES[name]()
        module = copy.deepcopy(eager)
        compiled = torch.compile(module, backend=BACKENDS[backend])
        self.assertEqual(train(module, compiled), train(eager, eager))

    @parametrize("backend", list(BACKENDS))
    def test_embedding_that_renormalizes_its_weight(self, backend: str) -> None:
        weight = torch.randn(6, 4)
        results = []
        for compile in (False, True):
            module = torch.nn.Embedding.from_pretrained(weight.clone(), max_norm=1.0)
            run = torch.compile(module, backend=BACKENDS[backend])
            indices = torch.tensor([0, 3, 3])
            out = run(indices) if compile else module(indices)
            results.append((out, module.weight.detach().clone()))
        self.assertEqual(results[1], results[0])

    @parametrize("backend", list(BACKENDS))
    def test_averaged_model(self, backend: str) -> None:
        model = torch.nn.Linear(4, 2)
        eager = torch.optim.swa_utils.AveragedModel(model)
        averaged = copy.deepcopy(eager)
        update = torch.compile(averaged.update_parameters, backend=BACKENDS[backend])
        for step in range(3):
            with torch.no_grad():
                model.weight.add_(step)
            eager.update_parameters(model)
            update(model)
        self.assertEqual(averaged.state_dict(), eager.state_dict())

    @parametrize("backend", list(BACKENDS))
    def test_decoder_with_a_growing_cache(self, backend: str) -> None:
        torch.manual_seed(0)
        eager = Decoder()
        module = copy.deepcopy(eager)
        compiled = torch.compile(module, backend=BACKENDS[backend], dynamic=True)
        for length in range(1, 6):
            x = torch.randn(2, 4)
            self.assertEqual(compiled(x, length), eager(x, length))
        self.assertEqual(module.cache, eager.cache)

    @parametrize("backend", list(BACKENDS))
    @parametrize("optimizer", ["SGD", "Adam", "Adagrad", "RMSprop"])
    def test_optimizer_step_as_a_function(self, optimizer: str, backend: str) -> None:
        results = []
        for compile in (False, True):
            torch.manual_seed(0)
            module = torch.nn.Linear(4, 2)
            kind = getattr(torch.optim, optimizer)
            steps = kind(module.parameters(), lr=0.1)
            step = torch.compile(steps.step, backend=BACKENDS[backend])
            for _ in range(3):
                steps.zero_grad()
                module(torch.randn(3, 4)).square().sum().backward()
                (step if compile else steps.step)()
            results.append([p.detach().clone() for p in module.parameters()])
        self.assertEqual(results[1], results[0])

    def test_gradient_accumulation_into_buffers(self) -> None:
        def accumulate(buffers, parameters, x):
            loss = (x @ parameters[0]).sum() + (x * parameters[1]).sum()
            gradients = torch.autograd.grad(loss, parameters)
            for buffer, gradient in zip(buffers, gradients):
                buffer.add_(gradient)

        def run(program):
            torch.manual_seed(0)
            parameters = [torch.randn(4, 2), torch.randn(4)]
            parameters = [p.requires_grad_() for p in parameters]
            buffers = [torch.zeros_like(p) for p in parameters]
            for _ in range(3):
                program(buffers, parameters, torch.randn(3, 4))
            return buffers

        compiled = torch.compile(accumulate, backend=BACKENDS["custom"])
        self.assertEqual(run(compiled), run(accumulate))

    def test_tensor_hooks_still_fire(self) -> None:
        def f(x):
            x.mul_(2)

        for run in (f, aot_function(f, nop)):
            seen = []
            root = torch.ones(3, requires_grad=True)
            root.register_hook(seen.append)
            x = root * 1
            run(x)
            x.register_hook(seen.append)
            x.sum().backward()
            self.assertEqual(seen, [torch.ones(3), torch.full((3,), 2.0)])

    def test_double_backward_of_an_edit_out_of_autograds_sight(self) -> None:
        def f(x):
            x.detach().mul_(2)

        for run in (f, aot_function(f, nop)):
            root = torch.full((3,), 2.0, requires_grad=True)
            x = root**3
            run(x)
            (first,) = torch.autograd.grad(x.sum(), root, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), root)
            self.assertEqual(first.detach(), torch.full((3,), 12.0))
            self.assertEqual(second, torch.full((3,), 12.0))


instantiate_parametrized_tests(TestMutationEpilogueModules)


if __name__ == "__main__":
    run_tests()
