"""Grammars and forced drafts inside the engine, on the hand-computable model: the same tokens with
speculation on or off, synchronous or overlapped, and fewer forwards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tightrope.engine.config import EngineConfig
from tightrope.engine.fake import FakeCore
from tightrope.engine.hooks import EngineContext, SchedulerHook
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import Request
from tightrope.guided import Guide, GuidedHook
from tightrope.speculative import SpeculativeHook

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green", "blue"]},
        "flag": {"type": "boolean"},
    },
    "required": ["identifier", "colour", "flag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte: forced runs are long."""
    words = ["<|begin|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    return made


class WithTokenizer(GuidedHook):
    """The fake engine has no tokenizer of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def prepare(self, engine: EngineContext) -> None:
        super().prepare(replace(engine, tokenizer=self.tokenizer))


def generate(
    tokenizer: Tokenizer, *, forced: bool, overlap: bool, num_blocks: int = 256
) -> tuple[list[Request], FakeCore]:
    """Three guided requests and a plain one, run to the end."""
    guided = WithTokenizer(tokenizer)
    hooks: list[SchedulerHook] = [guided]
    if forced:
        hooks.append(SpeculativeHook("forced", guided=guided))
    config = EngineConfig(
        max_model_len=128, num_blocks=num_blocks, block_size=4, max_num_seqs=4, overlap=overlap
    )
    core = FakeCore(config, vocab_size=270, eos_token_ids=frozenset({1}), hooks=hooks)
    requests: list[Request] = []
    for i in range(4):
        guide = Guide.json(SCHEMA, max_whitespace=0) if i else None
        params = SamplingParams(guide=guide, max_tokens=90, temperature=float(i % 2), seed=i)
        made = Request(
            f"r{i}", [5 + i, 9], params, seed=i, eos_token_ids=frozenset({1}), max_tokens=90
        )
        requests.append(made)
        core.add(made)
    for _ in range(2000):
        if not core.has_unfinished():
            break
        core.step()
    core.close()
    return requests, core


@pytest.fixture(scope="module")
def plain_tokens(tokenizer: Tokenizer) -> list[list[int]]:
    requests, _ = generate(tokenizer, forced=False, overlap=False)
    return [made.output_token_ids for made in requests]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("num_blocks", [256, 32])
def test_forced_drafts_change_nothing_but_the_number_of_forwards(
    tokenizer: Tokenizer,
    plain_tokens: list[list[int]],
    overlap: bool,
    forced: bool,
    num_blocks: int,
) -> None:
    requests, core = generate(tokenizer, forced=forced, overlap=overlap, num_blocks=num_blocks)
    assert [made.output_token_ids for made in requests] == plain_tokens
    if num_blocks == 32:
        assert core.stats()["preemptions"]
    for made in requests[1:]:
        assert made.finish_reason == "stop"
        report: dict[str, Any] = made.reports
        assert report["guide"].valid is True
        document = json.loads(tokenizer.decode(made.output_token_ids))
        assert list(document) == list(SCHEMA["properties"])  # type: ignore[arg-type]
        if forced:
            drafted = report["speculation"]
            assert drafted.num_draft_tokens > 20
            assert drafted.acceptance == 1.0
            assert made.metrics.num_forwards < 0.6 * made.num_output
        else:
            assert "speculation" not in report
    assert requests[0].metrics.num_draft_tokens == 0
    assert not {"guide"} & requests[0].reports.keys()
