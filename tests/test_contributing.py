"""The examples in CONTRIBUTING.md, put into a copy of the repository and run there.

A comment above a block says what it is: ``<!-- file: path -->`` a whole new file,
``<!-- edit: path -->`` the change of an existing one. Paths in ``my/`` lie outside the package, as
a user's own files do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>file|edit): (?P<path>\S+) -->\n)?"
    r"```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COPIED = ("engine", "guided", "speculative", "kernels", "experiments", "tests/architecture")


@dataclass(frozen=True)
class Block:
    kind: str | None
    path: str
    language: str
    body: str


def blocks() -> list[Block]:
    return [
        Block(found["kind"], found["path"] or "", found["language"], found["body"])
        for found in BLOCK.finditer(TEXT)
    ]


def edited(text: str, diff: str) -> str:
    """Apply a change whose old lines must lie in ``text`` once and together."""
    lines = diff.splitlines(keepends=True)
    lines = [" \n" if line == "\n" else line for line in lines]  # editors strip blanks
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, f"the change fits {text.count(old)} places:\n{diff}"
    return text.replace(old, new)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package under its own name, every example in its place, and ``my``."""
    folder = tmp_path_factory.mktemp("workshop")
    root = folder / "tightrope"
    for name in COPIED:
        skip = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    for file in [*ROOT.glob("*.py"), *ROOT.glob("py*"), ROOT / "tests" / "conftest.py"]:
        shutil.copy(file, root / file.relative_to(ROOT))
    for block in blocks():
        if block.kind == "file":
            file = (folder if block.path.startswith("my/") else root) / block.path
            assert not file.exists(), f"{block.path} exists: choose another example"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body, encoding="utf-8")
        elif block.kind == "edit":
            file = root / block.path
            file.write_text(edited(file.read_text("utf-8"), block.body), encoding="utf-8")
    return folder


def run(workshop: Path, *arguments: str) -> None:
    """``python -m`` with the copy in front of the installed package."""
    paths = f"{workshop}{os.pathsep}{workshop / 'my'}"
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=workshop / "tightrope",
        env=os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def example_files(workshop: Path) -> Iterator[str]:
    for block in blocks():
        if block.kind == "file":
            mine = block.path.startswith("my/")
            yield str((workshop if mine else workshop / "tightrope") / block.path)


def test_every_block_of_code_is_run() -> None:
    found = blocks()
    assert TEXT.count("\n```") == 2 * len(found)  # the search itself misses none
    for block in found:
        wanted = {"python": "file", "diff": "edit"}.get(block.language)
        assert block.kind == wanted, f"{block.language} block without its comment:\n{block.body}"


def test_the_examples_pass(workshop: Path) -> None:
    files = list(example_files(workshop))
    tests = [file for file in files if Path(file).name.startswith("test_")]
    assert len(tests) == 4
    rules = ["tests/architecture/test_imports.py", "tests/architecture/test_budgets.py"]
    rules += ["tests/architecture/test_synchronising.py"]
    unused = ("cacheprovider", "hypothesispytest", "nbmake", "anyio")  # slow to import
    options = [option for name in unused for option in ("-p", f"no:{name}")]
    run(workshop, "pytest", "-q", "-x", *options, *tests, *rules)


def test_the_examples_keep_the_house_style(workshop: Path) -> None:
    files = list(example_files(workshop))
    settings = str(workshop / "tightrope" / "pyproject.toml")
    run(workshop, "ruff", "check", "-q", "--no-cache", "--config", settings, *files)
    run(workshop, "ruff", "format", "-q", "--check", "--no-cache", "--config", settings, *files)


def test_what_the_text_names_exists() -> None:
    examples = {block.path for block in blocks()}
    prose = BLOCK.sub("", TEXT)
    paths = set(re.findall(r"`([\w.]+/[\w./]*)`", prose))
    assert len(paths) > 10
    assert [p for p in sorted(paths) if p not in examples and not (ROOT / p).exists()] == []
    targets = set(re.findall(r"make (\w+)", "".join(re.findall(r"`[^`]+`", prose))))
    listed = {b.body for b in blocks() if b.language == "console"}
    targets |= set(re.findall(r"^\$ make (\w+)", "".join(listed), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {t for t in targets if f"\n{t}:" not in makefile} == set()
    assert {"check", "test", "proof"} <= targets
