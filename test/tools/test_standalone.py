"""Modules that ``aot_autograd.compile_to_python`` writes, with an epilogue of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import overlay
import pytest
import torch
import torch._dynamo
from torch.fx import symbolic_trace


aot_autograd = pytest.importorskip("torch._functorch.aot_autograd")
if not hasattr(aot_autograd, "compile_to_python"):
    pytest.skip("compile_to_python is there from torch 2.14", allow_module_level=True)
if not any(map(shutil.which, ("c++", "g++", "clang++"))):
    pytest.skip("Inductor needs a C++ compiler", allow_module_level=True)


class Program(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (x + 1).sum()
        x.t_()
        return total


CALL = """
import importlib.util, sys
import torch, torch._dynamo
spec = importlib.util.spec_from_file_location("composed", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.arange(6.0).reshape(2, 3)
(total,) = module.call([x])
print(torch.__file__, total.item(), tuple(x.shape), x.stride())
"""


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = torch.arange(6.0).reshape(2, 3)
    with torch.no_grad():
        source, _ = aot_autograd.compile_to_python(symbolic_trace(Program()), [x])
    file = tmp_path_factory.mktemp("composed") / "composed.py"
    file.write_text(source, "utf-8")
    return file


def call(composed: Path, site: Path | None = None) -> str:
    environment = dict(os.environ)
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    return subprocess.run(
        [sys.executable, "-c", CALL, composed],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_composed_module_edits_its_input(composed: Path) -> None:
    assert "# Input 0: its layout changed." in composed.read_text("utf-8")
    assert call(composed).endswith(" 21.0 (3, 2) (1, 3)\n")


def test_composed_module_loads_on_a_stock_torch(composed: Path, tmp_path: Path) -> None:
    installed = overlay.find_torch(None, None).folder
    stock = tmp_path / "torch"
    # Only the Python files that the overlay changes need be files of their own.
    stock.mkdir()
    for entry in installed.iterdir():
        if entry.name not in ("_functorch", "__pycache__", overlay.STATE_FOLDER):
            (stock / entry.name).symlink_to(entry)
    # __init__.py looks for its libraries beside itself, so it cannot be a link.
    for name in ("__init__.py", "version.py"):
        (stock / name).unlink()
        shutil.copy(installed / name, stock / name)
    shutil.copytree(installed / "_functorch", stock / "_functorch")
    shutil.copytree(installed / overlay.STATE_FOLDER, stock / overlay.STATE_FOLDER)
    overlay.Installation(overlay.find_torch(None, tmp_path)).revert()
    module = "_functorch/_aot_autograd/mutation_epilogue_codegen.py"
    assert not (stock / module).exists()
    seen = call(composed, tmp_path)
    assert seen.startswith(str(stock))
    assert seen.endswith(" 21.0 (3, 2) (1, 3)\n")
