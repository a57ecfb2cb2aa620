"""Tokens that the grammar forces, as drafts: keys, quotes and braces of a known schema.

They are accepted by construction, because each is the only token its mask allows, and come as the
tokenizer itself would write them. A run of m forced tokens costs one forward instead of m.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from ...engine.types import Draft
from ..protocol import Proposer, View


class ForcedProposer(Proposer):
    """Drafts for guided requests only."""

    where: Literal["host", "device"] = "host"
    obeys_grammar = True

    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        guided = view.guided
        if guided is None:
            return {}
        drafts: dict[str, Draft] = {}
        for request in view.requests:
            tokens = guided.forced(request.request_id, budget[request.request_id])
            if tokens:
                drafts[request.request_id] = Draft(tokens)
        return drafts

    def worth_waiting(self, view: View) -> Collection[str]:
        """Where at least two forced tokens lie behind those in flight, a forward is saved."""
        guided = view.guided
        if guided is None:
            return ()
        waiting: list[str] = []
        for request in view.requests:
            if request.in_flight is not None and guided.is_guided(request.request_id):
                needed = request.in_flight.num_draft + 1 + 2
                if len(guided.forced(request.request_id, needed)) == needed:
                    waiting.append(request.request_id)
        return waiting
