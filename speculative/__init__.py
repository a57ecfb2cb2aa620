"""Speculative decoding: drafts proposed on the host, verified by the engine."""

from ..engine.types import Draft
from .config import SpeculationConfig
from .hook import SpeculationReport, SpeculativeHook
from .proposers import PROPOSERS, find_proposer
from .proposers.forced import ForcedProposer
from .protocol import Proposer, View

__all__ = [
    "PROPOSERS",
    "Draft",
    "ForcedProposer",
    "Proposer",
    "SpeculationConfig",
    "SpeculationReport",
    "SpeculativeHook",
    "View",
    "find_proposer",
]
