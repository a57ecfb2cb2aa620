"""Llama and Qwen3 against transformers, through the paged attention backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

from tightrope.engine.attention import AttentionBatch, make_backend
from tightrope.engine.attention_sdpa import SdpaBackend
from tightrope.engine.models import llama, qwen3
from tightrope.engine.models.config import ModelConfig

CPU = torch.device("cpu")
VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for attention to matter
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
Reference = tuple[Any, llama.Model]


def _llama(**settings: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings))


def _qwen3(**settings: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **settings))


VARIANTS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-untied-llama3": lambda: _llama(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-linear-biases": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        attention_bias=True,
        mlp_bias=True,
    ),
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True, head_dim=32),
    "qwen3-untied": lambda: _qwen3(tie_word_embeddings=False, head_dim=24),
}


def build(name: str) -> Reference:
    """A random transformers model and ours with the same weights, given in shuffled order."""
    torch.manual_seed(3)
    theirs = VARIANTS[name]().eval()
    for parameter_name, parameter in theirs.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.3)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    module = {"llama": llama, "qwen3": qwen3}[config.model_type]
    ours = module.Model(config, dtype=torch.float32, device=CPU)
    weights = list(theirs.state_dict().items())
    random.Random(0).shuffle(weights)
    ours.load_weights(weights)
    return theirs, ours


@pytest.fixture(scope="module", params=list(VARIANTS))
def reference(request: pytest.FixtureRequest) -> Reference:
    return build(request.param)


class Sequences:
    """Feeds token sequences to a model in steps of any shape; NaN wherever nothing was written."""

    def __init__(self, model: llama.Model, sequences: Sequence[torch.Tensor], block_size: int):
        config = model.config
        self.model, self.sequences, self.block_size = model, sequences, block_size
        sizes = [-(-len(sequence) // block_size) for sequence in sequences]
        backend = make_backend(
            "sdpa",
            num_layers=config.num_layers,
            num_blocks=sum(sizes) + 2,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            dtype=torch.float32,
            device=CPU,
        )
        assert isinstance(backend, SdpaBackend)
        backend.kv_cache.fill_(float("nan"))
        self.backend = backend
        blocks = list(range(sum(sizes) + 2))
        random.Random(block_size).shuffle(blocks)
        self.table_BM = torch.full((len(sizes), max(sizes)), -1)
        for row, size in enumerate(sizes):
            self.table_BM[row, :size] = torch.tensor([blocks.pop() for _ in range(size)])
        self.done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, counts: Sequence[int]) -> None:
        """Compute the next ``counts[i]`` tokens of every sequence i."""
        rows = [row for row, count in enumerate(counts) if count]
        spans = [range(self.done[row], self.done[row] + counts[row]) for row in rows]
        positions_T = torch.tensor([position for span in spans for position in span])
        ids_T = torch.cat(
            [
                self.sequences[row][span.start : span.stop]
                for row, span in zip(rows, spans, strict=True)
            ]
        )
        row_T = torch.tensor([row for row in rows for _ in range(counts[row])])
        slots_T = (
            self.table_BM[row_T, positions_T // self.block_size] * self.block_size
            + positions_T % self.block_size
        )
        lens = [len(span) for span in spans]
        ends = [span.stop for span in spans]
        self.backend.plan(
            AttentionBatch(
                query_start_loc_B1=torch.tensor([0, *lens]).cumsum(0),
                seq_lens_B=torch.tensor(ends),
                block_table_BM=self.table_BM[rows],
                slot_mapping_T=slots_T,
                query_lens=lens,
                seq_lens=ends,
            )
        )
        logits_TV = self.model.logits(self.model.forward(ids_T, positions_T, self.backend))
        assert logits_TV.dtype == torch.float32
        for row, part in zip(rows, logits_TV.split(lens), strict=True):
            self.done[row] += counts[row]
            self.logits[row].append(part)

    def error(self, theirs: Any) -> float:
        """The largest difference from transformers' logits over everything computed."""
        worst = 0.0
        for sequence, done, parts in zip(self.sequences, self.done, self.logits, strict=True):
            with torch.inference_mode():
                expected = theirs(sequence[None, :done]).logits[0]
            worst = max(worst, (torch.cat(parts) - expected).abs().max().item())
        return worst


def random_sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_full_prompts_and_decoding(reference: Reference, block_size: int) -> None:
    theirs, ours = reference
    run = Sequences(ours, random_sequences(45), block_size)
    run.step([40])
    for _ in range(5):
        run.step([1])
    assert run.error(theirs) < 1e-4


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_chunked_prompts(reference: Reference, block_size: int) -> None:
    theirs, ours = reference
    run = Sequences(ours, random_sequences(60), block_size)
    for count in (1, 7, 3, 32, 2, 15):
        run.step([count])
    assert run.error(theirs) < 1e-4


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_batches(reference: Reference, block_size: int) -> None:
    theirs, ours = reference
    run = Sequences(ours, random_sequences(30, 70, 25, 90), block_size)
    for counts in (
        [9, 0, 0, 0],
        [1, 40, 0, 0],
        [6, 1, 12, 0],
        [1, 6, 1, 64],
        [1, 1, 1, 1],
        [5, 2, 3, 1],
    ):
        run.step(counts)
    assert run.error(theirs) < 1e-4


@pytest.mark.parametrize("count", [17, 33])
def test_many_rows_at_once(reference: Reference, count: int) -> None:
    theirs, ours = reference
    run = Sequences(ours, random_sequences(*[6 + index % 3 for index in range(count)]), 4)
    run.step([4] * count)
    run.step([1] * count)
    assert run.error(theirs) < 1e-4


def test_bfloat16_logits_are_float32_and_close() -> None:
    theirs, ours = build("llama-untied-llama3")
    half = llama.Model(ours.config, dtype=torch.bfloat16, device=CPU)
    half.load_weights(theirs.state_dict().items())
    assert half.layers[0].qkv.weight_OI.dtype == torch.bfloat16
    sequence = random_sequences(20)
    config = ours.config
    backend = make_backend(
        "sdpa",
        num_layers=2,
        num_blocks=20,
        block_size=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        dtype=torch.bfloat16,
        device=CPU,
    )
    slots_T = torch.arange(20)
    backend.plan(
        AttentionBatch(
            query_start_loc_B1=torch.tensor([0, 20]),
            seq_lens_B=torch.tensor([20]),
            block_table_BM=slots_T[None],
            slot_mapping_T=slots_T,
            query_lens=[20],
            seq_lens=[20],
        )
    )
    logits_TV = half.logits(half.forward(sequence[0], slots_T, backend))
    assert logits_TV.dtype == torch.float32
    with torch.inference_mode():
        expected = theirs(sequence[0][None]).logits[0]
    assert (logits_TV - expected).abs().max() < 0.05 * expected.abs().max()


def _weights() -> tuple[llama.Model, dict[str, torch.Tensor]]:
    theirs, ours = build("llama-tied")
    return ours, dict(theirs.state_dict())


def test_a_missing_weight_is_named() -> None:
    model, weights = _weights()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"missing: 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        model.load_weights(weights.items())


def test_a_surplus_weight_is_named() -> None:
    model, weights = _weights()
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)
    with pytest.raises(
        ValueError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' does not belong"
    ):
        model.load_weights(weights.items())


def test_a_misshaped_weight_is_named_with_both_shapes() -> None:
    model, weights = _weights()
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 96)
    with pytest.raises(
        ValueError, match=r"up_proj\.weight' must have shape \(96, 64\), got \(64, 96\)"
    ):
        model.load_weights(weights.items())


def test_a_repeated_weight_is_named() -> None:
    model, weights = _weights()
    pairs = [*weights.items(), ("model.norm.weight", weights["model.norm.weight"])]
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is given twice"):
        model.load_weights(pairs)


def test_tied_heads_and_rotary_buffers_are_skipped() -> None:
    model, weights = _weights()
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = torch.zeros(1)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    model.load_weights(weights.items())
    assert torch.equal(model.embedding_VD, embedding)
    assert model.head is None
    del weights["lm_head.weight"]
    model.load_weights(weights.items())


def test_an_untied_head_must_be_given() -> None:
    theirs, ours = build("llama-untied-llama3")
    weights = {name: w for name, w in theirs.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"missing: 'lm_head\.weight'"):
        ours.load_weights(weights.items())
