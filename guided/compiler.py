"""Compiles guides off the engine's step, and keeps what was compiled.

One thread pool and one LRU cache, keyed by the guide itself and bounded in bytes. Requests with the
same guide share one compilation, also while it runs; a refusal is remembered too, so that the
second user of a broken guide hears of it at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..engine.hooks import EngineContext
from .guide import Guide
from .protocol import BackendFactory, CompiledGrammar, GrammarBackend, GrammarRefused


@dataclass(frozen=True)
class Compilation:
    """A compiled guide and what it took, in seconds."""

    grammar: CompiledGrammar
    seconds: float


class GuideCompiler:
    """``compile(guide)`` -> a future of a `Compilation`.

    Args:
        context: the engine, for its tokenizer, vocabulary and end tokens.
        backends: factories by name; "auto" tries them in order, each strictly and then leniently.
        cache_bytes: bound on the estimated size of the compiled grammars kept.
    """

    def __init__(
        self,
        context: EngineContext,
        backends: Mapping[str, BackendFactory],
        cache_bytes: int,
    ) -> None:
        self._context = context
        self._factories = backends
        self._cache_bytes = cache_bytes
        self._backends: dict[str, GrammarBackend] = {}
        self._lock = threading.Lock()
        self._cache: OrderedDict[Guide, Future[Compilation]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, guide: Guide) -> tuple[Future[Compilation], bool]:
        """The guide's future, and whether it was there already. Call from one thread only."""
        future = self._cache.get(guide)
        if future is not None:
            self._cache.move_to_end(guide)
            return future, True
        if self._pool is None:
            # At least two: a slow grammar must not hold up the others.
            self._pool = ThreadPoolExecutor(
                max(2, min(4, os.cpu_count() or 1)), thread_name_prefix="guide"
            )
        future = self._pool.submit(self._compile, guide)
        self._cache[guide] = future
        self._evict()
        return future, False

    def _evict(self) -> None:
        sizes = {guide: self._size(guide, future) for guide, future in self._cache.items()}
        total = sum(sizes.values())
        for guide, size in sizes.items():
            if total <= self._cache_bytes:
                break
            if self._cache[guide].done():
                del self._cache[guide]
                total -= size

    @staticmethod
    def _size(guide: Guide, future: Future[Compilation]) -> int:
        known = future.done() and not future.cancelled() and future.exception() is None
        return future.result().grammar.num_bytes if known else len(guide.source)

    def backend(self, name: str) -> GrammarBackend:
        """The backend of that name, built once (up to a second for a large vocabulary)."""
        with self._lock:
            if name not in self._backends:
                context = self._context
                self._backends[name] = self._factories[name](
                    context.tokenizer, context.vocab_size, sorted(context.eos_token_ids)
                )
            return self._backends[name]

    def _compile(self, guide: Guide) -> Compilation:
        names = list(self._factories) if guide.backend == "auto" else [guide.backend]
        refusal = GrammarRefused("unsupported", f"no backend for {guide.kind!r}")
        for name in names:
            backend = self.backend(name)
            start = time.perf_counter()
            for lenient in (False, True):
                try:
                    grammar = backend.compile(guide.spec(lenient=lenient))
                except GrammarRefused as error:
                    if error.kind != "unsupported":
                        raise
                    refusal = error
                    continue
                if grammar.unenforced and guide.on_unenforced == "refuse":
                    keywords = ", ".join(grammar.unenforced)
                    refusal = GrammarRefused("unsupported", f"{name} cannot enforce {keywords}")
                    continue
                return Compilation(grammar, time.perf_counter() - start)
        raise refusal

    def close(self) -> None:
        """Stop the threads; a compilation that runs is left to end by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for backend in self._backends.values():
            backend.close()
