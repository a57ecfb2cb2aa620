"""The wheel holds the package, all of it and nothing else, and works without the repository.

It is built from a copy, since building leaves files behind, and imported by a process whose path
starts with the unpacked wheel, so that neither the current folder nor the editable install helps.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGED = {"tests", "notebooks", "build", "dist"}

IMPORT_ALL = """
import importlib, sys
unpacked, *names = sys.argv[1:]
sys.path.insert(0, unpacked)
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(unpacked), module.__file__
print(len(names))
"""


def package_files() -> set[str]:
    """What the wheel must hold besides its metadata, as paths within it."""
    files = [*ROOT.glob("*.py"), ROOT / "py.typed"]
    for folder in ROOT.iterdir():
        if folder.name not in NOT_PACKAGED and not folder.name.startswith("."):
            files += folder.rglob("*.py")
    return {f"tightrope/{file.relative_to(ROOT).as_posix()}" for file in files}


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-P", *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    junk = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    shutil.copytree(ROOT, folder / "source", ignore=junk)
    pip = ("-m", "pip", "--disable-pip-version-check", "wheel", "-q")
    run(*pip, "--no-deps", "--no-build-isolation", "-w", str(folder), "./source", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == package_files()
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_every_module_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    modules = [
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        for name in sorted(package_files())
        if name.endswith(".py")
    ]
    out = run("-c", IMPORT_ALL, str(unpacked), *modules, cwd=tmp_path)
    assert int(out.split()[-1]) == len(modules)
