"""Many callers, one engine: who may step it, and what an interrupt may not tear apart.

There is no background thread. Whoever waits for tokens takes the lock, advances the engine by one
step, which serves every request in it, and looks whether its own have news. The lock is handed over
in order of arrival, so callers in several threads take turns, and two generators that are read
alternately in one thread drive the same engine.

Ctrl-C is held back while the engine's state changes and delivered between steps; a second one does
not wait.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from .core import EngineCore
from .types import Request

T = TypeVar("T")


class FairLock:
    """A lock handed over in order of arrival. Taking it twice in one thread is an error."""

    def __init__(self) -> None:
        # Re-entrant: garbage collection may close an abandoned stream at any allocation.
        self._guard = threading.RLock()
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner == me:
                raise RuntimeError(
                    "the engine is in the middle of a step of this thread: generate, chat, stream "
                    "and close cannot be called from a hook or a signal handler"
                )
            if self._owner is None:
                self._owner = me
                return
            gate = threading.Lock()
            gate.acquire()
            place = (me, gate)
            self._waiting.append(place)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C while waiting: leave the queue
            with self._guard:
                if place in self._waiting:
                    self._waiting.remove(place)
                else:
                    self._hand_over()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        self._owner = None
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            gate.release()


@contextmanager
def interrupts_held() -> Generator[None]:
    """Deliver a Ctrl-C at the end of the block. A second one is delivered at once."""
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if caught:
            before(number, frame)
        caught.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(caught) == 1:
        before(*caught[0])


class Driver:
    """Shares an `EngineCore` between callers. All methods may be called from any thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._lock = FairLock()
        self._live: dict[str, Request] = {}
        self._abandoned: deque[Request] = deque()
        self._dead: str | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Add all of them or none.

        Raises:
            ValueError: the engine or a hook refuses one.
            RuntimeError: called from a hook, or the engine is closed or has failed.
        """
        with interrupts_held(), self._lock:
            self._check_alive()
            self._abort_abandoned()
            added: list[Request] = []
            try:
                for request in requests:
                    self.core.add(request)
                    added.append(request)
                    self._live[request.request_id] = request
            except BaseException:
                self._abort(added)
                raise

    def ended(self, *requests: Request) -> bool:
        """Whether all of them have ended and their reports are in."""
        return not any(request.request_id in self._live for request in requests)

    def wait_for(self, poll: Callable[[], T | None]) -> T:
        """Step the engine until ``poll()`` gives something. It is called between steps, under the
        lock, so it sees no request half committed; other callers get their turn in between."""
        while True:
            with interrupts_held(), self._lock:
                found = poll()
                if found is not None:
                    return found
                self._check_alive()
                self._abort_abandoned()
                self._step()

    def abort(self, requests: Sequence[Request]) -> None:
        """End what still runs of these with ``abort``. Never raises, whatever state the engine is
        in: this is what cleaning up calls."""
        left = [request for request in requests if request.request_id in self._live]
        if not left:
            return
        if self._lock.mine:  # a stream was closed, or collected as garbage, during a step
            self._abandoned.extend(left)
            return
        with interrupts_held(), self._lock:
            if self._dead is None:
                self._abort(left)
                self._drain()

    def stats(self) -> dict[str, Any]:
        """The core's counters and gauges."""
        if self._lock.mine:
            return dict(self.core.stats())
        with self._lock:
            return dict(self.core.stats())

    def close(self) -> None:
        """Abort everything and free the engine. Closing twice does nothing."""
        with interrupts_held(), self._lock:
            if self._dead is None:
                self._dead = "the LLM is closed"
                self.core.close()
                self._live.clear()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise RuntimeError(self._dead)

    def _step(self) -> None:
        try:
            for request in self.core.step():
                if request.finished:
                    self._live.pop(request.request_id, None)
            self._drain()
        except BaseException as error:
            # Half a step cannot be undone; saying so beats serving from a broken state.
            self._dead = (
                f"the engine failed in a step ({type(error).__name__}: {error}) and cannot go on; "
                "make a new LLM"
            )
            self._live.clear()
            raise

    def _drain(self) -> None:
        """Let a step that was launched ahead come in once nobody waits for anything."""
        while not self._live and self.core.has_unfinished():
            self.core.step()

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.core.abort(request.request_id)
            self._live.pop(request.request_id, None)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self._abort([self._abandoned.popleft()])
