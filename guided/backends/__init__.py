"""Grammar backends by name. A backend is one module and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol import BackendFactory, GrammarBackend


def _llguidance(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
    from .llguidance import LLGuidanceBackend  # imported when the first guide arrives

    return LLGuidanceBackend(tokenizer, vocab_size, eos_token_ids)


BACKENDS: Mapping[str, BackendFactory] = {"llguidance": _llguidance}
