"""The seams of structured decoding: what a backend must do, and what other hooks may ask.

A `GrammarBackend` turns a `GrammarSpec` into a `CompiledGrammar`, off the engine's step and as slow
as it must be. Each request gets its own `Grammar` (a matcher) from it. The matcher follows
committed tokens only: drafts are tried and taken back inside one `fill`, so that preemption,
refused drafts and steps in flight need no bookkeeping here.

Masks are packed rows: int32 ``[N, ceil(vocab / 32)]``, bit i of word j allows token ``32 j + i``.
The layout is the same for all backends, so one batch may mix them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

RefusalKind = Literal["invalid", "unsatisfiable", "limit", "unsupported"]
Bitmask = NDArray[np.int32]


class GrammarRefused(ValueError):  # noqa: N818 (a verdict, not a fault)
    """A backend does not take a grammar.

    ``kind``: "invalid" (not well-formed), "unsatisfiable" (no text matches), "limit" (too large or
    too complex), "unsupported" (well-formed, but this backend cannot enforce it; another may).
    """

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        super().__init__(f"{kind} guide: {reason}")
        self.kind: RefusalKind = kind
        self.reason = reason


@dataclass(frozen=True)
class GrammarSpec:
    """What a backend compiles.

    ``kind``: the language of ``source`` ("json": a JSON schema as JSON text). ``max_whitespace``:
    longest run of optional whitespace, 0 for none. ``lenient``: keywords that the backend cannot
    enforce are dropped and reported instead of refused.
    """

    kind: str
    source: str
    max_whitespace: int = 16
    lenient: bool = False


class Grammar(Protocol):
    """The matcher of one request. It has consumed the committed tokens and nothing else."""

    @property
    def error(self) -> str | None:
        """Why the matcher is unusable, or None. Errors stay."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end of the text can follow."""
        ...

    def accept(self, tokens: Sequence[int]) -> bool:
        """Consume tokens. False: one of them is refused and the matcher is in error.

        May be wider than the mask where text is forced (another split of the same bytes).
        """
        ...

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        ...

    def forced(self, limit: int = 32) -> list[int]:
        """Next tokens, at most ``limit``, each of which is the only one that its mask allows."""
        ...

    def fork(self) -> Grammar:
        """An independent matcher in the same state."""
        ...


# A matcher, the first of its 1 + len(drafts) mask rows, and the draft tokens.
FillJob = tuple[Grammar, int, Sequence[int]]


class CompiledGrammar(Protocol):
    """An immutable grammar, shared by requests and threads."""

    @property
    def backend(self) -> GrammarBackend: ...

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords that were dropped."""
        ...

    @property
    def num_bytes(self) -> int:
        """Estimated memory, for the cache."""
        ...

    def start(self) -> Grammar:
        """A matcher at the start of the text."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars and fills masks with the library's own batch call."""

    name: str

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile; thread-safe, called off the step. Raises `GrammarRefused`."""
        ...

    def fill(self, jobs: Sequence[FillJob], bitmask: Bitmask) -> list[int]:
        """Fill rows ``first .. first + len(drafts)`` of ``bitmask`` for each job.

        Row ``first + i`` is the mask after the committed tokens and ``drafts[:i]``. Matchers end as
        they began. Returns for each job how many leading drafts are allowed, or -1 if its matcher
        is in error. Rows behind a refused draft or an end token, and all rows of a matcher in
        error, allow everything.
        """
        ...

    def close(self) -> None:
        """Stop threads and processes."""
        ...


class BackendFactory(Protocol):
    """How the manager builds a backend: from a ``tokenizers.Tokenizer`` and the head's size."""

    def __call__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> GrammarBackend: ...


class GuidedState(Protocol):
    """What speculation may ask of the guided hook. Requests without a guide are unconstrained."""

    def is_guided(self, request_id: str) -> bool:
        """Whether the request is constrained by a grammar."""
        ...

    def forced(self, request_id: str, limit: int = 32) -> list[int]:
        """Tokens that must follow, at most ``limit``: each the only one allowed there."""
        ...

    def validate(self, request_id: str, tokens: Sequence[int]) -> int:
        """How many leading tokens the masks allow, one after the other."""
        ...
