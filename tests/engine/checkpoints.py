"""Small random checkpoints, and a GGUF of one as llama.cpp's converter would write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as QuantType

from tightrope.engine.models import smollm2
from tightrope.engine.models.gguf_weights import GGUFFile

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}


def llama(**settings: Any) -> Any:
    return randomized(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings)))


def qwen3(**settings: Any) -> Any:
    return randomized(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **settings)))


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(values + 1 if "norm" in name else values)
    return model.eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-untied-bias": lambda: llama(tie_word_embeddings=False, attention_bias=True),
    "qwen3-untied": lambda: qwen3(tie_word_embeddings=False, head_dim=32),
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: row 2i + w of a head is row w * half + i of the checkpoint."""
    size = rows.shape[0] // heads
    order = [
        head * size + which * (size // 2) + i
        for head in range(heads)
        for i in range(size // 2)
        for which in (0, 1)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    model: Any,
    *,
    quant: QuantType = QuantType.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """What llama.cpp's converter would write: its names, its row order, norms in float32."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    extra(writer)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        rows = tensor.float().numpy()
        part = name.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            rows = interleaved(rows, heads[part])
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None
        kind = quant if rows.ndim == 2 else QuantType.F32
        writer.add_tensor(theirs, gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def smollm2_or_skip() -> GGUFFile:
    """The default model's file where it is on this machine; fetches nothing."""
    path = smollm2.find_smollm2()
    if path is None:
        pytest.skip(f"{smollm2.NAME} is not in the cache and {smollm2.VARIABLE} is unset")
    return GGUFFile(path)
