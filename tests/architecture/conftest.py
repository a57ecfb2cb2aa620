"""What the architecture tests share: where the project lies and which files are its package.

Every rule is a function of a root folder that returns its violations as lines, so that each is also
run on a small tree with a planted violation.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

NOT_PACKAGED = {"tests", "notebooks", "build", "dist"}


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root, which is the package."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def package_files() -> Callable[[Path], list[Path]]:
    """Every Python file of the package under a root, sorted; never those of an environment."""

    def find(root: Path) -> list[Path]:
        folders = [
            folder
            for folder in root.iterdir()
            if folder.is_dir()
            and folder.name not in NOT_PACKAGED
            and not folder.name.startswith((".", "__"))
            and not folder.name.endswith(".egg-info")
        ]
        nested = (file for folder in folders for file in folder.rglob("*.py"))
        return sorted([*root.glob("*.py"), *nested])

    return find


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file, and the ``__init__.py`` of its packages, into one tree; returns its root."""

    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".py":
            for folder in file.relative_to(tmp_path).parents:
                (tmp_path / folder / "__init__.py").touch()
        file.write_text(text)
        return tmp_path

    return write
