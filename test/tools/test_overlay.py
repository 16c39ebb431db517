"""The overlay: merging sketches, and changing an installed torch with care."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import overlay
import pytest
from overlay import Installation, Refusal, Torch


HOOK = "torch/_functorch/_aot_autograd/runtime_wrappers.py"
MODULE = "torch/_functorch/_aot_autograd/mutation_epilogue_codegen.py"


# --------------------------------------------------------------------------------------
# Merging a sketch


def merge(upstream: str, sketch: str) -> str:
    merged = overlay.merge(
        textwrap.dedent(upstream).encode(),
        textwrap.dedent(sketch).encode(),
        name="wrappers.py",
        release="2.15.0",
    )
    return merged.decode()


UPSTREAM = '''\
"""Upstream's docstring."""

import os
from collections.abc import Callable

from . import config
from .alpha import a
from .gamma import c  # a comment that stays


LIMIT = 3


# Comment of the class.
@decorated
class Wrapper(Base):
    size: int
    name: str

    def run(
        self,
        first: int,
        *,
        second: int,
    ) -> int:
        # Comment of the old body.
        total = first + second
        return total

    def short(self, *, flag: bool) -> None: ...


def build(x, *, y):
    for item in x:
        if item:
            keep(item)
            log.append(Entry(item, y=y))
        drop(item)
    with lock:
        old = 1
    if y > 0:
        first_branch()
        second_branch()

    def inner(z):
        return z

    return make(x, y)
'''


class TestMerge:
    def test_everything_else_stays_byte_for_byte(self) -> None:
        assert merge(UPSTREAM, '"""A sketch."""\n') == UPSTREAM

    def test_docstring_and_comments_above_definitions_are_not_merged(self) -> None:
        sketch = '''\
            """A sketch."""

            # Why this is here.
            def build(x):
                ...
        '''
        assert merge(UPSTREAM, sketch) == UPSTREAM

    def test_import_that_upstream_has_is_skipped(self) -> None:
        assert merge(UPSTREAM, "from .alpha import a\nimport os\n") == UPSTREAM

    @pytest.mark.parametrize(
        ("statement", "before"),
        [
            ("from .beta import b", "from .gamma import c"),
            ("from .zeta import z", "\n\nLIMIT"),
            ("from collections.abc import Iterator", "\nfrom . import config"),
            ("import abc", "import os"),
            ("import sys", "from collections.abc"),
        ],
    )
    def test_new_import_goes_to_its_sorted_place(
        self, statement: str, before: str
    ) -> None:
        assert f"\n{statement}\n{before}" in "\n" + merge(UPSTREAM, statement + "\n")

    def test_body_without_ellipsis_replaces_the_body_and_keeps_the_head(self) -> None:
        sketch = """\
            class Wrapper:
                ...

                def run(self, first):
                    # New comment.
                    return first
        """
        old = """\
        # Comment of the old body.
        total = first + second
        return total
"""
        new = """\
        # New comment.
        return first
"""
        assert merge(UPSTREAM, sketch) == UPSTREAM.replace(old, new)

    def test_statements_are_merged_at_every_depth(self) -> None:
        sketch = """\
            def build(x):
                ...
                for item in x:
                    ...
                    if item:
                        keep(item, 2)
                        ...
                with lock:
                    ...
                    old = 2
                if y > 0:
                    only_branch()
                ...

                def inner(z):
                    return z + 1

                return None
        """
        expected = (
            UPSTREAM.replace("keep(item)", "keep(item, 2)")
            .replace("old = 1", "old = 2")
            .replace(
                "        first_branch()\n        second_branch()",
                "        only_branch()",
            )
            .replace("return z\n", "return z + 1\n")
            .replace("return make(x, y)", "return None")
        )
        assert merge(UPSTREAM, sketch) == expected

    def test_new_field_goes_below_the_one_above_it(self) -> None:
        sketch = """\
            class Wrapper:
                size: int
                weight: int = 0
                depth: int = 1
                ...
        """
        expected = UPSTREAM.replace(
            "    size: int\n",
            "    size: int\n    weight: int = 0\n    depth: int = 1\n",
        )
        assert merge(UPSTREAM, sketch) == expected

    def test_new_parameter_on_several_lines(self) -> None:
        sketch = """\
            class Wrapper:
                ...
                def run(self, first, *, third: int = 3):
                    ...
        """
        expected = UPSTREAM.replace(
            "        second: int,\n", "        second: int,\n        third: int = 3,\n"
        )
        assert merge(UPSTREAM, sketch) == expected

    def test_new_parameter_on_one_line(self) -> None:
        sketch = "def build(x, *, z: int | None = None):\n    ...\n"
        expected = UPSTREAM.replace(
            "build(x, *, y)", "build(x, *, y, z: int | None = None)"
        )
        assert merge(UPSTREAM, sketch) == expected

    def test_new_arguments_of_a_call(self) -> None:
        sketch = """\
            def build(x):
                ...
                for item in x:
                    if item:
                        ...
                        log.append(Entry(..., z=1))
                    ...
                ...
                return make(..., z=2)
        """
        expected = UPSTREAM.replace("Entry(item, y=y)", "Entry(item, y=y, z=1)")
        expected = expected.replace("make(x, y)", "make(x, y, z=2)")
        assert merge(UPSTREAM, sketch) == expected

    def test_new_arguments_of_a_call_on_several_lines(self) -> None:
        upstream = "x = f(\n    1,\n    y=2,\n)\n"
        expected = "x = f(\n    1,\n    y=2,\n    z=3,\n)\n"
        assert merge(upstream, "x = f(..., z=3)\n") == expected

    def test_upstreams_line_ends_are_kept(self) -> None:
        upstream = UPSTREAM.replace("\n", "\r\n")
        sketch = b"from .beta import b\n\n\ndef build(x):\n    pass\n"
        merged = overlay.merge(
            upstream.encode(), sketch, name="wrappers.py", release="2.15.0"
        )
        assert merged.count(b"\n") == merged.count(b"\r\n")
        assert b"from .beta import b\r\n" in merged

    def test_non_ascii_text_does_not_shift_positions(self) -> None:
        upstream = 'x = f("ä", a="ö")  # ü\n'
        assert merge(upstream, "x = f(..., b=1)\n") == 'x = f("ä", a="ö", b=1)  # ü\n'

    @pytest.mark.parametrize(
        ("sketch", "line", "where", "reason"),
        [
            ("def missing():\n    ...", 1, "the module", "no statement like"),
            ("class build:\n    ...", 1, "the module", "no statement like"),
            ("def build(x):\n    ...\n    gone()", 3, "`build`", "no statement like"),
            ("def build(x):\n    ...\n    if y > 1:\n        f()", 3, "`build`", "no"),
            (
                "def build(x):\n    ...\n    return 1\n    with lock:\n        f()",
                4,
                "`build`",
                "another order",
            ),
            ("def build(x):\n    ...\n    raise E", 3, "`build`", "cannot be matched"),
            ("@d\ndef build(x):\n    ...", 2, "`build`", "keeps upstream's decorators"),
            (
                "class Wrapper(B):\n    ...",
                1,
                "`Wrapper`",
                "keeps upstream's base classes",
            ),
            (
                "class Wrapper:\n    ...\n    def short(self):\n        pass",
                4,
                "`Wrapper.short`",
                "on one line",
            ),
            (
                "def build(x):\n    ...\n    if y > 0:\n        ...\n    else:\n        f()",
                3,
                "`build`",
                "`else` cannot be merged",
            ),
            ("from .alpha import a, b", 1, "the module", "a part of this import"),
            ("from ..up import u", 1, "the module", "no import of this kind"),
            ("def build(x, z):\n    ...", 1, "`build`", "must be keyword-only"),
            ("def build(x, *, z):\n    ...", 1, "`build`", "have a default"),
            ("def build(x):\n    ...\n    return make(..., *z)", 3, "`build`", "only"),
            (
                "def build(x):\n    ...\n    return other(..., z=1)",
                3,
                "`build`",
                "no `",
            ),
            (
                "def build(x):\n    for item in x:\n        if item:\n            ...\n"
                "            log.append(Entry(..., y=2))\n        ...\n    ...",
                5,
                "`build`",
                "passes `y` already",
            ),
            ("class Wrapper:\n  ...\n  name: bytes", 3, "`Wrapper`", "indents it"),
        ],
    )
    def test_refusals_say_where_and_what_to_do(
        self, sketch: str, line: int, where: str, reason: str
    ) -> None:
        with pytest.raises(Refusal) as refusal:
            merge(UPSTREAM, sketch + "\n")
        message = str(refusal.value)
        assert message.startswith(f"wrappers.py, line {line}, in {where}: ")
        assert reason in message
        assert "torch 2.15.0" in message
        assert "Nothing was written" in message
        assert "use a tested release" in message

    def test_two_matches_are_refused(self) -> None:
        with pytest.raises(Refusal, match="2 statements like `x = 3`"):
            merge("x = 1\nx = 2\n", "x = 3\n")

    def test_head_without_keyword_parameters_takes_no_new_one(self) -> None:
        with pytest.raises(Refusal, match="no place for `b`"):
            merge("def f(a):\n    pass\n", "def f(*, b=1):\n    ...\n")

    def test_two_statements_on_a_line_are_refused(self) -> None:
        for upstream, sketch in (("x = 1; y = 2", "x = 3"), ("x = 1", "x = 3; pass")):
            with pytest.raises(Refusal, match=r"two statements on a line|be matched"):
                merge(upstream + "\n", sketch + "\n")

    def test_a_sketch_that_is_not_python_is_refused(self) -> None:
        with pytest.raises(Refusal, match=r"wrappers\.py is not valid Python"):
            merge(UPSTREAM, "def (\n")


# --------------------------------------------------------------------------------------
# An installed torch


@pytest.fixture(scope="session")
def upstream() -> Installation:
    return Installation(overlay.find_torch(None, None))


@pytest.fixture(scope="session")
def cache(upstream: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Upstream's own files of the installed torch, as far as the overlay needs them."""
    root = tmp_path_factory.mktemp("cache")
    package = "torch/_functorch/_aot_autograd"
    names = [
        f"{package}/{file.name}" for file in (upstream.root / package).glob("*.py")
    ]
    for name in ["torch/__init__.py", "torch/version.py", *names]:
        data = upstream.original(name)
        if data is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return root


@pytest.fixture
def site(cache: Path, tmp_path: Path) -> Path:
    """A site-packages folder whose files are hard links into the cache."""
    shutil.copytree(cache, tmp_path / "site", copy_function=os.link)
    return tmp_path / "site"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(overlay.REPOSITORY / "torch", tmp_path / "repository" / "torch")
    return tmp_path / "repository"


def installation(site: Path, repository: Path = overlay.REPOSITORY) -> Installation:
    return Installation(overlay.find_torch(None, site), repository)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()
    }


def run(site: Path, command: str) -> int:
    return overlay.main([command, "--torch-root", str(site)])


def replace_torch(site: Path, cache: Path, version: str | None = None) -> None:
    """What pip does: put new files over the old ones, and leave those of others."""
    for name, data in tree(cache).items():
        (site / name).unlink()
        (site / name).write_bytes(data)
    if version is not None:
        (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")


class TestApplyAndRevert:
    def test_apply_changes_what_the_merge_says(self, site: Path) -> None:
        wanted = installation(site).wanted()
        installation(site).apply()
        for name, data in wanted.items():
            assert (site / name).read_bytes() == data
        assert installation(site).status()[0] == "patched"

    def test_revert_restores_every_byte_and_leaves_nothing(
        self, site: Path, cache: Path
    ) -> None:
        installation(site).apply()
        installation(site).revert()
        assert tree(site) == tree(cache)
        assert not (site / "torch" / overlay.STATE_FOLDER).exists()
        assert installation(site).status()[0] == "stock"

    def test_hard_links_are_never_written_through(
        self, site: Path, cache: Path
    ) -> None:
        before = tree(cache)
        installation(site).apply()
        assert tree(cache) == before
        assert (site / HOOK).stat().st_ino != (cache / HOOK).stat().st_ino
        installation(site).revert()
        assert tree(cache) == before

    def test_symbolic_links_are_never_written_through(
        self, cache: Path, tmp_path: Path
    ) -> None:
        site = tmp_path / "site"
        shutil.copytree(cache, site, copy_function=os.symlink)
        before = tree(cache)
        installation(site).apply()
        installation(site).revert()
        assert tree(cache) == before
        assert tree(site) == before

    def test_applying_twice_changes_nothing(self, site: Path) -> None:
        installation(site).apply()
        before = {f: f.stat().st_mtime_ns for f in site.rglob("*.py")}
        assert installation(site).apply() == "already applied"
        assert {f: f.stat().st_mtime_ns for f in site.rglob("*.py")} == before

    def test_reverting_stock_changes_nothing(self, site: Path, cache: Path) -> None:
        assert installation(site).revert() == "nothing to revert"
        assert tree(site) == tree(cache)

    def test_mode_of_files_is_kept(self, site: Path) -> None:
        source = (site / HOOK).read_bytes()
        (site / HOOK).unlink()
        (site / HOOK).write_bytes(source)
        (site / HOOK).chmod(0o640)
        installation(site).apply()
        assert (site / HOOK).stat().st_mode & 0o777 == 0o640
        installation(site).revert()
        assert (site / HOOK).stat().st_mode & 0o777 == 0o640

    def test_stale_bytecode_is_removed(self, site: Path) -> None:
        folder = (site / HOOK).parent / "__pycache__"
        folder.mkdir()
        for name in ("runtime_wrappers.cpython-311.pyc", "codegen.cpython-311.pyc"):
            (folder / name).write_bytes(b"")
        installation(site).apply()
        assert [f.name for f in folder.iterdir()] == ["codegen.cpython-311.pyc"]

    def test_older_overlay_is_moved_forward(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        (repository / MODULE).write_text('"""An older module."""\n')
        (repository / HOOK).with_name("older.py").write_text('"""Gone since."""\n')
        installation(site, repository).apply()
        assert installation(site).status()[0] == "stale"
        installation(site).apply()
        assert installation(site).status()[0] == "patched"
        assert not (site / HOOK).with_name("older.py").exists()
        installation(site).revert()
        assert tree(site) == tree(cache)

    def test_every_interruption_can_be_finished(
        self, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock = tree(cache)
        final = stock | installation(site).wanted()
        for first in ("apply", "revert"):
            for second in ("apply", "revert"):
                step = 0
                while interrupted_at(site, first, step, monkeypatch):
                    for name, data in tree(site).items():
                        if overlay.STATE_FOLDER not in name:
                            assert data in (stock.get(name), final.get(name))
                    assert installation(site).status()[0] != "edited"
                    getattr(installation(site), second)()
                    expected = "patched" if second == "apply" else "stock"
                    assert installation(site).status()[0] == expected
                    step += 1
                assert step >= (4 if first == "apply" else 3)
        installation(site).revert()
        assert tree(site) == stock

    def test_files_are_written_before_their_importers(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moved: list[str] = []
        move = Installation._move

        def recording(self: Installation, place: str, target: Path) -> None:
            moved.append(target.name)
            move(self, place, target)

        monkeypatch.setattr(Installation, "_move", recording)
        installation(site).apply()
        assert moved[0] == moved[-1] == "record.json"
        assert moved.index("mutation_epilogue_codegen.py") < moved.index(
            "runtime_wrappers.py"
        )
        assert moved[-2] == "runtime_wrappers.py"

    def test_full_disk_leaves_stock_as_it_was(
        self, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for allowed in range(4):
            written = iter(range(allowed))

            def full(file: int, written: object = written) -> None:
                if next(written, None) is None:  # type: ignore[call-overload]
                    raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                with pytest.raises(Refusal, match=r"nothing was changed\. Make room"):
                    installation(site).apply()
            assert tree(site) == tree(cache)

    def test_full_disk_does_not_keep_from_reverting(
        self, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installation(site).apply()

        def full(file: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        installation(site).revert()
        assert tree(site) == tree(cache)

    def test_folder_that_cannot_be_written_is_refused(
        self, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(Refusal, match=r"cannot be written; nothing was changed"):
            installation(site).apply()
        assert tree(site) == tree(cache)

    def test_several_at_once_wait_for_each_other(self, site: Path) -> None:
        script = overlay.REPOSITORY / "tools" / "overlay.py"
        command = [sys.executable, script, "apply", "--torch-root", site]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(6)]
        assert [process.wait() for process in started] == [0] * 6
        assert installation(site).status()[0] == "patched"


def interrupted_at(
    site: Path, command: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run a command from its start, and stop it before its `step`-th change."""
    prepare = "revert" if command == "apply" else "apply"
    getattr(installation(site), prepare)()
    changes = 0

    class Killed(BaseException):
        pass

    def counting(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: object, **kwargs: object) -> None:
            nonlocal changes
            if changes == step:
                raise Killed
            changes += 1
            change(*args, **kwargs)

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counting(os.replace))
        patch.setattr(Path, "unlink", counting(Path.unlink))
        patch.setattr(shutil, "rmtree", counting(shutil.rmtree))
        try:
            getattr(installation(site), command)()
        except Killed:
            return True
    return False


class TestStatus:
    def test_exit_codes(
        self, site: Path, repository: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(site, "status") == 3
        assert run(site, "apply") == 0
        assert run(site, "status") == 0
        assert run(site, "revert") == 0
        (repository / MODULE).write_text('"""An older module."""\n')
        installation(site, repository).apply()
        assert run(site, "status") == 4
        (site / HOOK).write_text("edited = True\n")
        assert run(site, "status") == 5
        output = capsys.readouterr().out
        assert f"torch {installation(site).torch.version} at {site}" in output
        for state in ("stock", "patched", "stale", "edited"):
            assert f"\n{state}: " in output

    def test_interrupted(self, site: Path, cache: Path) -> None:
        run(site, "apply")
        shutil.copy(cache / "torch/_functorch/_aot_autograd/schemas.py", site / HOOK)
        (site / HOOK).write_bytes((cache / HOOK).read_bytes())
        assert run(site, "status") == 6
        assert run(site, "apply") == 0
        assert run(site, "status") == 0

    @pytest.mark.parametrize("command", ["apply", "revert"])
    @pytest.mark.parametrize("version", [None, "2.15.9"])
    def test_leftover_after_torch_was_replaced(
        self, site: Path, cache: Path, version: str | None, command: str
    ) -> None:
        run(site, "apply")
        replace_torch(site, cache, version)
        stock = tree(site)
        assert run(site, "status") == 7
        assert run(site, command) == 0
        assert run(site, "status") == (0 if command == "apply" else 3)
        run(site, "revert")
        ours = [name for name in stock if name not in tree(cache)]
        assert tree(site) == {n: d for n, d in stock.items() if n not in ours}

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_edited_file_is_left_alone(
        self, site: Path, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(site, "apply")
        (site / HOOK).write_text("edited = True\n")
        before = tree(site)
        assert run(site, command) == 1
        assert tree(site) == before
        message = capsys.readouterr().err
        assert "somebody else changed" in message
        assert "reinstall torch" in message

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_file_of_ours_without_a_record_is_left_alone(
        self, site: Path, command: str
    ) -> None:
        (site / MODULE).write_text("theirs = True\n")
        before = tree(site)
        assert run(site, "status") == 5
        assert run(site, command) == 1
        assert tree(site) == before

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": {"a": {}}}'])
    def test_damaged_record_is_refused(
        self, site: Path, content: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(site, "apply")
        (site / "torch" / overlay.STATE_FOLDER / "record.json").write_text(content)
        before = tree(site)
        for command in ("apply", "revert", "status"):
            assert run(site, command) == 1
        assert tree(site) == before
        assert "reinstall torch" in capsys.readouterr().err

    def test_damaged_original_is_refused(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(site, "apply")
        kept = site / "torch" / overlay.STATE_FOLDER / "originals" / HOOK
        kept.write_text("damaged\n")
        assert run(site, "revert") == 1
        assert "is damaged: reinstall" in capsys.readouterr().err
        assert (site / HOOK).read_bytes() != b"damaged\n"


class TestDiff:
    def test_git_applies_it(
        self, site: Path, cache: Path, tmp_path: Path, upstream: Installation
    ) -> None:
        checkout = tmp_path / "checkout"
        shutil.copytree(cache, checkout)
        patch = tmp_path / "overlay.patch"
        patch.write_text(upstream.diff(), "utf-8")
        for command in (["init", "-q"], ["apply", "--check", patch], ["apply", patch]):
            subprocess.run(["git", *command], cwd=checkout, check=True)
        shutil.rmtree(checkout / ".git")
        wanted = tree(cache) | installation(site).wanted()
        assert tree(checkout) == wanted

    def test_is_the_same_before_and_after_apply(self, site: Path) -> None:
        before = installation(site).diff()
        installation(site).apply()
        assert installation(site).diff() == before

    def test_lines_that_the_sketches_add_and_remove(
        self, upstream: Installation
    ) -> None:
        added: list[str] = []
        removed: list[str] = []
        for name, wanted in sorted(upstream.wanted().items()):
            original = upstream.original(name)
            if original is not None:
                old, new = original.decode().splitlines(), wanted.decode().splitlines()
                lines = list(overlay.difflib.unified_diff(old, new, n=0))[2:]
                added += [f"# {name}"] + [x[1:] for x in lines if x.startswith("+")]
                removed += [x[1:] for x in lines if x.startswith("-")]
        assert added == ADDED_BY_THE_SKETCHES.splitlines()
        assert len(removed) == 149
        digest = hashlib.sha256("\n".join(removed).encode()).hexdigest()[:16]
        assert digest == REMOVED_BY_THE_SKETCHES[upstream.torch.release]


# All removed lines are the generator and its twin that one module now replaces.
REMOVED_BY_THE_SKETCHES = {
    "2.13.0": "61b488b95ac394be",
    "2.14.1": "e90f75be4a6d7fb5",
    "2.15.0": "e90f75be4a6d7fb5",
}
ADDED_BY_THE_SKETCHES = """\
# torch/_functorch/_aot_autograd/collect_metadata_analysis.py
)
from .input_edit_analysis import (
    data_tracked_by_autograd,
    edited_in_inference_mode,
    in_place_views,
    overlaps_itself,
    tracked_by_autograd,
                    tracked_by_autograd=tracked_by_autograd(f_arg),
                    data_tracked_by_autograd=data_tracked_by_autograd(f_arg),
                    in_place_views=in_place_views(f_arg),
                    overlaps_itself=overlaps_itself(arg),
                    edited_in_inference_mode=edited_in_inference_mode(f_arg),
# torch/_functorch/_aot_autograd/input_output_analysis.py
from .input_edit_analysis import (
    merged_in_place_views,
    merged_inference_mode,
    merged_overlap,
    merged_tracking,
)
            tracked_by_autograd=merged_tracking(m.input_info, outer_indices),
            data_tracked_by_autograd=merged_tracking(m.input_info, outer_indices),
            in_place_views=merged_in_place_views(m.input_info, outer_indices),
            overlaps_itself=merged_overlap(m.input_info, outer_indices),
            edited_in_inference_mode=merged_inference_mode(m.input_info, outer_indices),
# torch/_functorch/_aot_autograd/runtime_wrappers.py
from .mutation_epilogue_codegen import codegen_mutation_epilogue
            input_sources=aot_config.aot_autograd_arg_pos_to_source,
        self._apply_input_mutations = codegen_mutation_epilogue(  # type: ignore[method-assign]
            self.runtime_metadata, trace_joint=self.trace_joint
        )
        self._apply_input_mutations(orig_inputs, updated_inputs)
    input_sources: Sequence[Any] | None = None,
        codegen_apply_mutations = codegen_mutation_epilogue(
            runtime_metadata, trace_joint=trace_joint, input_sources=input_sources
        )
        runtime_epilogue._apply_input_mutations = codegen_apply_mutations  # type: ignore[method-assign]
# torch/_functorch/_aot_autograd/schemas.py
    tracked_by_autograd: bool | None = field(default=None, compare=False)
    data_tracked_by_autograd: bool | None = field(default=None, compare=False)
    in_place_views: tuple[Any, ...] | None = field(default=None, compare=False)
    overlaps_itself: bool | None = field(default=None, compare=False)
    edited_in_inference_mode: bool | None = field(default=None, compare=False)
"""


class TestCommandLine:
    def test_help_has_the_exit_codes(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            overlay.main(["--help"])
        output = capsys.readouterr().out
        for state, code in overlay.STATUS_EXIT_CODE.items():
            assert f"\n  {code}  " in output
            assert state == "patched" or f"status: {state}" in output

    def test_folder_without_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(tmp_path, "apply") == 1
        assert "name the folder that contains torch/" in capsys.readouterr().err

    def test_interpreter_without_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"]
        subprocess.run(command, check=True)
        python = tmp_path / "bare" / "bin" / "python"
        assert overlay.main(["apply", "--python", str(python)]) == 1
        assert "no torch in" in capsys.readouterr().err

    def test_interpreter_that_does_not_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert overlay.main(["apply", "--python", str(tmp_path / "none")]) == 1
        assert "does not run" in capsys.readouterr().err

    def test_interpreter_that_is_named(
        self, upstream: Installation, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert overlay.main(["status", "--python", sys.executable]) == 0
        assert str(upstream.torch.folder) in capsys.readouterr().out

    @pytest.mark.parametrize("version", ["2.12.0", "2.16.0", "1.0", "unknown"])
    def test_unsupported_release(
        self, site: Path, version: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (site / "torch/version.py").unlink()
        (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        before = tree(site)
        assert run(site, "apply") == 1
        assert "use one of 2.13.0, 2.14.1, 2.15.0" in capsys.readouterr().err
        assert tree(site) == before

    def test_untested_patch_release_is_warned_about(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (site / "torch/version.py").unlink()
        (site / "torch/version.py").write_text("__version__ = '2.15.3+cpu'\n")
        assert run(site, "apply") == 0
        assert "torch 2.15.3+cpu is untested" in capsys.readouterr().err

    def test_missing_anchor_writes_nothing(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = (site / HOOK).read_text().replace("def post_compile(", "def renamed(")
        (site / HOOK).unlink()
        (site / HOOK).write_text(source)
        before = tree(site)
        assert run(site, "apply") == 1
        message = capsys.readouterr().err
        assert "runtime_wrappers.py, line " in message
        assert "`RuntimeWrapper`: upstream has no statement" in message
        assert tree(site) == before

    def test_checkout_without_a_built_version_file(self, site: Path) -> None:
        (site / "torch/version.py").unlink()
        (site / "version.txt").write_text("2.15.0a0\n")
        assert overlay.find_torch(None, site) == Torch(site / "torch", "2.15.0a0")
        assert run(site, "apply") == 0
