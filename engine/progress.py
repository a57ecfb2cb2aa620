"""Progress of long calls: on stderr, and only where somebody looks at it.

A terminal gets a bar. A notebook gets one line that is written anew: rich's bar would need widgets.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from .types import Request

_LONG = 1.0  # seconds after which work counts as long
_REFRESH = 0.1  # seconds between looks at the counts


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _watched() -> bool:
    """Whether this is a notebook, or stderr a terminal."""
    stderr: Any = sys.stderr  # None in programs without a console
    return _in_notebook() or (stderr is not None and stderr.isatty())


class CallProgress:
    """Prompts done and tokens a second of one call.

    Args:
        groups: the requests of each prompt.
        show: True from the start, False never, None when several prompts turn out to take long
            and somebody watches.
    """

    def __init__(self, groups: Sequence[Sequence[Request]], show: bool | None) -> None:
        self._groups = groups
        self._show = len(groups) > 1 and _watched() if show is None else show
        self._start = time.monotonic()
        self._due = self._start + (_LONG if show is None else 0.0)
        self._bar: Any = None

    def update(self) -> None:
        """Cheap; redraws at most every tenth of a second."""
        if self._show and time.monotonic() >= self._due:
            if self._bar is None:
                self._bar = _Line() if _in_notebook() else _rich_bar(len(self._groups))
            self._draw()
            self._due = time.monotonic() + _REFRESH

    def close(self) -> None:
        """Leave the last state on screen."""
        if self._bar is not None:
            self._draw()
            self._bar.stop()
            self._bar = None

    def _draw(self) -> None:
        tokens = sum(request.num_output for group in self._groups for request in group)
        done = sum(all(request.finished for request in group) for group in self._groups)
        speed = tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.update(0, completed=done, total=len(self._groups), speed=speed)


class _Line:
    """One line, written over itself."""

    def update(self, _task: int, *, completed: int, total: int, speed: float) -> None:
        line = f"\rgenerating {completed}/{total}, {speed:.0f} tokens/s   "
        print(line, end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        print(file=sys.stderr)


def _rich_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    bar = Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
        Elapsed(),
        console=Console(stderr=True),
    )
    bar.add_task("generating", total=total, speed=0.0)
    bar.start()
    return bar
