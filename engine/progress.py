"""A progress bar for long calls: on stderr, and only where somebody looks at it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from .types import Request

_LONG = 1.0  # seconds after which work counts as long
_REFRESH = 0.1  # seconds between looks at the counts


def _watched() -> bool:
    """Whether stderr is a terminal, or this is a notebook."""
    if "ipykernel" in sys.modules:
        return True
    return sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]


class CallProgress:
    """Prompts done and tokens a second of one call.

    Args:
        groups: the requests of each prompt.
        show: True from the start, False never, None once the work turns out to be long and
            somebody watches.
    """

    def __init__(self, groups: Sequence[Sequence[Request]], show: bool | None) -> None:
        self._groups = groups
        self._show = _watched() if show is None else show
        self._start = time.monotonic()
        self._due = self._start + (_LONG if show is None else 0.0)
        self._bar: Any = None
        self._task: Any = None

    def update(self) -> None:
        """Cheap; redraws at most every tenth of a second."""
        if not self._show or time.monotonic() < self._due:
            return
        if self._bar is None:
            self._open()
        self._draw()
        self._due = time.monotonic() + _REFRESH

    def close(self) -> None:
        """Leave the last state on screen."""
        if self._bar is not None:
            self._draw()
            self._bar.stop()
            self._bar = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            Elapsed(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("generating", total=len(self._groups), speed=0.0)
        self._bar.start()

    def _draw(self) -> None:
        tokens = sum(request.num_output for group in self._groups for request in group)
        done = sum(all(request.finished for request in group) for group in self._groups)
        speed = tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.update(self._task, completed=done, speed=speed)
