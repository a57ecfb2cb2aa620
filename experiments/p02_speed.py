"""How fast is the engine beside transformers, and what does a grammar cost?

Two CPU cores, float32, the same weights, interleaved pairs in one process. Expected: at least 1.3x
transformers' tokens a second at batch 1, 1.15x at batch 16, and guided decoding at least 0.95x of
the engine's own unguided step (an array of integers, forced drafts off; each run's median step).

transformers runs ``generate`` with its default (dynamic) cache on prompts of equal length, so it
pays for no padding. Both sides generate a fixed number of tokens; the time includes the prompt.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.hooks import SchedulerHook
from ..engine.models.smollm2 import ensure_smollm2
from ..engine.params import SamplingParams
from ..engine.types import StepPlan, StepResult
from ..guided import Guide
from ..llm import LLM
from .records import STOLEN_CORE, conclude, contention, folder_argument, interleaved, write
from .reference import greedy, transformers_model

ARRAY = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 100,
    "maxItems": 400,
}


class StepClock(SchedulerHook):
    """When each step was over. The median distance is a step's time without the compilation, the
    prompt and the moments at which a neighbour had the core."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.times.append(time.perf_counter())

    def median_step(self, call: Callable[[], object]) -> float:
        self.times.clear()
        call()
        return statistics.median(after - before for before, after in itertools.pairwise(self.times))


@dataclass(frozen=True)
class Config:
    num_tokens: int = 32
    pairs: int = 7
    guided_pairs: int = 15
    batches: tuple[int, ...] = (1, 16)


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    """Chat prompts of one length: the message's number has always two digits."""
    render: Any = llm.get_tokenizer().apply_chat_template
    texts = [
        f"Explain in detail the number {i} and tell a long story about it."
        for i in range(10, 10 + count)
    ]
    return [
        list(render([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"])
        for t in texts
    ]


def _timed(call: Callable[[], int]) -> float:
    """Seconds a token."""
    began = time.perf_counter()
    tokens = call()
    return (time.perf_counter() - began) / tokens


def run(config: Config) -> dict[str, Any]:
    """Ratios: seconds a token of transformers over ours, of unguided over guided. Above 1 wins."""
    path = ensure_smollm2()
    reference = transformers_model(path)
    results: dict[str, Any] = {"contention_before": contention()}
    plain = SamplingParams(temperature=0, max_tokens=config.num_tokens, ignore_eos=True)
    guided = SamplingParams(
        temperature=0, max_tokens=config.num_tokens, guide=Guide.json(ARRAY), speculation=False
    )
    # Repeated prompts would hit the prefix cache, which transformers has not.
    clock = StepClock()
    with LLM(
        path, dtype="float32", enable_prefix_caching=False, max_model_len=512, hooks=[clock]
    ) as llm:

        def ours(prompts: list[list[int]], params: SamplingParams) -> int:
            outputs = llm.generate(prompts, params, progress=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        def theirs(prompts: list[list[int]]) -> int:
            return sum(map(len, greedy(reference, prompts, config.num_tokens)))

        for batch in config.batches:
            prompts = _prompts(llm, batch)
            results[f"transformers_over_ours_{batch}"] = interleaved(
                lambda p=prompts: _timed(lambda: theirs(p)),
                lambda p=prompts: _timed(lambda: ours(p, plain)),
                pairs=config.pairs,
            ).summary()
            results[f"unguided_over_guided_{batch}"] = interleaved(
                lambda p=prompts: clock.median_step(lambda: ours(p, plain)),
                lambda p=prompts: clock.median_step(lambda: ours(p, guided)),
                pairs=config.guided_pairs,
            ).summary()
    results["contention_after"] = contention()
    worst = max(results["contention_before"], results["contention_after"])
    results["stolen_core"] = worst > STOLEN_CORE
    wanted = {"transformers_over_ours_1": 1.3, "transformers_over_ours_16": 1.15}
    wanted |= {f"unguided_over_guided_{batch}": 0.95 for batch in config.batches}
    results["holds"] = all(results[name]["ratio"] >= least for name, least in wanted.items())
    return results


def main() -> None:
    folder = folder_argument(__doc__)
    conclude(write(folder, "p02_speed", Config(), run(Config())))


if __name__ == "__main__":
    main()
