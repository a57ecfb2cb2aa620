"""Greedy tokens of tiny random models equal transformers', however the engine cuts the work.

Float32, 64 prompts of mixed length. What may never change a token: the batch, the chunk size, the
block size, a cold or a warm prefix cache, preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tightrope.engine.config import EngineConfig
from tightrope.engine.core import EngineCore
from tightrope.engine.executor import InlineExecutor
from tightrope.engine.hooks import EngineContext
from tightrope.engine.models.config import ModelConfig
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import Request
from tightrope.engine.worker import build_worker

NUM_NEW = 10
VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits far enough apart that rounding cannot flip the best one
}


@dataclass
class Golden:
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]


def _prompts() -> list[list[int]]:
    """64 prompts of 1 to 90 tokens; every second one shares a prefix with its neighbour."""
    generator = torch.Generator().manual_seed(7)
    prompts: list[list[int]] = []
    for i in range(64):
        length = int(torch.randint(1, 91, (), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        prompts.append(prompts[-1][: length // 2 + 1] + ids[length // 2 :] if i % 2 else ids)
    return prompts


@pytest.fixture(scope="module", params=["llama", "llama untied", "qwen3"])
def golden(request: pytest.FixtureRequest) -> Golden:
    torch.manual_seed(0)
    reference: Any
    if request.param == "qwen3":
        reference = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    else:
        tied = request.param == "llama"
        reference = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    reference = reference.eval()
    config = ModelConfig.from_hf(reference.config.to_dict())
    module = import_module(f"tightrope.engine.models.{config.model_type}")
    model = module.Model(config, dtype=torch.float32, device=torch.device("cpu"))
    model.load_weights(reference.state_dict().items())
    prompts = _prompts()
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return Golden(model, prompts, expected)


def make_core(golden: Golden, **settings: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "max_model_len": 128,
        "num_blocks": 64 * 8,
        "block_size": 16,
        "max_num_batched_tokens": 512,
    }
    config = EngineConfig(**{**defaults, **settings})
    worker = build_worker(golden.model, config)
    context = EngineContext(config, VOCAB, frozenset())
    return EngineCore(config, InlineExecutor(worker), [], context)


def run(core: EngineCore, prompts: list[list[int]], *, at_once: bool = True) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    requests = [
        Request(f"r{i}", prompt, params, seed=i, max_tokens=NUM_NEW)
        for i, prompt in enumerate(prompts)
    ]
    for batch in [requests] if at_once else [[request] for request in requests]:
        for request in batch:
            core.add(request)
        drain(core)
    assert core.scheduler.cache.num_free_blocks == core.config.num_blocks
    core.scheduler.cache.check_integrity()
    return [request.output_token_ids for request in requests]


def drain(core: EngineCore) -> None:
    while core.has_unfinished():
        core.step()


def test_batch_of_one(golden: Golden) -> None:
    assert run(make_core(golden), golden.prompts, at_once=False) == golden.expected


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_and_block_sizes(golden: Golden, chunk: int, block_size: int) -> None:
    blocks = 64 * 128 // block_size
    core = make_core(golden, max_num_batched_tokens=chunk, block_size=block_size, num_blocks=blocks)
    assert run(core, golden.prompts) == golden.expected


def test_prefix_cache_cold_and_warm(golden: Golden) -> None:
    core = make_core(golden)
    assert run(core, golden.prompts) == golden.expected
    hits = core.scheduler.cache.hits
    again = [
        Request(f"w{i}", p, SamplingParams(temperature=0), seed=0, max_tokens=NUM_NEW)
        for i, p in enumerate(golden.prompts)
    ]
    for request in again:
        core.add(request)
    drain(core)
    assert [request.output_token_ids for request in again] == golden.expected
    assert core.scheduler.cache.hits > hits + 1000


def test_no_prefix_cache(golden: Golden) -> None:
    core = make_core(golden, enable_prefix_caching=False)
    assert run(core, golden.prompts) == golden.expected
    assert core.scheduler.cache.hits == 0


@pytest.mark.parametrize("block_size", [1, 16])
def test_preemption(golden: Golden, block_size: int) -> None:
    core = make_core(golden, block_size=block_size, num_blocks=320 // block_size)
    assert run(core, golden.prompts) == golden.expected
    assert core.counts.preemptions > 10
