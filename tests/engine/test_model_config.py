"""Reading a Hugging Face config.json: both spellings of rope, and refusals by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tightrope.engine.models.config import ModelConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


def test_both_spellings_of_rope_are_read() -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = ModelConfig.from_hf({**HF, "rope_theta": 500000.0, "rope_scaling": scaling})
    new = ModelConfig.from_hf({**HF, "rope_parameters": LLAMA3_ROPE})
    assert old == new
    assert new.rope_theta == 500000.0
    assert new.rope_scaling is not None
    assert new.rope_scaling["original_max_position_embeddings"] == 32
    plain = ModelConfig.from_hf({**HF, "rope_scaling": {"type": "linear", "factor": 2}})
    assert plain.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert plain.rope_theta == 10000.0
    assert ModelConfig.from_hf(HF).rope_scaling is None


def test_defaults_follow_hugging_face() -> None:
    config = ModelConfig.from_hf(HF)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (4, 2, 1e-6)
    assert not config.tie_word_embeddings
    assert ModelConfig.from_hf({**HF, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, r"model_type must name a model file, got None"),
        ({"hidden_act": "gelu"}, r"hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": None}, r"hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide"),
        ({"head_dim": 7}, r"head_dim must be even"),
        ({"sliding_window": 4096}, r"sliding_window must be null"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types may only hold 'full_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, r"rope_type must be one of"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor must be a positive"),
        ({"rope_parameters": {"rope_theta": 0}}, r"rope_theta must be a positive number"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters must be one set"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            r"high_freq_factor must be greater than low_freq_factor=1\.0",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantization_config must be absent"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1\.0"),
    ],
)
def test_unsupported_settings_are_named(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**HF, **change})


def test_a_sliding_window_that_is_not_in_use_is_accepted() -> None:
    config = {**HF, "model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.from_hf(config).model_type == "qwen3"
