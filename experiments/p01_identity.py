"""Does SmolLM2 in this engine say what it says in transformers?

Float32, greedy, 20 prompts x 64 tokens. Expected: the same tokens; where rounding decides between
two words, the two best logits of a teacher-forced pass lie within 1e-3, in at most 2 of 20 prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.models.smollm2 import ensure_smollm2
from ..engine.params import SamplingParams
from ..llm import LLM
from .prompts import PROMPTS
from .records import conclude, folder_argument, write
from .reference import greedy, transformers_model


@dataclass(frozen=True)
class Config:
    num_prompts: int = 20
    num_tokens: int = 64
    tolerance: float = 1e-3


def run(config: Config) -> dict[str, Any]:
    """Compare all prompts. ``gaps``: the logit gap at each first difference."""
    path = ensure_smollm2()
    reference = transformers_model(path)
    params = SamplingParams(temperature=0, max_tokens=config.num_tokens, ignore_eos=True)
    with LLM(path, dtype="float32") as llm:
        outputs = llm.generate(list(PROMPTS[: config.num_prompts]), params)
    gaps: list[float] = []
    for output in outputs:
        prompt, ours = output.prompt_token_ids, output.outputs[0].token_ids
        theirs = greedy(reference, [prompt], config.num_tokens)[0]
        first = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), None
        )
        if first is not None:
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + theirs[:first]])).logits[0, -1]
            best = logits.topk(2).values
            gaps.append(float(best[0] - best[1]))
    return {
        "prompts": len(outputs),
        "different": len(gaps),
        "gaps": gaps,
        "holds": len(gaps) <= 2 and all(gap <= config.tolerance for gap in gaps),
    }


def main() -> None:
    folder: Path = folder_argument(__doc__)
    conclude(write(folder, "p01_identity", Config(), run(Config())))


if __name__ == "__main__":
    main()
