"""The seam of speculation: a proposer guesses next tokens, the engine verifies them.

A proposer is one class with `propose`. It never decides what is emitted: drafts are verified
one-hot, so any proposer, good or bad, leaves the law of the output as it is and changes speed only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..engine.types import Draft, Request
from ..guided.protocol import GuidedState


@dataclass(frozen=True)
class View:
    """What a proposer sees: requests whose committed tokens are all known, and their grammars.

    ``guided`` is None in an engine without grammars.
    """

    requests: Sequence[Request]
    guided: GuidedState | None = None


class Proposer(Protocol):
    """Guesses what comes next. Subclass it, or write a class of your own with these names."""

    where: Literal["host", "device"] = "host"
    """Where the drafts are made."""

    obeys_grammar: bool = False
    """Whether its drafts for guided requests are allowed by the grammar already; others are cut
    where the grammar refuses."""

    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        """Drafts by request id, for any of ``view.requests``; ``budget`` is the most useful length
        of each. Longer drafts are cut. Called once before every step."""
        ...

    def worth_waiting(self, view: View) -> Collection[str]:
        """Ids of requests that should sit one step out to be drafted for.

        Only asked when steps overlap, with requests whose last step is still in flight
        (``request.in_flight``): launched ahead, they would get no host drafts at all.
        """
        return ()

    def observe(self, view: View) -> None:
        """These requests have new committed tokens (``request.token_ids``)."""

    def release(self, request_id: str) -> None:
        """The request has ended: forget it."""
