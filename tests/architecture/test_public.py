"""Public names resolve and are documented."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# What users and authors of hooks, grammars, proposers and models read.
DOCUMENTED = [
    "engine/attention.py",
    "engine/config.py",
    "engine/hooks.py",
    "engine/outputs.py",
    "engine/params.py",
    "engine/types.py",
    "guided/guide.py",
    "guided/protocol.py",
    "llm.py",
    "speculative/protocol.py",
]

Files = Callable[[Path], list[Path]]


def exporting_modules(root: Path, files: list[Path]) -> list[str]:
    """Dotted names of the modules that assign ``__all__``."""
    return [
        ".".join(("tightrope", *file.relative_to(root).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for file in files
        if "__all__" in assigned(ast.parse(file.read_text()))
    ]


def assigned(tree: ast.Module) -> set[str]:
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def unresolved(module: ModuleType) -> list[str]:
    names: list[str] = list(module.__all__)
    missing = [f"{module.__name__}.{name}" for name in names if not hasattr(module, name)]
    return missing + [f"{module.__name__}.{name} twice" for name in names if names.count(name) > 1]


def undocumented(root: Path, files: list[Path]) -> list[str]:
    """Public classes and functions without a docstring, and modules without a design note."""
    found: list[str] = []
    for file in files:
        path = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text())
        if tree.body and ast.get_docstring(tree) is None:
            found.append(path)
        if path in DOCUMENTED:
            found += [
                f"{path}: {node.name}"
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and ast.get_docstring(node) is None
            ]
    return found


def test_every_name_in_all_resolves(root: Path, package_files: Files) -> None:
    modules = exporting_modules(root, package_files(root))
    assert [name for m in modules for name in unresolved(importlib.import_module(m))] == []


def test_public_names_are_documented(root: Path, package_files: Files) -> None:
    assert undocumented(root, package_files(root)) == []


def test_a_planted_missing_name_is_found(
    plant: Callable[[str, str], Path], package_files: Files
) -> None:
    plant("engine/plain.py", "x = 1")
    plant("engine/models/names.py", "__all__: list[str] = []")
    root = plant("engine/__init__.py", "__all__ = ['x', 'y']")
    assert exporting_modules(root, package_files(root)) == [
        "tightrope.engine",
        "tightrope.engine.models.names",
    ]
    module = ModuleType("m")
    module.__dict__.update({"__all__": ["x", "y", "x"], "x": 1})
    assert unresolved(module) == ["m.y", "m.x twice", "m.x twice"]


@pytest.mark.parametrize("code", ["def run(): ...", "async def run(): ...", "class run: ..."])
def test_a_planted_undocumented_name_is_found(
    plant: Callable[[str, str], Path], package_files: Files, code: str
) -> None:
    root = plant("engine/hooks.py", f'"""Note."""\ndef _private(): ...\n{code}')
    plant("engine/scheduler.py", f'"""Only its note is asked for."""\n{code}')
    assert undocumented(root, package_files(root)) == ["engine/hooks.py: run"]
    plant("engine/scheduler.py", code)
    assert undocumented(root, package_files(root)) == [
        "engine/hooks.py: run",
        "engine/scheduler.py",
    ]
