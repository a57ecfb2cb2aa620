"""Structured decoding: grammars become mask rows, as a hook of the engine."""

from .guide import Guide, GuideReport
from .manager import GuidedHook
from .protocol import (
    BackendFactory,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarRefused,
    GrammarSpec,
    GuidedState,
)

__all__ = [
    "BackendFactory",
    "CompiledGrammar",
    "Grammar",
    "GrammarBackend",
    "GrammarRefused",
    "GrammarSpec",
    "Guide",
    "GuideReport",
    "GuidedHook",
    "GuidedState",
]
