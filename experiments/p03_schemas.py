"""Do thirty varied schemas hold on a real model, with and without forced drafts?

SmolLM2, float32, 30 schemas x 3 runs (greedy, and two seeds at temperature 1) x forced drafts on
and off. Expected: at least 85 % end with ``stop`` and validate, every other text is a prefix that a
fresh matcher of another backend (xgrammar) accepts, and greedy tokens are equal on and off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import xgrammar

from ..engine.models.smollm2 import ensure_smollm2
from ..engine.outputs import RequestOutput
from ..engine.params import SamplingParams
from ..guided import Guide
from ..llm import LLM
from .records import conclude, folder_argument, write
from .schemas import SCHEMAS, Schema


@dataclass(frozen=True)
class Config:
    max_tokens: int = 160
    seeds: tuple[int, ...] = (1, 2)


class PrefixJudge:
    """Whether a text can be continued to fit a schema, by xgrammar on single bytes."""

    def __init__(self) -> None:
        vocabulary = [bytes([i]) for i in range(256)] + [b"</s>"]
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
        self._compiler = xgrammar.GrammarCompiler(info)

    def accepts(self, schema: Schema, text: str) -> bool:
        compiled = self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=True, strict_mode=False
        )
        return xgrammar.GrammarMatcher(compiled).accept_string(text)


def is_valid(schema: Schema, text: str) -> bool:
    """The text parses as strict JSON and fits."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text, parse_constant=refuse))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _runs(llm: LLM, config: Config, speculation: bool) -> list[list[RequestOutput]]:
    """For each schema its outputs: greedy first, then each seed."""
    messages: list[list[dict[str, str]]] = []
    params: list[SamplingParams] = []
    for prompt, schema in SCHEMAS.values():
        guide = Guide.json(schema)
        for seed in (None, *config.seeds):
            messages.append([{"role": "user", "content": prompt}])
            params.append(
                SamplingParams(
                    temperature=0 if seed is None else 1,
                    seed=seed,
                    max_tokens=config.max_tokens,
                    guide=guide,
                    speculation=None if speculation else False,
                )
            )
    outputs = llm.chat(messages, params, progress=False)
    each = 1 + len(config.seeds)
    return [outputs[i : i + each] for i in range(0, len(outputs), each)]


def run(config: Config) -> dict[str, Any]:
    """Shares and the names of what failed."""
    judge = PrefixJudge()
    with LLM(ensure_smollm2(), dtype="float32", max_model_len=1024, speculation="forced") as llm:
        arms = {arm: _runs(llm, config, arm == "forced") for arm in ("plain", "forced")}
        special = set(llm.get_tokenizer().all_special_tokens)
    result: dict[str, Any] = {"runs": 0, "stop_and_valid": 0}
    lists = ("stop_but_invalid", "not_a_prefix", "special_in_text", "greedy_differs")
    result |= {name: [] for name in lists}
    for arm, runs in arms.items():
        for (name, (_, schema)), outputs in zip(SCHEMAS.items(), runs, strict=True):
            for i, output in enumerate(outputs):
                completion = output.outputs[0]
                text, label = completion.text, f"{name}/{arm}/{i}"
                result["runs"] += 1
                if completion.finish_reason == "stop" and is_valid(schema, text):
                    result["stop_and_valid"] += 1
                elif completion.finish_reason == "stop":
                    result["stop_but_invalid"].append(label)
                # A number with many decimals is whole already; xgrammar allows it only a few.
                elif not (is_valid(schema, text) or judge.accepts(schema, text)):
                    result["not_a_prefix"].append(label)
                if any(token in text for token in special):
                    result["special_in_text"].append(label)
    for name, plain, forced in zip(SCHEMAS, arms["plain"], arms["forced"], strict=True):
        if plain[0].outputs[0].token_ids != forced[0].outputs[0].token_ids:
            result["greedy_differs"].append(name)
    drafted = [o.metrics for runs in arms["forced"] for o in runs]
    result["forced_drafted"] = sum(m.num_draft_tokens for m in drafted)
    result["forced_accepted"] = sum(m.num_accepted_tokens for m in drafted)
    result["share"] = result["stop_and_valid"] / result["runs"]
    result["holds"] = result["share"] >= 0.85 and not any(result[name] for name in lists)
    return result


def main() -> None:
    conclude(write(folder_argument(__doc__), "p03_schemas", Config(), run(Config())))


if __name__ == "__main__":
    main()
