"""Every notebook runs from top to bottom in FAST mode; the committed ones carry their outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--nbmake",
        "-p",
        "no:cacheprovider",
        str(path),
    ]
    env = {**os.environ, "FAST": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_outputs(path: Path) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert "error" not in kinds
