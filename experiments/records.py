"""Records of measurements: one JSON object a line, each with what is needed to judge it alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "llguidance", "tokenizers", "numpy")
STOLEN_CORE = 1.15
"""Two busy processes slower than one by more than this: a core is shared with strangers."""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name")), "")


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def environment() -> dict[str, Any]:
    """Hardware, versions and the commit that a record was made on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "git_sha": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


_SPIN = """
import time
began = time.perf_counter()
total = 0
for i in range(4_000_000):
    total += i * i % 7
print(time.perf_counter() - began)
"""


def _spin(processes: int) -> float:
    """Seconds of the slowest of some processes that are busy at once."""
    command = [sys.executable, "-c", _SPIN]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    return max(float(process.communicate()[0]) for process in running)


def contention() -> float:
    """How much slower two busy processes run than one; 1.0 on a machine with two free cores.

    The best of three: what matters is whether the second core exists, not a passing blip.
    """
    return min(_spin(2) for _ in range(3)) / min(_spin(1) for _ in range(3))


def write(folder: Path, name: str, config: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Append one record to ``folder/name.jsonl`` and return it."""
    settings = dataclasses.asdict(config)
    record = {"experiment": name, "config": settings, "metrics": dict(metrics), **environment()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Seconds of two arms, run in turns; ``ratio`` is ``first / second`` of each pair."""

    first: list[float]
    second: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Median ratio with its spread (least, most) and the medians of both arms."""
        return {
            "ratio": statistics.median(self.ratios),
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "first": statistics.median(self.first),
            "second": statistics.median(self.second),
            "pairs": len(self.first),
        }


def interleaved(first: Callable[[], float], second: Callable[[], float], *, pairs: int) -> Pairs:
    """Run two arms in turns, swapping who goes first, after one warm-up each. An arm returns its
    own seconds (for each token, or whatever is compared)."""
    first()
    second()
    result = Pairs([], [])
    for i in range(pairs):
        for arm, seconds in ((first, result.first), (second, result.second))[:: 1 - 2 * (i % 2)]:
            seconds.append(arm())
    return result


def conclude(record: Mapping[str, Any]) -> None:
    """Print a proof's metrics; leave with exit code 1 where it does not hold."""
    print(record["experiment"])
    for name, value in record["metrics"].items():
        print(f"  {name}: {value}")
    if not record["metrics"]["holds"]:
        raise SystemExit(f"{record['experiment']} does not hold")


def folder_argument(description: str | None) -> Path:
    """``--out DIR`` of a script; by default the committed results of this kind of hardware."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).resolve().parent / "results" / "cpu"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR")
    return parser.parse_args().out
