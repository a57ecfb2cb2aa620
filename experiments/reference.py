"""The same weights in transformers: what the proofs compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..engine.models.gguf_weights import GGUFFile


def transformers_model(gguf: Path) -> Any:
    """A ``LlamaForCausalLM`` in float32 with the weights of a GGUF file, on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile(gguf)
    fields = file.config()
    config = LlamaConfig(**{k: v for k, v in fields.items() if v is not None})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: tensor.clone() for name, tensor in file.tensors(torch.float32)}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    # Buffers are no weights: rope's frequencies were made on the meta device too.
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt_ids: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' greedy continuation of prompts of equal length, end tokens ignored."""
    ids = torch.tensor(prompt_ids)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, ids.shape[1] :].tolist()
