"""House rules that a linter does not know: function length, docstrings, documents that agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import median

import pytest

from tests.tolerances import TOLERANCES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p
    for room in ("k3tvm", "schedules", "relax_models")
    for p in (ROOT / room).rglob("*.py")
    if not any(part.is_symlink() for part in p.parents)
)
LONGEST, MEDIAN = 90, 15


def functions(path: Path) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]


def length(function: ast.FunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def test_functions_are_short():
    lengths = {f"{p.name}:{f.name}": length(f) for p in SOURCES for f in functions(p)}
    assert len(lengths) > 300
    assert median(lengths.values()) < MEDIAN
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_modules_and_public_functions_say_what_they_do(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module begins with what it turns into what"
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    for node in list(public):
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            public += [m for m in methods if not m.name.startswith("_")]
    bare = [n.name for n in public if not ast.get_docstring(n) and not _overrides(n, tree)]
    assert bare == []


def _overrides(node: ast.AST, tree: ast.Module) -> bool:
    """Methods that only fill in what a documented base class asks for."""
    return (
        isinstance(node, ast.FunctionDef)
        and node.name
        in {
            "arguments",
            "register",
            "visit_call_",
        }
        and any(isinstance(c, ast.ClassDef) and node in c.body for c in tree.body)
    )


def test_numerics_page_has_the_table_of_tolerances():
    page = (ROOT / "docs" / "numerics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", page, re.M))
    assert {name: float(bound) for name, bound in rows.items()} == {
        name: bound for name, (bound, _) in TOLERANCES.items()
    }
