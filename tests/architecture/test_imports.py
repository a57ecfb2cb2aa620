"""Imports point one way: kernels ← engine ← guided ← speculative ← root modules ← experiments
← notebooks.

Read from the syntax trees, so an import inside a function, under ``TYPE_CHECKING`` or by
``import_module`` with a literal counts like any other.
"""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = "root modules"
LAYERS = ["kernels", "engine", "guided", "speculative", ROOT, "experiments", "notebooks"]


@dataclass(frozen=True)
class Source:
    """A parsed file: its path, its layer and the package that its relative imports start from."""

    path: Path
    layer: str
    package: tuple[str, ...]
    tree: ast.Module


def layer_of(parts: tuple[str, ...], root: Path) -> str:
    """The layer of a dotted name below ``tightrope``: its folder, or the root modules."""
    return parts[0] if parts and (root / parts[0]).is_dir() else ROOT


def python_source(file: Path, root: Path) -> Source:
    path = file.relative_to(root)
    return Source(path, layer_of(path.parts, root), path.parent.parts, ast.parse(file.read_text()))


def notebook_source(file: Path, root: Path) -> Source:
    """The code cells as one program, without IPython's own lines."""
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    code = [line for cell in cells if cell["cell_type"] == "code" for line in lines_of(cell)]
    return Source(file.relative_to(root), "notebooks", (), ast.parse("\n".join(code)))


def lines_of(cell: dict[str, Any]) -> list[str]:
    lines = "".join(cell["source"]).splitlines()
    return ["pass" if line.startswith(("%", "!")) else line for line in lines]


def imported(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(level, module, name) of everything that a node imports; name is empty for a whole module."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield 0, alias.name, ""
        case ast.ImportFrom(level=level, module=module, names=names):
            for alias in names:
                yield level, module or "", alias.name
        case ast.Call(func=func, args=[ast.Constant(value=str(target)), *_]) if ast.unparse(
            func
        ).endswith(("import_module", "__import__")):
            yield len(target) - len(target.lstrip(".")), target.lstrip("."), ""
        case _:
            pass


def violation(source: Source, level: int, module: str, name: str, root: Path) -> str | None:
    """Why this import is wrong, or None."""
    parts = tuple(module.split(".")) if module else ()
    if level == 0:
        top = module.split(".")[0]
        if top != "tightrope":
            ours = (root / top / "__init__.py").exists() or (root / f"{top}.py").exists()
            return f"bare import of {top}" if ours or top == "tests" else None
        if source.layer != "notebooks":
            return f"absolute import of {module}; inside the package imports are relative"
        parts = parts[1:]
    else:
        if level - 1 > len(source.package):
            return "relative import beyond the package"
        parts = source.package[: len(source.package) - (level - 1)] + parts
    if name and (
        root.joinpath(*parts, name).is_dir() or root.joinpath(*parts, f"{name}.py").exists()
    ):
        parts = (*parts, name)
    target = layer_of(parts, root)
    if target not in LAYERS:
        return f"import of {target}, which is in no layer"
    if LAYERS.index(target) > LAYERS.index(source.layer):
        return f"{source.layer} must not import {target}"
    return None


def import_violations(root: Path, files: list[Path]) -> list[str]:
    sources = [python_source(file, root) for file in files]
    sources += [notebook_source(file, root) for file in sorted(root.glob("notebooks/*.ipynb"))]
    found = [f"{s.path}: {s.layer} is in no layer" for s in sources if s.layer not in LAYERS]
    for source in sources:
        if source.layer not in LAYERS:
            continue
        for node in ast.walk(source.tree):
            for level, module, name in imported(node):
                if why := violation(source, level, module, name, root):
                    found.append(f"{source.path}:{getattr(node, 'lineno', 0)}: {why}")
    return found


Files = Callable[[Path], list[Path]]


def test_imports_point_one_way(root: Path, package_files: Files) -> None:
    files = package_files(root)
    assert len(files) > 10  # the search itself works
    assert import_violations(root, files) == []


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("kernels/bad.py", "from ..engine import types", "kernels must not import engine"),
        ("kernels/bad.py", "from .. import engine", "kernels must not import engine"),
        ("engine/bad.py", "from ..guided.manager import Hook", "engine must not import guided"),
        ("engine/models/bad.py", "from ...llm import LLM", "engine must not import root modules"),
        ("engine/bad.py", "from .. import __version__", "engine must not import root modules"),
        ("guided/bad.py", "def f():\n    from ..speculative import verify", "import speculative"),
        (
            "engine/bad.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..guided import masks",
            "engine/bad.py:3: engine must not import guided",
        ),
        (
            "engine/bad.py",
            "import_module('..guided', __package__)",
            "engine must not import guided",
        ),
        ("speculative/bad.py", "from ..llm import LLM", "speculative must not import root modules"),
        ("llm.py", "from .experiments import e01", "root modules must not import experiments"),
        ("engine/bad.py", "import tightrope.kernels", "imports are relative"),
        ("engine/bad.py", "from kernels import bitmask", "bare import of kernels"),
        ("engine/bad.py", "import tests.helper", "bare import of tests"),
        ("engine/bad.py", "from ... import other", "beyond the package"),
        ("extras/__init__.py", "import os", "extras is in no layer"),
        ("engine/bad.py", "from .. import extras", "engine must not import root modules"),
    ],
)
def test_a_planted_import_is_found(
    plant: Callable[[str, str], Path], package_files: Files, name: str, code: str, message: str
) -> None:
    for package in ("kernels", "engine", "guided", "speculative", "experiments"):
        plant(f"{package}/ok.py", "import torch\nfrom . import ok\n")
    root = plant(
        "llm.py", "from .speculative import ok\nfrom .engine.ok import x\nimport os.path\n"
    )
    plant(
        "experiments/ok.py",
        "from ..llm import LLM\nfrom .. import guided\nfrom ..kernels import ok",
    )
    assert import_violations(root, package_files(root)) == []

    plant(name, code)
    (found,) = import_violations(root, package_files(root))
    assert message in found


def test_a_planted_import_in_a_notebook_is_found(
    plant: Callable[[str, str], Path], package_files: Files
) -> None:
    plant("engine/ok.py", "")

    def notebook(code: str) -> Path:
        cells = [
            {"cell_type": "markdown", "source": ["import engine"]},
            {"cell_type": "code", "source": ["%matplotlib inline\n", "import tightrope.engine.ok"]},
            {"cell_type": "code", "source": code},
        ]
        return plant("notebooks/n.ipynb", json.dumps({"cells": cells}))

    root = notebook("from tightrope import LLM")
    assert import_violations(root, package_files(root)) == []
    root = notebook("from engine import ok")
    (found,) = import_violations(root, package_files(root))
    assert "notebooks/n.ipynb:3: bare import of engine" in found
