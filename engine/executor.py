"""How plans reach workers. The engine core knows only this seam.

`execute` launches the target forward and returns at once with a flight; `sample` launches the head,
masks, verification and sampling behind it and returns a pending result. Only `PendingResult.wait`
may wait for the device.
"""

from __future__ import annotations

from typing import Protocol

from .runner import Flight
from .types import MaskRows, StepPlan, StepResult
from .worker import Worker


class PendingResult(Protocol):
    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Called once."""
        ...


class Executor(Protocol):
    @property
    def most_drafts(self) -> int:
        """Tokens that worker extensions draft behind each sampled token."""
        ...

    def execute(self, plan: StepPlan) -> Flight:
        """Launch the forward of a closed, non-empty plan."""
        ...

    def sample(self, flight: Flight, masks: MaskRows | None) -> PendingResult:
        """Launch everything behind the forward. ``masks`` may come late, never after this."""
        ...

    def stats(self) -> dict[str, float]:
        """Host seconds of the workers, summed over steps."""
        ...

    def close(self) -> None:
        """Free the workers."""
        ...


class InlineExecutor:
    """One worker in this process and thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def most_drafts(self) -> int:
        return max((e.num_draft for e in self.worker.extensions), default=0)

    def execute(self, plan: StepPlan) -> Flight:
        return self.worker.execute(plan)

    def sample(self, flight: Flight, masks: MaskRows | None) -> PendingResult:
        return self.worker.sample(flight, masks)

    def stats(self) -> dict[str, float]:
        return {"prepare_seconds": self.worker.runner.prepare_seconds}

    def close(self) -> None:
        pass
