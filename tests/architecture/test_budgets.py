"""Files stay under 400 lines and functions under 80; the list of packages is the folders."""

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 80

Files = Callable[[Path], list[Path]]


def budget_violations(root: Path, files: list[Path]) -> list[str]:
    found: list[str] = []
    for file in files:
        text = file.read_text()
        path = file.relative_to(root)
        if (lines := len(text.splitlines())) > FILE_LINES:
            found.append(f"{path}: {lines} lines of {FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found.append(f"{path}: {node.name} has {lines} lines of {FUNCTION_LINES}")
    return found


def package_violations(root: Path, files: list[Path]) -> list[str]:
    """Differences between ``packages`` in pyproject.toml and the folders that hold Python files."""
    listed: list[str] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {file.parent.relative_to(root) for file in files}
    found = [
        f"{folder}: no __init__.py"
        for folder in folders
        if not (root / folder / "__init__.py").exists()
    ]
    names = {".".join(("tightrope", *folder.parts)) for folder in folders}
    found += [f"{name}: a folder that pyproject.toml does not list" for name in names - set(listed)]
    found += [f"{name}: listed in pyproject.toml, no such folder" for name in set(listed) - names]
    return sorted(found)


def test_files_and_functions_stay_in_budget(root: Path, package_files: Files) -> None:
    files = [*package_files(root), *(root / "tests").rglob("*.py")]
    assert budget_violations(root, files) == []


def test_packages_are_the_folders(root: Path, package_files: Files) -> None:
    assert package_violations(root, package_files(root)) == []


def test_a_planted_excess_is_found(plant: Callable[[str, str], Path], package_files: Files) -> None:
    full = "def f():\n" + "    pass\n" * (FUNCTION_LINES - 1)
    plant("engine/full.py", full + "#\n" * (FILE_LINES - FUNCTION_LINES))
    root = plant("engine/method.py", "class C:\n    async def m(self):\n" + "        pass\n" * 79)
    assert budget_violations(root, package_files(root)) == []

    plant("engine/full.py", full + "    pass\n" + "#\n" * (FILE_LINES - FUNCTION_LINES))
    plant("engine/method.py", "class C:\n    async def m(self):\n" + "        pass\n" * 80)
    assert budget_violations(root, package_files(root)) == [
        "engine/full.py: 401 lines of 400",
        "engine/full.py: f has 81 lines of 80",
        "engine/method.py: m has 81 lines of 80",
    ]


def test_a_planted_folder_is_found(plant: Callable[[str, str], Path], package_files: Files) -> None:
    plant("engine/models/llama.py", "")
    listing = '[tool.setuptools]\npackages = ["tightrope", "tightrope.engine", "{}"]'
    root = plant("pyproject.toml", listing.format("tightrope.engine.models"))
    assert package_violations(root, package_files(root)) == []

    plant("pyproject.toml", listing.format("tightrope.gone"))
    (root / "engine" / "models" / "__init__.py").unlink()
    assert package_violations(root, package_files(root)) == [
        "engine/models: no __init__.py",
        "tightrope.engine.models: a folder that pyproject.toml does not list",
        "tightrope.gone: listed in pyproject.toml, no such folder",
    ]
