"""Put this patch onto an installed PyTorch, take it off again, or show it as a diff.

The files under ``torch/`` of this repository are the *overlay*. A file that the
installed torch does not have is new and is copied. A file that it has is a *sketch*:
it holds only the definitions that change, ``...`` stands for what upstream has and
keeps, and the merge below works out the changed file for the release at hand.

How a sketch is merged
    * Its docstring, and comments above its definitions, are not merged. An import
      that upstream has is skipped; another one goes to its sorted place.
    * Every ``def`` and ``class`` must exist upstream exactly once, in the same body.
      Upstream's head stays. The sketch names the parameters that it uses; new
      keyword-only parameters with defaults are appended to upstream's.
    * A body without ``...`` replaces upstream's body, and must not hold one further in.
    * In a body with ``...``, every other statement must match exactly one upstream
      statement of the same body, of the same kind and head (an ``if`` with the same
      test, an assignment to the same targets, a call of the same function, a
      ``return`` for a ``return``), in order. It replaces that statement or, if its own
      body has ``...``, is merged into it in the same way.
    * In a statement that calls ``f(..., new=value)``, ``...`` stands for the arguments
      that upstream passes; the new ones are appended to them.
    * In a class, ``name: type = default`` that upstream lacks is a new field. It goes
      below the field that stands directly above it in the sketch.

How the installed files are treated
    * They may be hard links into a package cache, so none is ever written in place:
      each file is written beside its target and moved over it.
    * A record, with the original of every changed file, is written before the first
      change. A file is replaced after the ones it imports: the new module first, the
      hook last; taking off goes the other way round, and an older overlay is taken off
      before this one goes on. torch imports at every moment, and ``apply`` or
      ``revert`` finishes what was interrupted.
    * A file that is neither the original nor what this program wrote is left alone.
"""

from __future__ import annotations

import sys


if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("overlay.py needs Python 3.11 or newer; run it with such a python")

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import graphlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, TypeGuard


REPOSITORY = Path(__file__).resolve().parent.parent
TESTED_RELEASES = tuple(
    sorted(
        file.stem.removeprefix("torch-")
        for file in (REPOSITORY / "requirements").glob("torch-*.txt")
    )
)
SKETCH_MARK = "(a sketch: see tools/overlay.py)"  # in a sketch's docstring
STATE_FOLDER = ".mutation_epilogue_overlay"

EXIT_CODES = """\
exit codes:
  0  done; for status: the torch carries this overlay
  1  refused (nothing was written) or stopped by a fault, for the reason given
  2  wrong usage
  3  status: stock, the overlay is not applied
  4  status: stale, an older overlay is applied (apply moves it forward)
  5  status: edited, somebody else changed an overlaid file
  6  status: interrupted, an apply or revert did not finish (run either again)
  7  status: leftover, torch was reinstalled over the overlay (run apply or revert)
"""
STATUS_EXIT_CODE = {
    "patched": 0,
    "stock": 3,
    "stale": 4,
    "edited": 5,
    "interrupted": 6,
    "leftover": 7,
}


class Refusal(Exception):
    """The request cannot be carried out; the message says why and what to do."""


# --------------------------------------------------------------------------------------
# Merging a sketch into upstream's source


@dataclasses.dataclass(frozen=True)
class _Edit:
    """Replace the bytes [start, end) of the upstream source."""

    start: int
    end: int
    text: bytes


class _Source:
    """Python source with its syntax tree, addressed by lines and by byte offsets."""

    def __init__(self, text: bytes, name: str) -> None:
        self.text = text
        self.name = name
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise Refusal(
                f"{name} is not valid Python ({error}): restore it, then run again"
            ) from error
        self.lines = text.splitlines(keepends=True)
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Byte offset of an ast position (lines from 1, columns in UTF-8 bytes)."""
        return self.line_starts[line - 1] + column

    def text_of(self, first_line: int, last_line: int) -> bytes:
        return b"".join(self.lines[first_line - 1 : last_line])


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _is_ellipsis(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and node.value.value is ...
    )


def _is_elided_call(node: object) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value is ...
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


# The parts of each kind of statement that two of them share if they are the same one.
_HEADS: dict[type[ast.stmt], tuple[str, ...]] = {
    ast.FunctionDef: ("name",),
    ast.AsyncFunctionDef: ("name",),
    ast.ClassDef: ("name",),
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.With: ("items",),
    ast.Assign: ("targets",),
    ast.AnnAssign: ("target",),
    ast.AugAssign: ("target", "op"),
    ast.Return: (),
}


def _head(statement: ast.stmt) -> tuple[str, ...] | None:
    """What identifies a statement in its body; None for a kind that has no head."""
    kind = type(statement)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return (kind.__name__, ast.dump(statement.value.func))
    if kind not in _HEADS:
        return None
    parts = [getattr(statement, name) for name in _HEADS[kind]]
    return (kind.__name__, *map(_dump, parts))


def _dump(part: object) -> str:
    if isinstance(part, list):
        return ", ".join(map(_dump, part))
    return ast.dump(part) if isinstance(part, ast.AST) else repr(part)


class _Merger:
    def __init__(self, upstream: _Source, sketch: _Source, release: str) -> None:
        self.upstream = upstream
        self.sketch = sketch
        self.release = release
        self.edits: list[_Edit] = []

    def refuse(self, node: ast.AST, where: str, reason: str) -> NoReturn:
        line = getattr(node, "lineno", 1)
        raise Refusal(
            f"{self.sketch.name}, line {line}, in {where}: {reason} "
            f"(torch {self.release}). Nothing was written; this release's source "
            "differs from the ones the overlay knows, so use a tested release "
            f"({', '.join(TESTED_RELEASES)}) or adapt the sketch."
        )

    def merged(self) -> bytes:
        body = self.sketch.tree.body
        if body and _is_docstring(body[0]):
            body = body[1:]
        imports = [s for s in body if isinstance(s, ast.Import | ast.ImportFrom)]
        self.merge_imports(imports)
        others = [s for s in body if s not in imports]
        self.merge_statements(self.upstream.tree.body, others, "the module")
        merged = self.edited()
        try:
            ast.parse(merged)
        except (SyntaxError, ValueError) as error:
            reason = f"the merged source is not valid Python ({error})"
            self.refuse(self.sketch.tree, "the module", reason)
        return merged

    def edited(self) -> bytes:
        text = b""
        position = 0
        # Sorting is stable: of two insertions at one place, the first comes first.
        for edit in sorted(self.edits, key=lambda e: e.start):
            text += self.upstream.text[position : edit.start] + edit.text
            position = edit.end
        return text + self.upstream.text[position:]

    # -- imports

    def merge_imports(self, imports: Sequence[ast.Import | ast.ImportFrom]) -> None:
        theirs = [
            s
            for s in self.upstream.tree.body
            if isinstance(s, ast.Import | ast.ImportFrom)
        ]
        known = {entry for s in theirs for entry in _imported(s)}
        for statement in imports:
            missing = set(_imported(statement)) - known
            if not missing:
                continue
            if len(missing) < len(statement.names):
                self.refuse(
                    statement, "the module", "upstream has a part of this import"
                )
            peers = [s for s in theirs if _import_group(s) == _import_group(statement)]
            if not peers:
                self.refuse(
                    statement, "the module", "upstream has no import of this kind"
                )
            later = [s for s in peers if _import_key(s) > _import_key(statement)]
            line = _first_line(later[0]) if later else _last_line(peers[-1]) + 1
            start = self.upstream.offset(line, 0)
            self.edits.append(_Edit(start, start, self.sketch_lines(statement)))

    # -- definitions and statements

    def merge_body(
        self,
        theirs: Sequence[ast.stmt],
        ours: Sequence[ast.stmt],
        where: str,
        *,
        in_class: bool = False,
    ) -> None:
        if any(map(_is_ellipsis, ours)):
            self.merge_statements(theirs, ours, where, in_class=in_class)
        else:
            self.replace_body(theirs, ours, where)

    def replace_body(
        self, theirs: Sequence[ast.stmt], ours: Sequence[ast.stmt], where: str
    ) -> None:
        for source, body in ((self.upstream, theirs), (self.sketch, ours)):
            if source.lines[_first_line(body[0]) - 1][: body[0].col_offset].strip():
                self.refuse(ours[0], where, f"the body in {source.name} is on one line")
        self.check_lines(theirs[0], ours[0], where)
        for statement in ours:
            self.check_complete(statement, where)
        start = self.upstream.offset(_body_start(self.upstream, theirs), 0)
        end = self.upstream.offset(_last_line(theirs[-1]) + 1, 0)
        text = self.sketch.text_of(_body_start(self.sketch, ours), _last_line(ours[-1]))
        self.edits.append(_Edit(start, end, self.with_their_newlines(text)))

    def merge_statements(
        self,
        theirs: Sequence[ast.stmt],
        ours: Sequence[ast.stmt],
        where: str,
        *,
        in_class: bool = False,
    ) -> None:
        position = -1
        for index, statement in enumerate(ours):
            if _is_ellipsis(statement):
                continue
            if _head(statement) is None:
                self.refuse(
                    statement, where, "a statement of this kind cannot be matched"
                )
            matches = [i for i, t in enumerate(theirs) if _head(t) == _head(statement)]
            above = ours[index - 1] if index else None
            if in_class and not matches and _is_new_field(statement, above):
                self.check_lines(theirs[position], statement, where)
                self.check_complete(statement, where)
                after = self.upstream.offset(_last_line(theirs[position]) + 1, 0)
                text = self.sketch_lines(statement)
                self.edits.append(_Edit(after, after, text))
                continue
            if len(matches) != 1:
                count = "no statement" if not matches else f"{len(matches)} statements"
                what = ast.unparse(statement).splitlines()[0]
                self.refuse(statement, where, f"upstream has {count} like `{what}`")
            if matches[0] <= position:
                self.refuse(statement, where, "upstream has it in another order")
            position = matches[0]
            self.merge_statement(theirs[position], statement, where)

    def merge_statement(self, theirs: ast.stmt, ours: ast.stmt, where: str) -> None:
        if isinstance(ours, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert isinstance(theirs, type(ours))
            outer = "`" if where == "the module" else f"{where[:-1]}."
            where = f"{outer}{ours.name}`"
            if ours.decorator_list:
                self.refuse(ours, where, "a sketch keeps upstream's decorators")
            if not isinstance(ours, ast.ClassDef):
                assert not isinstance(theirs, ast.ClassDef)
                self.merge_parameters(theirs, ours, where)
            elif ours.bases or ours.keywords:
                self.refuse(ours, where, "a sketch keeps upstream's base classes")
            in_class = isinstance(ours, ast.ClassDef)
            self.merge_body(theirs.body, ours.body, where, in_class=in_class)
            return
        if any(map(_is_ellipsis, getattr(ours, "body", []))):
            if getattr(ours, "orelse", []):
                self.refuse(ours, where, "an `else` cannot be merged")
            self.merge_body(theirs.body, ours.body, where)  # type: ignore[attr-defined]
            return
        if any(map(_is_elided_call, ast.walk(ours))):
            self.merge_calls(theirs, ours, where, ours)
            return
        self.check_lines(theirs, ours, where)
        self.check_complete(ours, where)
        start = self.upstream.offset(_first_line(theirs), 0)
        end = self.upstream.offset(_last_line(theirs) + 1, 0)
        self.edits.append(_Edit(start, end, self.sketch_lines(ours)))

    def merge_calls(
        self, theirs: object, ours: object, where: str, around: ast.expr | ast.stmt
    ) -> None:
        """Merge each ``f(..., new=value)`` in `ours`, of which all else must be equal.

        `around` is the part of the sketch that a refusal names.
        """
        if isinstance(ours, ast.expr | ast.stmt):
            around = ours
        if _is_elided_call(ours) and isinstance(theirs, ast.Call):
            self.merge_calls(theirs.func, ours.func, where, around)
            self.merge_arguments(theirs, ours, where)
        elif isinstance(ours, ast.AST) and type(theirs) is type(ours):
            for name, part in ast.iter_fields(ours):
                self.merge_calls(getattr(theirs, name, None), part, where, around)
        elif (
            isinstance(ours, list)
            and isinstance(theirs, list)
            and len(theirs) == len(ours)
        ):
            for their_part, our_part in zip(theirs, ours, strict=True):
                self.merge_calls(their_part, our_part, where, around)
        elif _dump(theirs) != _dump(ours):
            what = ast.unparse(around)
            self.refuse(around, where, f"upstream has no `{what}` here")

    def merge_arguments(self, theirs: ast.Call, ours: ast.Call, where: str) -> None:
        known = {k.arg for k in theirs.keywords}
        passed: list[ast.expr | ast.keyword] = [*theirs.args, *theirs.keywords]
        if len(ours.args) > 1 or any(k.arg is None for k in ours.keywords):
            self.refuse(ours, where, "only keyword arguments can be appended")
        # A generator shares its parentheses with the call: nothing fits in behind it.
        if not passed or None in known or isinstance(passed[-1], ast.GeneratorExp):
            what = ast.unparse(theirs)
            self.refuse(ours, where, f"nothing can be appended to upstream's `{what}`")
        for keyword in ours.keywords:
            if keyword.arg in known:
                self.refuse(keyword, where, f"upstream passes `{keyword.arg}` already")
            self.check_complete(keyword.value, where)
        self.append(
            passed[-1],
            [(keyword, keyword) for keyword in ours.keywords],
            one_line=passed[0].lineno == theirs.lineno,
        )

    def append(
        self,
        last: ast.expr | ast.arg | ast.keyword,
        spans: Sequence[tuple[ast.arg | ast.keyword, ast.expr | ast.keyword]],
        *,
        one_line: bool,
    ) -> None:
        """Insert the sketch's text of each (first, last) node after upstream's `last`.

        A trailing comma of upstream's stays where it is, so it ends the new last item.
        """
        indent = self.upstream.lines[last.lineno - 1]
        indent = indent[: len(indent) - len(indent.lstrip())]
        separator = b", " if one_line else b",\n" + indent
        text = b""
        for first, final in spans:
            assert final.end_lineno is not None
            assert final.end_col_offset is not None
            start = self.sketch.offset(first.lineno, first.col_offset)
            end = self.sketch.offset(final.end_lineno, final.end_col_offset)
            text += separator + self.sketch.text[start:end]
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        at = self.upstream.offset(last.end_lineno, last.end_col_offset)
        self.edits.append(_Edit(at, at, self.with_their_newlines(text)))

    def merge_parameters(
        self,
        theirs: ast.FunctionDef | ast.AsyncFunctionDef,
        ours: ast.FunctionDef | ast.AsyncFunctionDef,
        where: str,
    ) -> None:
        known = {a.arg for a in _parameters(theirs.args)}
        new = [a for a in _parameters(ours.args) if a.arg not in known]
        if not new:
            return
        defaults = dict(zip(ours.args.kwonlyargs, ours.args.kw_defaults, strict=True))
        anchors = theirs.args.kwonlyargs
        if not anchors or theirs.args.kwarg:
            self.refuse(ours, where, f"upstream has no place for `{new[0].arg}`")
        spans: list[tuple[ast.arg | ast.keyword, ast.expr | ast.keyword]] = []
        for argument in new:
            default = defaults.get(argument)
            if default is None:
                self.refuse(
                    argument,
                    where,
                    f"the new parameter `{argument.arg}` must be keyword-only "
                    "and have a default",
                )
            spans.append((argument, default))
        self.append(
            theirs.args.kw_defaults[-1] or anchors[-1],
            spans,
            one_line=anchors[-1].lineno == theirs.lineno,
        )

    # -- text

    def check_lines(self, theirs: ast.stmt, ours: ast.stmt, where: str) -> None:
        if theirs.col_offset != ours.col_offset:
            self.refuse(ours, where, "upstream indents it differently")
        for source, statement in ((self.upstream, theirs), (self.sketch, ours)):
            assert statement.end_col_offset is not None
            before = source.lines[_first_line(statement) - 1][: statement.col_offset]
            after = source.lines[_last_line(statement) - 1][statement.end_col_offset :]
            if before.strip() or after.partition(b"#")[0].strip():
                self.refuse(ours, where, f"two statements on a line in {source.name}")

    def check_complete(self, ours: ast.AST, where: str) -> None:
        """What goes in as it is must not hold a ``...`` that stands for something."""
        reason = "this `...` would be copied as it is, since a body around it has none"
        for node in ast.walk(ours):
            if _is_ellipsis(node) or _is_elided_call(node):
                self.refuse(node, where, reason)

    def sketch_lines(self, statement: ast.stmt) -> bytes:
        text = self.sketch.text_of(_first_line(statement), _last_line(statement))
        return self.with_their_newlines(text)

    def with_their_newlines(self, text: bytes) -> bytes:
        text = text.replace(b"\r\n", b"\n")
        return text.replace(b"\n", b"\r\n") if b"\r\n" in self.upstream.text else text


def _imported(statement: ast.Import | ast.ImportFrom) -> list[tuple[object, ...]]:
    module = getattr(statement, "module", None)
    level = getattr(statement, "level", None)
    return [(level, module, a.name, a.asname) for a in statement.names]


def _import_group(statement: ast.Import | ast.ImportFrom) -> tuple[str, int]:
    return (type(statement).__name__, getattr(statement, "level", 0))


def _import_key(statement: ast.Import | ast.ImportFrom) -> str:
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").lower()
    return statement.names[0].name.lower()


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    variadic = [a for a in (arguments.vararg, arguments.kwarg) if a]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *variadic]


def _is_new_field(statement: ast.stmt, above: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.AnnAssign)
        and statement.value is not None
        and isinstance(above, ast.AnnAssign)
    )


def _body_start(source: _Source, body: Sequence[ast.stmt]) -> int:
    """First line of a body, the comments above its first statement included."""
    line = _first_line(body[0])
    while source.lines[line - 2].strip().startswith(b"#"):
        line -= 1
    return line


@functools.cache
def merge(upstream: bytes, sketch: bytes, *, name: str, release: str) -> bytes:
    """Upstream's source with the sketch's changes in, all else byte for byte.

    Raises :class:`Refusal` if a statement of the sketch has no upstream counterpart,
    or more than one.
    """
    if not sketch.endswith(b"\n"):
        sketch += b"\n"
    return _Merger(
        _Source(upstream, f"torch {release}'s {name}"), _Source(sketch, name), release
    ).merged()


@functools.cache
def _is_sketch(name: str, source: bytes) -> bool:
    return SKETCH_MARK in (ast.get_docstring(_Source(source, name).tree) or "")


@functools.cache
def _imported_files(name: str, source: bytes) -> frozenset[str]:
    """The files that the module `name` may import at its top level."""
    files: set[str] = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom):
            level = statement.level
            package = PurePosixPath(name).parents[level - 1] if level else "."
            module = PurePosixPath(package, *(statement.module or "").split("."))
            files.add(f"{module}.py")
            files.update(f"{module}/{alias.name}.py" for alias in statement.names)
    return frozenset(files)


# --------------------------------------------------------------------------------------
# The installed torch


@dataclasses.dataclass(frozen=True)
class Torch:
    """A torch package on disk: its folder, and its version as torch spells it."""

    folder: Path
    version: str

    @property
    def release(self) -> str:
        match = re.match(r"\d+\.\d+\.\d+", self.version)
        return match.group() if match else self.version


_FIND_TORCH = """\
import importlib.util, sys
sys.path = [entry for entry in sys.path if entry]
spec = importlib.util.find_spec("torch")
print(spec.origin if spec and spec.origin else "")
"""


def find_torch(python: Path | None, torch_root: Path | None) -> Torch:
    """The torch of `torch_root`, of the interpreter `python`, or of this one.

    Raises :class:`Refusal` if there is none.
    """
    if torch_root is not None:
        folder = torch_root.absolute() / "torch"
        hint = "name the folder that contains torch/"
        if not (folder / "__init__.py").is_file():
            raise Refusal(f"{torch_root} holds no torch: {hint}")
    else:
        folder = _installed_torch(python)
    for version_file, pattern in (
        (folder / "version.py", r"^__version__ = '([^']+)'"),
        (folder.parent / "version.txt", r"^(\S+)"),
    ):
        if version_file.is_file():
            match = re.search(pattern, version_file.read_text("utf-8"), re.MULTILINE)
            if match:
                return Torch(folder, match.group(1))
    raise Refusal(f"{folder} does not say its version: reinstall torch")


def _installed_torch(python: Path | None) -> Path:
    if python is None:
        spec = importlib.util.find_spec("torch")
        origin = spec.origin if spec else None
    else:
        try:
            found = subprocess.run(
                [python, "-c", _FIND_TORCH], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or error
            raise Refusal(f"{python} does not run: {detail}") from error
        origin = found.stdout.strip()
    if not origin:
        raise Refusal(
            f"no torch in {python or sys.executable}: install one of "
            f"{', '.join(TESTED_RELEASES)} there, or name another interpreter "
            "with --python"
        )
    # Not resolved: each file may be a symbolic link into a package cache.
    return Path(origin).absolute().parent


def check_release(torch: Torch) -> None:
    """Warn about an untested patch release; refuse any other unknown release."""
    if torch.release in TESTED_RELEASES:
        return
    tested = ", ".join(TESTED_RELEASES)
    if _series(torch.release) not in map(_series, TESTED_RELEASES):
        raise Refusal(
            f"torch {torch.version} at {torch.folder} is not supported: "
            f"use one of {tested}"
        )
    print(
        f"warning: torch {torch.version} is untested (tested: {tested}); "
        "every anchor must match for the overlay to apply",
        file=sys.stderr,
    )


def _series(release: str) -> str:
    return ".".join(release.split(".")[:2])


# --------------------------------------------------------------------------------------
# The overlay in an installed torch


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """SHA-256 of one file: as upstream had it, and as overlays wrote it."""

    original: str | None  # None: upstream has no such file
    patched: str | None  # as it is to be; None: not at all
    previous: str | None = None  # as it was when an unfinished apply began

    @property
    def ours(self) -> set[str | None]:
        """What only an overlay can have written."""
        return {self.patched, self.previous} - {self.original, None}


@dataclasses.dataclass(frozen=True)
class Record:
    """What was applied to which torch, in the order in which it was written."""

    torch: str
    complete: bool
    files: dict[str, FileRecord]

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Record:
        fields = json.loads(data)
        files = {n: FileRecord(**f) for n, f in fields.pop("files").items()}
        return cls(files=files, **fields)


def _hash(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _lines(data: bytes) -> list[str]:
    """Lines as git has them: a form feed or a lone carriage return ends none."""
    return io.StringIO(data.decode(), newline="\n").readlines()


class Installation:
    """One torch and the overlay in it.

    Files are named by their path below the folder that contains ``torch/``, with
    forward slashes. Everything but :meth:`apply` and :meth:`revert` only reads.
    """

    def __init__(self, torch: Torch, repository: Path = REPOSITORY) -> None:
        self.torch = torch
        self.repository = repository
        self.root = torch.folder.parent
        self.state = torch.folder / STATE_FOLDER
        self.record_file = self.state / "record.json"

    # -- reading

    def record(self) -> Record | None:
        data = _read(self.record_file)
        if data is None:
            return None
        try:
            return Record.from_json(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(
                f"{self.record_file} is damaged ({error}): {self._start_over()}"
            ) from error

    def hash(self, name: str) -> str | None:
        return _hash(_read(self.root / name))

    def status(self) -> tuple[str, str]:
        """A key of STATUS_EXIT_CODE, and a sentence that explains it."""
        record = self.record()
        if record is None:
            strangers = [
                name
                for name, source in self.overlay().items()
                if not _is_sketch(name, source) and self.hash(name) is not None
            ]
            if strangers:
                return "edited", f"{strangers[0]} is there, but no record of it"
            return "stock", "the overlay is not applied"
        now = {name: self.hash(name) for name in record.files}
        untouched = all(
            now[name] not in file.ours
            for name, file in record.files.items()
            if file.original is not None
        )
        if record.torch != self.torch.version and untouched:
            return "leftover", f"torch {record.torch} was patched and then replaced"
        strangers = [
            name
            for name, file in record.files.items()
            if now[name] != file.original and now[name] not in file.ours
        ]
        if strangers:
            return "edited", f"somebody else changed {', '.join(strangers)}"
        if not record.complete:
            return "interrupted", "an apply or revert did not finish"
        if untouched:
            return "leftover", "torch was patched and then reinstalled"
        if any(now[name] != file.patched for name, file in record.files.items()):
            return "interrupted", "some files are patched and some are not"
        wanted = {name: _hash(data) for name, data in self.wanted().items()}
        if wanted != {name: file.patched for name, file in record.files.items()}:
            return "stale", "an older overlay is applied"
        return "patched", "this overlay is applied"

    def overlay(self) -> dict[str, bytes]:
        files = sorted((self.repository / "torch").rglob("*.py"))
        if not files:
            raise Refusal(f"{self.repository} holds no overlay: use a full checkout")
        return {
            f.relative_to(self.repository).as_posix(): f.read_bytes() for f in files
        }

    def original(self, name: str) -> bytes | None:
        """Upstream's file; None if upstream has none."""
        record = self.record()
        data = _read(self.root / name)
        file = record.files.get(name) if record else None
        if file is None or _hash(data) not in file.ours:
            return data
        if file.original is None:
            return None
        data = _read(self.state / "originals" / name)
        if _hash(data) != file.original:
            raise Refusal(
                f"the original of {name}, kept in {self.state}, is damaged: reinstall "
                "torch, then run again"
            )
        return data

    def wanted(self) -> dict[str, bytes]:
        """Each overlaid file as it should be, those that are imported first."""
        contents: dict[str, bytes] = {}
        for name, source in self.overlay().items():
            upstream = self.original(name)
            if not _is_sketch(name, source):
                if upstream is not None:
                    raise Refusal(
                        f"torch {self.torch.version} has its own {name}: use one of "
                        f"{', '.join(TESTED_RELEASES)}, or remove the file"
                    )
                contents[name] = source
            elif upstream is None:
                raise Refusal(
                    f"torch {self.torch.version} has no {name}: use one of "
                    f"{', '.join(TESTED_RELEASES)}"
                )
            else:
                release = self.torch.version
                contents[name] = merge(upstream, source, name=name, release=release)
        imports = {
            name: contents.keys() & _imported_files(name, data)
            for name, data in contents.items()
        }
        order = graphlib.TopologicalSorter(imports).static_order()
        return {name: contents[name] for name in order}

    def diff(self) -> str:
        """The overlay as one patch that ``git apply`` takes in a PyTorch checkout."""
        lines: list[str] = []
        for name, wanted in sorted(self.wanted().items()):
            original = self.original(name)
            lines.append(f"diff --git a/{name} b/{name}\n")
            if original is None:
                lines.append("new file mode 100644\n")
            lines += difflib.unified_diff(
                _lines(original or b""),
                _lines(wanted),
                "/dev/null" if original is None else f"a/{name}",
                f"b/{name}",
            )
        marked = "\n\\ No newline at end of file\n"
        return "".join(x if x.endswith("\n") else x + marked for x in lines)

    # -- writing

    def apply(self) -> str:
        """Bring the torch to this overlay from whatever state it is in."""
        with self._locked():
            state, why = self.status()
            if state == "patched":
                shutil.rmtree(self.state / "staged", ignore_errors=True)
                return "already applied"
            if state == "edited":
                self._refuse_edited(why)
            old = self.record()
            known = self._carried(old) if old else {}
            wanted = self.wanted()
            originals = {name: self.original(name) for name in [*known, *wanted]}
            # What an older overlay changed and this one does not is in `known` alone.
            unfinished = {
                name: FileRecord(
                    original=_hash(originals[name]),
                    patched=_hash(wanted.get(name, originals[name])),
                    previous=self.hash(name),
                )
                for name in [*(n for n in known if n not in wanted), *wanted]
            }
            finished = {
                name: dataclasses.replace(unfinished[name], previous=None)
                for name in wanted
            }
            self._check_writable(unfinished)
            # All that needs room on the disk comes before the first change.
            try:
                for name, original in originals.items():
                    if original is None:
                        continue
                    if _read(self.state / "originals" / name) != original:
                        self._stage(f"originals/{name}", original, like=name)
                    if name in known:
                        self._stage(f"staged/old/{name}", original, like=name)
                for name, data in wanted.items():
                    self._stage(f"staged/new/{name}", data, like=name)
                self._stage_record(Record(self.torch.version, False, unfinished))
                self._stage_record(Record(self.torch.version, True, finished))
            except OSError as error:
                if old is None:
                    shutil.rmtree(self.state, ignore_errors=True)
                raise Refusal(
                    f"{self.state} cannot be written ({error}); nothing was changed. "
                    "Make room or get write access, then run again"
                ) from error
            self._move("staged/unfinished.json", self.record_file)
            self._take_off(known, "staged/old")
            for name in wanted:
                self._put(name, f"staged/new/{name}")
            self._move("staged/finished.json", self.record_file)
            shutil.rmtree(self.state / "staged", ignore_errors=True)
        return "applied: " + ", ".join(Path(n).name for n in wanted)

    def revert(self) -> str:
        """Put every original back, and remove what the overlay added."""
        with self._locked():
            state, why = self.status()
            if state == "edited":
                self._refuse_edited(why)
            record = self.record()
            if record is None:
                shutil.rmtree(self.state, ignore_errors=True)
                return "nothing to revert"
            known = self._carried(record)
            for name in known:
                self.original(name)  # refuses if the kept file is damaged
            self._check_writable(known)
            # Without room on the disk the record stays as it is: the hashes tell the
            # state of each file as well.
            with contextlib.suppress(OSError):
                self._stage_record(dataclasses.replace(record, complete=False))
                self._move("staged/unfinished.json", self.record_file)
            self._take_off(known, "originals")
            self.record_file.unlink()
            shutil.rmtree(self.state, ignore_errors=True)
        return "reverted: " + ", ".join(Path(n).name for n in known)

    def _carried(self, record: Record) -> dict[str, FileRecord]:
        """The files that an overlay wrote and nobody has replaced since."""
        return {n: f for n, f in record.files.items() if self.hash(n) in f.ours}

    def _take_off(self, files: dict[str, FileRecord], kept: str) -> None:
        """Put originals back, the hook first; then remove the new modules."""
        for name, file in reversed(files.items()):
            if file.original is not None:
                self._put(name, f"{kept}/{name}")
        for name, file in reversed(files.items()):
            if file.original is None:
                self._put(name, None)

    def _start_over(self) -> str:
        """What to do where no way leads on from the files as they are."""
        added = [
            self.root / name
            for name, source in self.overlay().items()
            if not _is_sketch(name, source)
        ]
        return (
            "save what you want to keep, reinstall torch, delete "
            f"{', '.join(map(str, [self.state, *added]))}, then run again"
        )

    def _refuse_edited(self, why: str) -> NoReturn:
        raise Refusal(f"{why} in {self.root}: {self._start_over()}")

    def _check_writable(self, names: Iterable[str]) -> None:
        folders = {self.torch.folder, *((self.root / name).parent for name in names)}
        for folder in sorted(folders):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise Refusal(
                    f"{folder} cannot be written; nothing was changed. Run as the user "
                    "who installed torch, or install torch in an environment of yours"
                )

    def _stage(self, place: str, data: bytes, like: str | None = None) -> None:
        """Write `data` below the state folder, with the owner and mode of a file."""
        path = self.state / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        model = self.root / (like or "torch/__init__.py")
        if not model.exists():
            model = self.torch.folder / "__init__.py"
        shutil.copymode(model, path)
        if hasattr(os, "chown"):
            with contextlib.suppress(PermissionError):
                os.chown(path, model.stat().st_uid, model.stat().st_gid)

    def _stage_record(self, record: Record) -> None:
        place = "finished" if record.complete else "unfinished"
        self._stage(f"staged/{place}.json", record.to_json())

    def _put(self, name: str, place: str | None) -> None:
        """Move a file of the state folder over `name`, or remove `name`."""
        target = self.root / name
        for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            stale.unlink(missing_ok=True)
        if place is None:
            target.unlink(missing_ok=True)
        else:
            self._move(place, target)

    def _move(self, place: str, target: Path) -> None:
        os.replace(self.state / place, target)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time per torch; a second one waits."""
        with open(self.torch.folder / "__init__.py", "rb") as file:
            _lock(file)
            yield


def _lock(file: BinaryIO) -> None:
    """Wait for the exclusive lock on a file; closing the file gives it up."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # Windows' locks bar readers, so lock beyond the end
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another overlay.py to finish", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)


# --------------------------------------------------------------------------------------
# Command line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="overlay.py",
        description="Apply this patch to an installed PyTorch, revert it, show its "
        "status, or print it as a diff.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["apply", "revert", "status", "diff"])
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--python",
        type=Path,
        metavar="PATH",
        help="the interpreter whose torch is meant (default: the one that runs this)",
    )
    where.add_argument(
        "--torch-root",
        type=Path,
        metavar="DIR",
        help="a PyTorch checkout or an unpacked wheel: the folder that has torch/",
    )
    options = parser.parse_args(arguments)
    try:
        torch = find_torch(options.python, options.torch_root)
        installation = Installation(torch)
        if options.command != "revert":
            check_release(torch)
        if options.command == "diff":
            sys.stdout.buffer.write(installation.diff().encode())
            return 0
        print(f"torch {torch.version} at {torch.folder}")
        if options.command == "status":
            state, why = installation.status()
            print(f"{state}: {why}")
            return STATUS_EXIT_CODE[state]
        change = {"apply": installation.apply, "revert": installation.revert}
        print(change[options.command]())
    except Refusal as refusal:
        print(f"overlay.py: {refusal}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"overlay.py: stopped by a fault: {error}. torch still imports; run apply "
            "or revert again once the cause is gone",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
