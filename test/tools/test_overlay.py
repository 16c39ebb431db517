"""The overlay: merging sketches, and changing an installed torch with care."""

from __future__ import annotations

import ast
import difflib
import errno
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import overlay
import pytest
from overlay import Installation, Refusal, Torch


PACKAGE = "torch/_functorch/_aot_autograd"
HOOK = f"{PACKAGE}/runtime_wrappers.py"
MODULE = f"{PACKAGE}/mutation_epilogue_codegen.py"


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

    @pytest.mark.parametrize(
        "known", ["from .alpha import a\nimport os\n", "from . import config\n"]
    )
    def test_import_that_upstream_has_is_skipped(self, known: str) -> None:
        assert merge(UPSTREAM, known) == UPSTREAM

    @pytest.mark.parametrize(
        ("statement", "before"),
        [
            ("from .beta import b", "from .gamma import c"),
            ("from .Beta import b", "from .gamma import c"),
            ("from .alpha import b", "from .gamma import c"),
            ("from .beta import (\n    b,  # why\n    d,\n)", "from .gamma import c"),
            ("from .beta import b\nfrom .bat import c", "from .gamma import c"),
            ("from .a import b", "from .alpha import a"),
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

    def test_replaced_body_goes_with_its_docstring_and_decorators(self) -> None:
        inner = "    @wraps(f)\n    def inner():\n        pass\n\n    return inner\n"
        upstream = (
            f'def f():\n    """Doc."""\n    x = 1\n\n\ndef g():\n{inner}    # End.\n'
        )
        sketch = f"def f():\n{inner}    # Not merged.\n\n\ndef g():\n    return 2\n"
        expected = f"def f():\n{inner}\n\ndef g():\n    return 2\n    # End.\n"
        assert merge(upstream, sketch) == expected

    def test_head_stays_as_upstream_writes_it(self) -> None:
        upstream = """\
            @cached
            @traced(
                True
            )
            async def f(a: int, /, b: str="x",
                        *rest, c , **others) -> None : # head
                return 1
        """
        expected = textwrap.dedent(upstream).replace("1", "2")
        assert merge(upstream, "async def f(b, others):\n    return 2\n") == expected

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

    def test_only_direct_children_of_the_body_match(self) -> None:
        upstream = "def f():\n    if a:\n        x = 1\n    x = 1\n    return x\n"
        sketch = "def f():\n    ...\n    x = 2\n    ...\n"
        expected = "def f():\n    if a:\n        x = 1\n    x = 2\n    return x\n"
        assert merge(upstream, sketch) == expected

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("x = 1", "x = 2"),
            ("x = y = 1", "x = y = 2"),
            ("x[0].y = 1", "x[0].y = 2"),
            ("x: int = 1", "x: str = '2'"),
            ("x += 1", "x += 2"),
            ("a.b(1)", "a.b(2, 3)"),
            ("return", "return [\n        2,\n    ]"),
            ("x = [\n        1,\n    ]", "x = 2"),
            ("if x:\n        a = 1\n    else:\n        a = 2", "if x:\n        a = 3"),
            ("for x in y:\n        pass", "for x in y:\n        print(x)"),
            ("with a as b:\n        pass", "with a as b:\n        print(b)"),
            ("while x:\n        pass", "while x:\n        # Why.\n        x = 1"),
            (
                "while x:\n        a = 1\n        b()",
                "while x:\n        a = 2\n        ...",
            ),
        ],
    )
    def test_statement_of_the_same_head_is_replaced(self, old: str, new: str) -> None:
        upstream = f"def f():\n    before\n    # Above.\n    {old}  # end\n    after\n"
        sketch = f"def f():\n    ...\n    {new}\n    ...\n"
        merged = new.replace("...", "b()  # end")
        expected = f"def f():\n    before\n    # Above.\n    {merged}\n    after\n"
        assert merge(upstream, sketch) == expected

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("x = 1", "x: int = 1"),
            ("x += 1", "x -= 1"),
            ("x['1'] = 1", "x[1] = 1"),
            ("a.b(1)", "a.c(1)"),
            ("for x in y:\n        a = 1", "for x in z:\n        a = 1"),
            ("def g():\n        a = 1", "async def g():\n        a = 1"),
        ],
    )
    def test_statement_of_another_head_does_not_match(self, old: str, new: str) -> None:
        with pytest.raises(Refusal, match="no statement like"):
            merge(f"def f():\n    {old}\n", f"def f():\n    ...\n    {new}\n")

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

    def test_new_field_between_replaced_ones(self) -> None:
        sketch = """\
            class Wrapper:
                size: float
                # Not merged.
                weight: list[int] = field(
                    default_factory=list
                )
                name: bytes
                ...
        """
        expected = UPSTREAM.replace(
            "    size: int\n    name: str\n",
            "    size: float\n    weight: list[int] = field(\n"
            "        default_factory=list\n    )\n    name: bytes\n",
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

    @pytest.mark.parametrize("end", [",", "", ",  # why", "  # why"])
    def test_new_parameters_keep_upstreams_end(self, end: str) -> None:
        upstream = f"def f(\n    a,\n    *,\n    b=1{end}\n) -> int:\n    return a\n"
        sketch = "def f(a, *, c=[\n    1\n], d: int = 2):\n    return b\n"
        new = "b=1,\n    c=[\n    1\n],\n    d: int = 2"
        expected = upstream.replace("b=1", new).replace("return a", "return b")
        assert merge(upstream, sketch) == expected

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

    @pytest.mark.parametrize(
        ("upstream", "sketch", "expected"),
        [
            ("x = f( a )", "x = f(..., n=1)", "x = f( a, n=1 )"),
            ("x = f(*a, b=2,)", "x = f(..., n=1, m=2)", "x = f(*a, b=2, n=1, m=2,)"),
            ("x: A = f(a)", "x: A = f(..., n=1)", "x: A = f(a, n=1)"),
            ("a.b(c)", "a.b(..., n=1)", "a.b(c, n=1)"),
            ("g(1, k=f(a))", "g(1, k=f(..., n=1))", "g(1, k=f(a, n=1))"),
            ("x = f(a).y[0]", "x = f(..., n=1).y[0]", "x = f(a, n=1).y[0]"),
            ("x = f(a) + f(b)", "x = f(..., n=1) + f(b)", "x = f(a, n=1) + f(b)"),
            ("x = f(a)(b)", "x = f(..., n=1)(..., m=2)", "x = f(a, n=1)(b, m=2)"),
            (
                "x = f(\n  a  # why\n)",
                "x = f(..., n=1)",
                "x = f(\n  a,\n  n=1  # why\n)",
            ),
            (
                "x = f(\n    g(\n        a, b\n    )\n)",
                "x = f(g(..., n=h(\n    1\n)))",
                "x = f(\n    g(\n        a, b,\n        n=h(\n    1\n)\n    )\n)",
            ),
            (
                "for x in y:\n    z = f(a)\n    g()",
                "for x in y:\n    z = f(..., n=1)\n    g()",
                "for x in y:\n    z = f(a, n=1)\n    g()",
            ),
        ],
    )
    def test_new_arguments_wherever_the_call_is(
        self, upstream: str, sketch: str, expected: str
    ) -> None:
        assert merge(upstream + "\n", sketch + "\n") == expected + "\n"

    def test_upstreams_line_ends_are_kept(self) -> None:
        sketch = """\
            from .beta import b


            class Wrapper:
                size: int
                weight: int = 0
                ...

                def run(self, first, *, third: int = 3):
                    # New comment.
                    return first


            def build(x):
                ...
                with lock:
                    old = 2
                return make(..., z=2)
        """
        expected = merge(UPSTREAM, sketch).replace("\n", "\r\n")
        upstream = UPSTREAM.replace("\n", "\r\n")
        assert merge(upstream, sketch) == expected
        windows = textwrap.dedent(sketch).replace("\n", "\r\n")
        assert merge(upstream, windows) == expected
        assert merge(UPSTREAM, windows) == expected.replace("\r\n", "\n")

    def test_odd_text_stays_byte_for_byte(self) -> None:
        upstream = (
            'a = "é"  ;  b = 1\n\x0c\nif a :\n\tprint( "\u2028\x85" )   \n\n\n\n\n'
            'def f(s="é", *, t="ü"): # ß\n    "é"; "ü"\n    é = g("ü", "é") ; ü = 1\n'
            "    return  é\n# no newline at the end"
        )
        sketch = 'def f(*, n="ö"):\n    ...\n    é = g(..., m="ä")\n    return 1\n'
        expected = upstream.replace('t="ü"', 't="ü", n="ö"')
        expected = expected.replace('"é") ;', '"é", m="ä") ;')
        assert merge(upstream, sketch) == expected.replace("return  é", "return 1")

    def test_sketch_may_lack_a_newline_at_its_end(self) -> None:
        assert merge("import a\nX = 1\n", "import b") == "import a\nimport b\nX = 1\n"
        assert merge("X = 1\n\nY = 1\n", "X = 2") == "X = 2\n\nY = 1\n"

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
                "def build(x):\n    ...\n    if y > 0:\n        ...\n"
                "    else:\n        f()",
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

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("x = 1\n    x = 2", "x = 3", "upstream has 2 statements like `x = 3`"),
            ("yield 1", "yield 2", "a statement of this kind cannot be matched"),
            ("import a", "import b", "a statement of this kind cannot be matched"),
            ("x = 1", "'''Docstring.'''", "a statement of this kind cannot be matched"),
            (
                "for a in b:\n        x = 1\n    else:\n        y()",
                "for a in b:\n        ...\n    else:\n        z()",
                "an `else` cannot be merged",
            ),
            ("x = 1; y = 1", "x = 2", "two statements on a line in torch 2.15.0's "),
            ("x = 1", "x = 2; y = 2", "two statements on a line in wrappers.py"),
            (
                "a=1; x = 1",
                "...; x = 2",
                "two statements on a line in torch 2.15.0's ",
            ),
            ("g(a)", "g(..., b)", "only keyword arguments can be appended"),
            ("g(a)", "g(..., **b)", "only keyword arguments can be appended"),
            ("g()", "g(..., n=1)", "nothing can be appended to upstream's `g()`"),
            ("g(**b)", "g(..., n=1)", "nothing can be appended to upstream's `g(**b)`"),
            (
                "x = h(g(a for a in b))",
                "x = h(g(..., n=1))",
                "nothing can be appended to upstream's `g((a for a in b))`",
            ),
            ("x = g(a)", "x = h(..., n=1)", "upstream has no `h` here"),
            ("x = g", "x = g(..., n=1)", "upstream has no `g(..., n=1)` here"),
            (
                "x = h(1, g(a))",
                "x = h(True, g(..., n=1))",
                "upstream has no `True` here",
            ),
            (
                "x = h(g(a), 1)",
                "x = h(g(..., n=1))",
                "upstream has no `h(g(..., n=1))`",
            ),
            (
                "x = h(k=g(a))",
                "x = h(l=g(..., n=1))",
                "upstream has no `h(l=g(..., n=1))`",
            ),
            ("x = g(a).y", "x = g(..., n=1).z", "upstream has no `g(..., n=1).z` here"),
            (
                "x = 1 + g(a)",
                "x = 1 - g(..., n=1)",
                "upstream has no `1 - g(..., n=1)`",
            ),
            ("g(a)", "g(..., n=h(..., m=1))", "this `...` would be copied as it is"),
        ],
    )
    def test_refusals_of_statements(self, old: str, new: str, reason: str) -> None:
        with pytest.raises(Refusal) as refusal:
            merge(f"def f():\n    {old}\n", f"def f():\n    ...\n    {new}\n")
        assert str(refusal.value).startswith(f"wrappers.py, line 3, in `f`: {reason}")

    @pytest.mark.parametrize(
        ("upstream", "sketch", "line", "where", "reason"),
        [
            (
                "def f():\n    pass\n\n\ndef f():\n    pass",
                "def f():\n    g()",
                1,
                "the module",
                "2 statements like `def f():`",
            ),
            (
                "def f():\n    x = 1\n    y = 1",
                "def f():\n    ...\n    x = 2\n    x = 3",
                4,
                "`f`",
                "upstream has it in another order",
            ),
            (
                "def f():\n    x: int = 1",
                "def f():\n    x: int = 1\n    y: int = 2\n    ...",
                3,
                "`f`",
                "no statement like `y: int = 2`",
            ),
            (
                "class A:\n    x: int",
                "class A(metaclass=B):\n    ...",
                1,
                "`A`",
                "base",
            ),
            (
                "def f():\n    x()",
                "def f(): y()",
                1,
                "`f`",
                "wrappers.py is on one line",
            ),
            (
                "def f(a, *, b=1):\n    x()",
                "def f(\n    a, c=None, *, b\n):\n    ...",
                2,
                "`f`",
                "`c` must be keyword-only and have a default",
            ),
            (
                "def f(a, *, b=1):\n    x()",
                "def f(a, **c):\n    ...",
                1,
                "`f`",
                "`c` must be keyword-only and have a default",
            ),
            (
                "class A:\n    async def f(a, *, b=1, **c):\n        x()",
                "class A:\n    async def f(a, *, d=1):\n        ...\n    ...",
                2,
                "`A.f`",
                "upstream has no place for `d`",
            ),
            (
                "def f(a):\n    x()",
                "def f(*, b=1):\n    ...",
                1,
                "`f`",
                "upstream has no place for `b`",
            ),
            (
                "class A:\n  def f(self):\n    x()",
                "class A:\n    def f(self):\n        y()\n    ...",
                3,
                "`A.f`",
                "upstream indents it differently",
            ),
            (
                "class A:\n  x: int = f(a)",
                "class A:\n    x: int = f(..., b=1)\n    y: int = 1\n    ...",
                3,
                "`A`",
                "upstream indents it differently",
            ),
            (
                "class A:\n    x: int",
                "class A:\n    x: int\n    y: int\n    ...",
                3,
                "`A`",
                "no statement like `y: int`",
            ),
            (
                "class A:\n    x: int",
                "class A:\n    x: int\n    ...\n    y: int = 1",
                4,
                "`A`",
                "no statement like `y: int = 1`",
            ),
            (
                "def f():\n    if a:\n        x()\n    y()",
                "def f():\n    if a:\n        ...\n        x()",
                3,
                "`f`",
                "this `...` would be copied as it is",
            ),
            (
                "def f():\n    if a:\n        x()\n    else:\n        y()",
                "def f():\n    ...\n    if a:\n        z()\n    else:\n        ...",
                6,
                "`f`",
                "this `...` would be copied as it is",
            ),
            (
                "def f():\n    x = g(1)",
                "def f():\n    x = g(..., n=1)",
                2,
                "`f`",
                "this `...` would be copied as it is",
            ),
            (
                "def f(*, a=(1)):\n    x()",
                "def f(*, b=2):\n    ...",
                1,
                "the module",
                "the merged source is not valid Python (",
            ),
        ],
    )
    def test_refusals_of_other_sources(
        self, upstream: str, sketch: str, line: int, where: str, reason: str
    ) -> None:
        with pytest.raises(Refusal) as refusal:
            merge(upstream + "\n", sketch + "\n")
        message = str(refusal.value)
        assert message.startswith(f"wrappers.py, line {line}, in {where}: ")
        assert reason in message
        assert "(torch 2.15.0). Nothing was written" in message
        assert "use a tested release (2.13.0, 2.14.1, 2.15.0) or adapt" in message

    def test_source_that_is_not_python_is_refused(self) -> None:
        for upstream, sketch, name in (
            (UPSTREAM, "def (\n", "wrappers.py"),
            ("def (\n", "", "torch 2.15.0's wrappers.py"),
        ):
            with pytest.raises(Refusal) as refusal:
                merge(upstream, sketch)
            assert str(refusal.value).startswith(f"{name} is not valid Python (")
            assert str(refusal.value).endswith("restore it, then run again")


# --------------------------------------------------------------------------------------
# An installed torch


@pytest.fixture(scope="session")
def upstream() -> Installation:
    return Installation(overlay.find_torch(None, None))


@pytest.fixture(scope="session")
def originals(upstream: Installation) -> dict[str, bytes]:
    """Upstream's own files of the installed torch, as far as the overlay needs them."""
    names = ["torch/__init__.py", "torch/version.py", *upstream.overlay()]
    names += [f"{PACKAGE}/{f.name}" for f in (upstream.root / PACKAGE).glob("*.py")]
    files = {name: upstream.original(name) for name in names}
    return {name: data for name, data in files.items() if data is not None}


@pytest.fixture
def cache(originals: dict[str, bytes], tmp_path: Path) -> Path:
    for name, data in originals.items():
        write(tmp_path / "cache" / name, data)
    return tmp_path / "cache"


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


def sources(site: Path) -> dict[str, bytes]:
    return {n: d for n, d in tree(site).items() if overlay.STATE_FOLDER not in n}


def inodes(site: Path) -> dict[str, int]:
    return {name: (site / name).stat().st_ino for name in tree(site)}


def write(path: Path, data: bytes) -> None:
    """Write a file anew, whatever other names the one that is there may have."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


NEXT_RELEASE = b"\n# Changed in the next release.\n"


def replace_torch(site: Path, cache: Path, version: str | None = None) -> None:
    """What pip does: put new files over the old ones, and leave those of others.

    Another `version` has other files under the sketches as well.
    """
    sketched = tree(cache).keys() & installation(site).overlay().keys()
    for name, data in tree(cache).items():
        changed = version is not None and name in sketched
        write(site / name, data + NEXT_RELEASE if changed else data)
    if version is not None:
        set_version(site, version)


def set_version(site: Path, version: str) -> None:
    write(site / "torch/version.py", f"__version__ = '{version}'\n".encode())


def new_modules(site: Path) -> list[str]:
    mark = overlay.SKETCH_MARK.encode()
    return [n for n, d in installation(site).overlay().items() if mark not in d]


def fail_before(patch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Make the program stop before it moves anything to the file `name`."""
    move = Installation._move

    def failing(self: Installation, place: str, target: Path) -> None:
        if target == self.root / name:
            raise error
        move(self, place, target)

    patch.setattr(Installation, "_move", failing)


def interpreter(folder: Path, command: str) -> Path:
    """A shell script that hands its arguments to `command`."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)
    return path


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
        before, links = tree(cache), inodes(cache)
        sketched = before.keys() & installation(site).overlay().keys()
        assert HOOK in sketched
        for command in ("apply", "revert", "apply"):
            assert run(site, command) == 0
            assert tree(cache) == before
            assert inodes(cache) == links
            now = inodes(site)
            assert {name for name in links if now[name] != links[name]} == sketched

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

    def test_symbolic_links_are_not_followed_to_the_torch_behind_them(
        self, cache: Path, tmp_path: Path
    ) -> None:
        site = tmp_path / "site"
        shutil.copytree(cache, site, copy_function=os.symlink)
        before = tree(cache)
        command = f"PYTHONPATH={site} exec {sys.executable} -S"
        python = interpreter(tmp_path, command)
        assert overlay.main(["apply", "--python", str(python)]) == 0
        assert run(site, "status") == 0
        assert tree(cache) == before

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
        write(site / "torch/__init__.py", b"")
        (site / "torch/__init__.py").chmod(0o604)
        installation(site).apply()
        assert (site / HOOK).stat().st_mode & 0o777 == 0o640
        assert (site / MODULE).stat().st_mode & 0o777 == 0o604
        installation(site).revert()
        assert (site / HOOK).stat().st_mode & 0o777 == 0o640

    def test_stale_bytecode_is_removed(self, site: Path) -> None:
        folder = (site / HOOK).parent / "__pycache__"
        others = {"utils.cpython-311.pyc", "runtime_wrappers_too.cpython-311.pyc"}
        for command in ("apply", "revert"):
            for name in installation(site).overlay():
                for tag in ("cpython-311", "cpython-312.opt-1"):
                    write(folder / f"{Path(name).stem}.{tag}.pyc", b"")
            for name in others:
                write(folder / name, b"")
            assert run(site, command) == 0
            assert {file.name for file in folder.iterdir()} == others

    def test_older_overlay_is_moved_forward(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        (repository / MODULE).write_text('"""An older module."""\n')
        (repository / HOOK).with_name("older.py").write_text('"""Gone since."""\n')
        installation(site).apply()
        expected = tree(site)
        installation(site).revert()
        installation(site, repository).apply()
        assert installation(site).status()[0] == "stale"
        installation(site).apply()
        assert installation(site).status()[0] == "patched"
        assert tree(site) == expected
        installation(site).revert()
        assert tree(site) == tree(cache)

    def test_older_overlay_is_taken_off(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        (repository / MODULE).write_text('"""An older module."""\n')
        installation(site, repository).apply()
        installation(site).revert()
        assert tree(site) == tree(cache)

    def test_overlay_with_fewer_files_restores_the_others(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        installation(site).apply()
        for name in installation(site).overlay():
            if name != HOOK:
                (repository / name).unlink()
        smaller = installation(site, repository)
        smaller.apply()
        assert sources(site) == tree(cache) | smaller.wanted()
        assert smaller.status()[0] == "patched"
        assert smaller.apply() == "already applied"
        smaller.revert()
        assert tree(site) == tree(cache)

    @pytest.mark.parametrize("first", ["apply", "revert"])
    @pytest.mark.parametrize("second", ["apply", "revert"])
    def test_every_interruption_can_be_finished(
        self, site: Path, cache: Path, first: str, second: str
    ) -> None:
        stock = tree(cache)
        final = stock | installation(site).wanted()
        for step in itertools.count():
            run(site, "revert" if first == "apply" else "apply")
            change = getattr(installation(site), first)
            killed = killed_at(step, change, ["replace"])
            for name, data in sources(site).items():
                assert data in (stock.get(name), final.get(name))
            assert installation(site).status()[0] != "edited"
            getattr(installation(site), second)()
            assert sources(site) == (final if second == "apply" else stock)
            if not killed:
                break
        assert step > 4
        installation(site).revert()
        assert tree(site) == stock

    def test_files_are_written_before_their_importers(
        self, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = installation(site).wanted()
        record = f"torch/{overlay.STATE_FOLDER}/record.json"
        changes: list[str] = []
        put, move = Installation._put, Installation._move

        def putting(self: Installation, name: str, place: str | None) -> None:
            changes.append(name)
            put(self, name, place)

        def moving(self: Installation, place: str, target: Path) -> None:
            if target == self.record_file:
                changes.append(record)
            move(self, place, target)

        monkeypatch.setattr(Installation, "_put", putting)
        monkeypatch.setattr(Installation, "_move", moving)
        installation(site).apply()
        assert changes == [record, *wanted, record]
        assert changes.index(MODULE) < changes.index(HOOK)
        for position, data in enumerate(wanted.values()):
            for statement in ast.parse(data).body:
                if isinstance(statement, ast.ImportFrom) and statement.level == 1:
                    later = list(wanted)[position:]
                    assert f"{PACKAGE}/{statement.module}.py" not in later

        changes.clear()
        installation(site).revert()
        backwards = list(reversed(wanted))
        restored = [name for name in backwards if name in tree(cache)]
        removed = [name for name in backwards if name not in tree(cache)]
        assert changes == [record, *restored, *removed]

    def test_full_disk_leaves_stock_as_it_was(self, site: Path, cache: Path) -> None:
        step = 0
        while refused_at_full_disk(site, step):
            assert tree(site) == tree(cache)
            step += 1
        assert step > len(installation(site).overlay())
        assert run(site, "status") == 0

    def test_full_disk_leaves_an_older_overlay_as_it_was(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        (repository / MODULE).write_text('"""An older module."""\n')
        installation(site, repository).apply()
        before = {n: d for n, d in tree(site).items() if "/staged/" not in n}
        step = 0
        while refused_at_full_disk(site, step):
            now = {n: d for n, d in tree(site).items() if "/staged/" not in n}
            assert now == before
            assert run(site, "status") == 4
            step += 1
        assert step > len(installation(site).overlay())
        installation(site).revert()
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

    @pytest.mark.parametrize("command", ["apply", "revert"])
    @pytest.mark.parametrize("folder", ["torch", PACKAGE])
    def test_folder_that_cannot_be_written_is_refused(
        self,
        site: Path,
        command: str,
        folder: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if command == "revert":
            run(site, "apply")
        before = tree(site)
        locked = site / folder
        monkeypatch.setattr(os, "access", lambda path, mode: path != locked)
        assert run(site, command) == 1
        message = capsys.readouterr().err
        assert f"{locked} cannot be written; nothing was changed. Run as" in message
        assert tree(site) == before

    def test_fault_on_the_way_is_reported_and_finished_later(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            fail_before(patch, HOOK, OSError(errno.EIO, "Input/output error"))
            assert run(site, "apply") == 1
        message = capsys.readouterr().err
        assert "stopped by a fault" in message
        assert "run apply or revert again once the cause is gone" in message
        assert run(site, "status") == 6
        assert run(site, "apply") == 0
        assert run(site, "status") == 0

    def test_several_at_once_wait_for_each_other(self, site: Path) -> None:
        script = overlay.REPOSITORY / "tools" / "overlay.py"
        command = [sys.executable, str(script), "apply", "--torch-root", str(site)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
        outputs = [process.communicate()[0] for process in started]
        assert [process.returncode for process in started] == [0] * 4
        assert sum(b"already applied" in output for output in outputs) == 3
        assert installation(site).status()[0] == "patched"


def refused_at_full_disk(site: Path, step: int) -> bool:
    """Apply while only `step` more files fit on the disk."""
    written = itertools.count()

    def fsync(file: int) -> None:
        if next(written) >= step:
            os.ftruncate(file, 1)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            installation(site).apply()
        except Refusal as error:
            refusal = str(error)
        else:
            return False
    assert "No space left on device" in refusal
    assert "nothing was changed. Make room" in refusal
    return True


class Killed(BaseException):
    pass


WRITING = ("fsync", "replace", "rmdir", "unlink")


def killed_at(
    step: int, change: Callable[[], object], functions: Sequence[str] = WRITING
) -> bool:
    """Run `change`, and stop it before its `step`-th call of one of os's functions."""
    calls = itertools.count()

    def counting(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def changed(*args: object, **kwargs: object) -> object:
            if next(calls) < step:
                return None if name == "fsync" else original(*args, **kwargs)
            if name == "fsync":
                os.ftruncate(args[0], 1)  # type: ignore[arg-type]
            raise Killed

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in functions:
            patch.setattr(os, name, counting(name))
        try:
            change()
        except Killed:
            return True
    return False


def sketch(source: str) -> bytes:
    return f'"""A docstring {overlay.SKETCH_MARK}."""\n{source}'.encode()


class TestInterruption:
    """Killed at any moment, with a small torch and overlays of little in common."""

    SCHEMAS = "torch/small/schemas.py"
    ANALYSIS = "torch/small/analysis.py"
    HOOK = "torch/small/hook.py"
    REPLAY = "torch/small/replay.py"
    VIEWS = "torch/small/views.py"
    ALIASES = "torch/small/aliases.py"

    @pytest.fixture
    def small(self, tmp_path: Path) -> Path:
        root = tmp_path / "small"
        set_version(root, "2.15.0")
        write(root / "torch/__init__.py", b"")
        write(root / self.SCHEMAS, b"class Info:\n    number: int\n")
        write(
            root / self.ANALYSIS,
            b"from .schemas import Info\n\n\ndef analyse():\n    return Info(1)\n",
        )
        write(
            root / self.HOOK,
            b"from .analysis import analyse\n\n\ndef hook():\n    return analyse()\n",
        )
        return root

    @pytest.fixture
    def overlays(self, tmp_path: Path) -> list[Path]:
        """Each has another name in the module that the hook imports."""

        def hook(name: str) -> bytes:
            return sketch(
                f"from .replay import {name}\ndef hook():\n    return {name}()\n"
            )

        first = {
            self.SCHEMAS: sketch(
                "class Info:\n    number: int\n    n: int = 2\n    ..."
            ),
            self.ANALYSIS: sketch(
                "from .views import views\ndef analyse():\n    return views()\n"
            ),
            self.HOOK: hook("replay"),
            self.REPLAY: b"from .views import views\ndef replay(): views()\n",
            self.VIEWS: b"def views(): pass\n",
        }
        second = {
            self.HOOK: hook("run"),
            self.REPLAY: b"from .aliases import aliases\ndef run(): aliases()\n",
            self.ALIASES: b"def aliases(): pass\n",
        }
        third = {self.HOOK: hook("go"), self.REPLAY: b"def go(): pass\n"}
        folders = []
        for number, files in enumerate([first, second, third]):
            folders.append(tmp_path / f"overlay-{number}")
            for name, data in files.items():
                write(folders[-1] / name, data)
        return folders

    def assert_sound(self, site: Path, *known: dict[str, bytes]) -> None:
        """Every file is one of the known ones, and every import finds its name."""
        now = sources(site)
        for name in set().union(now, *known):
            assert now.get(name) in [files.get(name) for files in known], name
        bodies = {Path(name).stem: ast.parse(data).body for name, data in now.items()}
        for body in bodies.values():
            for statement in body:
                if isinstance(statement, ast.ImportFrom):
                    names = {alias.name for alias in statement.names}
                    imported = bodies[str(statement.module)]
                    assert names <= {getattr(s, "name", None) for s in imported}

    @pytest.mark.parametrize(
        ("start", "command"),
        [
            ("stock", "apply"),
            ("stale", "apply"),
            ("stale", "revert"),
            ("leftover", "apply"),
            ("leftover", "revert"),
        ],
    )
    @pytest.mark.parametrize("finish", ["apply", "revert"])
    def test_torch_imports_and_the_work_can_be_finished(
        self,
        start: str,
        command: str,
        finish: str,
        small: Path,
        overlays: list[Path],
        tmp_path: Path,
    ) -> None:
        older, newer, _ = overlays
        before = tmp_path / "before"
        shutil.copytree(small, before)
        if start != "stock":
            installation(before, older).apply()
        if start == "leftover":
            write(small / self.HOOK, (small / self.HOOK).read_bytes() + NEXT_RELEASE)
            set_version(small, "2.15.1")
            replace_torch(before, small)
        assert installation(before, newer).status()[0] == start
        after = tmp_path / "after"
        shutil.copytree(small, after)
        installation(after, newer).apply()

        for step in itertools.count():
            site = tmp_path / f"site-{step}"
            shutil.copytree(before, site)
            changing = installation(site, newer)
            killed = killed_at(step, getattr(changing, command))
            known = (small, before, after)
            self.assert_sound(site, *map(sources, known))
            assert changing.status()[0] != "edited"
            getattr(changing, finish)()
            if finish == "apply":
                assert sources(site) == sources(after)
                assert changing.status()[0] == "patched"
                assert not (changing.state / "staged").exists()
            else:
                assert tree(site) == tree(small)
            if not killed:
                break
        assert step > 5

    def test_twice_on_the_way_to_different_overlays(
        self, small: Path, overlays: list[Path], tmp_path: Path
    ) -> None:
        first, second, third = overlays
        known = [sources(small)]
        clean = tmp_path / "clean"
        shutil.copytree(small, clean)
        for repository in overlays:
            installation(clean, repository).apply()
            known.append(sources(clean))
        before = tmp_path / "before"
        shutil.copytree(small, before)
        installation(before, first).apply()
        for step in itertools.count():
            for next_step in itertools.count(step % 2, 2):
                site = tmp_path / f"site-{step}-{next_step}"
                shutil.copytree(before, site)
                apply = installation(site, second).apply
                killed = killed_at(step, apply, ["replace"])
                apply = installation(site, third).apply
                again = killed_at(next_step, apply, ["replace"])
                self.assert_sound(site, *known)
                installation(site, third).apply()
                assert sources(site) == sources(clean)
                installation(site, third).revert()
                assert tree(site) == tree(small)
                if not again:
                    break
            if not killed:
                break


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

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_interrupted(self, site: Path, cache: Path, command: str) -> None:
        final = tree(cache) | installation(site).wanted()
        for name in installation(site).overlay():
            run(site, "revert")
            with pytest.MonkeyPatch.context() as patch:
                fail_before(patch, name, Killed())
                with pytest.raises(Killed):
                    run(site, "apply")
            assert run(site, "status") == 6
            assert run(site, command) == 0
            assert sources(site) == (final if command == "apply" else tree(cache))

    def test_new_module_that_is_gone_is_put_back(self, site: Path) -> None:
        run(site, "apply")
        before = tree(site)
        (site / MODULE).unlink()
        assert run(site, "status") == 6
        assert run(site, "apply") == 0
        assert tree(site) == before

    @pytest.mark.parametrize("command", ["apply", "revert"])
    @pytest.mark.parametrize("version", [None, "2.15.9"])
    def test_leftover_after_torch_was_replaced(
        self, site: Path, cache: Path, version: str | None, command: str
    ) -> None:
        run(site, "apply")
        replace_torch(site, cache, version)
        stock = {n: d for n, d in sources(site).items() if n in tree(cache)}
        links = inodes(site)
        assert run(site, "status") == 7
        assert run(site, command) == 0
        assert run(site, "status") == (0 if command == "apply" else 3)
        if command == "revert":
            assert inodes(site).items() <= links.items()
        elif version:
            assert (site / HOOK).read_bytes().endswith(NEXT_RELEASE)
        run(site, "revert")
        assert tree(site) == stock

    def test_leftover_of_an_older_overlay_leaves_nothing_over(
        self, site: Path, cache: Path, repository: Path
    ) -> None:
        (repository / HOOK).with_name("older.py").write_text('"""Gone since."""\n')
        installation(site, repository).apply()
        replace_torch(site, cache)
        assert run(site, "status") == 7
        assert run(site, "apply") == 0
        assert sources(site) == tree(cache) | installation(site).wanted()
        run(site, "revert")
        assert tree(site) == tree(cache)

    def test_file_that_the_next_release_gave_up_does_not_come_back(
        self, site: Path, cache: Path
    ) -> None:
        run(site, "apply")
        replace_torch(site, cache, "2.15.9")
        (site / HOOK).unlink()
        assert run(site, "revert") == 0
        assert tree(site).keys() == tree(cache).keys() - {HOOK}

    @pytest.mark.parametrize("command", ["apply", "revert"])
    @pytest.mark.parametrize(
        ("name", "content"),
        [(HOOK, b"edited = True\n"), (HOOK, None), (MODULE, b"edited = True\n")],
    )
    def test_edited_file_is_left_alone(
        self,
        site: Path,
        cache: Path,
        command: str,
        name: str,
        content: bytes | None,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        run(site, "apply")
        (site / name).unlink()
        if content is not None:
            write(site / name, content)
        before, links = tree(site), inodes(site)
        assert run(site, "status") == 5
        assert run(site, command) == 1
        assert tree(site) == before
        assert inodes(site) == links
        message = capsys.readouterr().err
        assert f"somebody else changed {name}" in message
        start_over(site, cache, message)

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_file_of_ours_without_a_record_is_left_alone(
        self,
        site: Path,
        cache: Path,
        command: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (site / MODULE).write_text("theirs = True\n")
        before = tree(site)
        assert run(site, "status") == 5
        assert run(site, command) == 1
        assert tree(site) == before
        message = capsys.readouterr().err
        assert f"{MODULE} is there, but no record of it" in message
        start_over(site, cache, message)

    @pytest.mark.parametrize(
        "content", [b"", b"[]", b"1", b"{}", b'{"files": {"a": {}}}', b"\xff"]
    )
    def test_damaged_record_is_refused(
        self,
        site: Path,
        cache: Path,
        content: bytes,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        run(site, "apply")
        record = installation(site).record_file
        write(record, content)
        before = tree(site)
        for command in ("apply", "revert", "status", "diff"):
            assert run(site, command) == 1
            message = capsys.readouterr().err
            assert f"{record} is damaged" in message
        assert tree(site) == before
        start_over(site, cache, message)

    @pytest.mark.parametrize("content", [b"damaged\n", None])
    @pytest.mark.parametrize("state", ["patched", "interrupted"])
    def test_damaged_original_is_refused(
        self,
        site: Path,
        cache: Path,
        content: bytes | None,
        state: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        run(site, "apply")
        if state == "interrupted":
            (site / MODULE).unlink()
        assert installation(site).status()[0] == state
        sketched = sorted(tree(cache).keys() & installation(site).overlay().keys())
        kept = installation(site).state / "originals" / sketched[0]
        kept.unlink()
        if content is not None:
            write(kept, content)
        before = tree(site)
        for command in ("apply", "revert", "diff"):
            assert run(site, command) == 1
            message = capsys.readouterr().err
            assert f"the original of {sketched[0]}" in message
            assert "is damaged: reinstall torch, then run again" in message
        assert tree(site) == before
        replace_torch(site, cache)
        assert run(site, "apply") == 0
        assert run(site, "revert") == 0
        assert tree(site) == tree(cache)


def start_over(site: Path, cache: Path, message: str) -> None:
    """Do what a message says that knows no other way on."""
    state = installation(site).state
    leftovers = [state, *(site / name for name in new_modules(site))]
    delete = ", ".join(map(str, leftovers))
    assert f"reinstall torch, delete {delete}, then run again" in message
    replace_torch(site, cache)
    shutil.rmtree(state, ignore_errors=True)
    for path in leftovers[1:]:
        path.unlink(missing_ok=True)
    assert run(site, "status") == 3
    assert run(site, "apply") == 0


class TestDiff:
    def test_git_applies_it(
        self, site: Path, cache: Path, tmp_path: Path, upstream: Installation
    ) -> None:
        checkout = tmp_path / "checkout"
        shutil.copytree(cache, checkout)
        patch = upstream.diff().encode()
        for command in (["init", "-q"], ["apply", "--check"], ["apply"]):
            subprocess.run(["git", *command], cwd=checkout, input=patch, check=True)
        shutil.rmtree(checkout / ".git")
        wanted = tree(cache) | installation(site).wanted()
        assert tree(checkout) == wanted

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    @pytest.mark.parametrize("end", ["", "\n"])
    def test_git_applies_it_to_odd_lines(
        self, newline: str, end: str, tmp_path: Path
    ) -> None:
        name = "torch/odd.py"
        lines = ["x = 1", "\x0c", "y = 'a\u2028b\x1cc\x85d'", "z = 1" + end]
        for root in (tmp_path / "site", tmp_path / "checkout"):
            set_version(root, "2.15.0")
            write(root / "torch/__init__.py", b"")
            write(root / name, newline.join(lines).encode())
        write(tmp_path / name, sketch("x = 2\n"))
        write(tmp_path / "torch/new.py", b"x = 1\ny = 2")
        checkout = tmp_path / "checkout"
        site = installation(tmp_path / "site", tmp_path)
        patch = site.diff().encode()
        for command in (["init", "-q"], ["-c", "core.autocrlf=false", "apply"]):
            subprocess.run(["git", *command], cwd=checkout, input=patch, check=True)
        site.apply()
        shutil.rmtree(checkout / ".git")
        assert tree(checkout) == sources(site.root)

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
                lines = list(difflib.unified_diff(old, new, n=0))[2:]
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
        with pytest.raises(SystemExit) as exit:
            overlay.main(["--help"])
        assert exit.value.code == 0
        output = capsys.readouterr().out
        assert "\n  1  refused" in output
        assert "\n  2  wrong usage" in output
        for state, code in overlay.STATUS_EXIT_CODE.items():
            assert f"\n  {code}  " in output
            assert state == "patched" or f"status: {state}" in output

    @pytest.mark.parametrize(
        "arguments", [[], ["mend"], ["apply", "--python", "p", "--torch-root", "t"]]
    )
    def test_wrong_usage(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            overlay.main(arguments)
        assert exit.value.code == 2

    def test_folder_without_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for command in ("apply", "revert", "status", "diff"):
            assert run(tmp_path, command) == 1
            message = capsys.readouterr().err
            assert f"{tmp_path} holds no torch: name the folder that" in message

    def test_interpreter_without_torch(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bare = str(tmp_path / "bare")
        command = [sys.executable, "-m", "venv", "--without-pip", bare]
        subprocess.run(command, check=True)
        python = tmp_path / "bare" / "bin" / "python"
        assert overlay.main(["apply", "--python", str(python)]) == 1
        message = capsys.readouterr().err
        assert f"no torch in {python}: install one of 2.13.0" in message
        assert "name another interpreter with --python" in message

    def test_interpreter_that_does_not_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken = interpreter(tmp_path, "echo broken >&2; exit 3;")
        for python, why in ((tmp_path / "none", "No such file"), (broken, "broken")):
            assert overlay.main(["apply", "--python", str(python)]) == 1
            assert f"{python} does not run: " in (message := capsys.readouterr().err)
            assert why in message

    def test_interpreter_that_is_named(
        self, upstream: Installation, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert overlay.main(["status", "--python", sys.executable]) == 0
        assert str(upstream.torch.folder) in capsys.readouterr().out

    @pytest.mark.parametrize("variable", ["", "PYTHONSAFEPATH=1"])
    def test_torch_of_the_working_folder_is_not_the_interpreters(
        self,
        site: Path,
        cache: Path,
        variable: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        command = f"{variable} PYTHONPATH={site} exec {sys.executable} -S"
        monkeypatch.chdir(cache)
        found = overlay.find_torch(interpreter(tmp_path, command), None)
        assert found == overlay.find_torch(None, site)

    def test_torch_without_a_version(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(site / "torch/version.py", b"")
        assert run(site, "status") == 1
        message = f"{site / 'torch'} does not say its version: reinstall torch"
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("version", ["2.12.0", "2.16.0", "1.0", "unknown"])
    def test_unsupported_release(
        self, site: Path, version: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        set_version(site, version)
        before = tree(site)
        for command in ("apply", "status", "diff"):
            assert run(site, command) == 1
            message = capsys.readouterr().err
            assert f"torch {version} at {site / 'torch'} is not supported" in message
            assert "use one of 2.13.0, 2.14.1, 2.15.0" in message
        assert tree(site) == before

    def test_revert_works_under_an_unsupported_release(
        self, site: Path, cache: Path
    ) -> None:
        run(site, "apply")
        replace_torch(site, cache, "2.16.0")
        assert run(site, "revert") == 0
        assert tree(site).keys() == tree(cache).keys()

    def test_untested_patch_release_is_warned_about(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        set_version(site, "2.15.3+cpu")
        for command in ("apply", "status"):
            assert run(site, command) == 0
            message = capsys.readouterr().err
            assert message.startswith("warning: torch 2.15.3+cpu is untested")

    def test_tested_releases_are_not_warned_about(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for release in overlay.TESTED_RELEASES:
            set_version(site, f"{release}+cu130")
            assert run(site, "status") == 3
            assert capsys.readouterr().err == ""

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

    def test_missing_file_writes_nothing(
        self, site: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (site / HOOK).unlink()
        before = tree(site)
        for command in ("apply", "diff"):
            assert run(site, command) == 1
            assert f"has no {HOOK}: use one of 2.13.0" in capsys.readouterr().err
        assert tree(site) == before

    def test_unusable_repository_writes_nothing(
        self, site: Path, cache: Path, repository: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(Refusal, match="use a full checkout"):
            installation(site, tmp_path / "empty").apply()
        (repository / MODULE).write_text("def (\n")
        with pytest.raises(Refusal, match=f"{MODULE} is not valid Python"):
            installation(site, repository).apply()
        assert tree(site) == tree(cache)

    def test_checkout_without_a_built_version_file(self, site: Path) -> None:
        (site / "torch/version.py").unlink()
        (site / "version.txt").write_text("2.15.0a0\n")
        assert overlay.find_torch(None, site) == Torch(site / "torch", "2.15.0a0")
        assert run(site, "apply") == 0
        assert run(site, "status") == 0


def test_torch_imports_with_all_but_the_hook_in_place(
    site: Path, tmp_path: Path, upstream: Installation
) -> None:
    wanted = installation(site).wanted()
    left_out = {*wanted, "torch/__pycache__", f"torch/{overlay.STATE_FOLDER}"}
    for folder in {parent for name in tree(site) for parent in Path(name).parents}:
        if folder != Path():
            for entry in (upstream.root / folder).iterdir():
                name = entry.relative_to(upstream.root)
                if name.as_posix() not in left_out and not (site / name).exists():
                    (site / name).symlink_to(entry)
    with pytest.MonkeyPatch.context() as patch:
        fail_before(patch, HOOK, Killed())
        with pytest.raises(Killed):
            installation(site).apply()
    modules = [name.removesuffix(".py").replace("/", ".") for name in wanted]
    program = f"import torch._dynamo, {', '.join(modules)}; print(torch.__file__)"
    environment = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    output = subprocess.check_output(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | environment,
        text=True,
    )
    assert Path(output.strip()) == site / "torch" / "__init__.py"
