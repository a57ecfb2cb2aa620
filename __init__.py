"""Tightrope: structured and speculative decoding of large language models, exact and pluggable.

Names are imported when they are first used, so ``import tightrope`` itself costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.hooks import EngineContext, Outcome, SchedulerHook, WorkerExtension
    from .engine.outputs import CompletionOutput, OutputMetrics, RequestOutput, StreamDelta
    from .engine.params import SamplingParams
    from .engine.types import (
        Draft,
        Entry,
        MaskRows,
        Request,
        RequestError,
        StepPlan,
        StepResult,
        TokenLogprob,
    )
    from .guided import Guide, GuideReport
    from .llm import LLM
    from .speculative import Proposer, SpeculationReport

__version__ = "0.1.0"

# Read when torch is first imported. OpenMP threads spin while they wait for each other, by default
# so long that one busy process beside it made a step of a small model 20 times as long (LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_MODULES = {
    "llm": ["LLM"],
    "engine.config": ["EngineConfig"],
    "engine.hooks": ["EngineContext", "Outcome", "SchedulerHook", "WorkerExtension"],
    "engine.outputs": ["CompletionOutput", "OutputMetrics", "RequestOutput", "StreamDelta"],
    "engine.params": ["SamplingParams"],
    "engine.types": [
        "Draft",
        "Entry",
        "MaskRows",
        "Request",
        "RequestError",
        "StepPlan",
        "StepResult",
        "TokenLogprob",
    ],
    "guided": ["Guide", "GuideReport"],
    "speculative": ["Proposer", "SpeculationReport"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Draft",
    "EngineConfig",
    "EngineContext",
    "Entry",
    "Guide",
    "GuideReport",
    "MaskRows",
    "Outcome",
    "OutputMetrics",
    "Proposer",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerHook",
    "SpeculationReport",
    "StepPlan",
    "StepResult",
    "StreamDelta",
    "TokenLogprob",
    "WorkerExtension",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
