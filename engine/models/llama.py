"""Llama: the decoder of Llama 2 and 3, SmolLM2 and their kin (``model_type`` "llama").

One forward serves prompt chunks, decoding and verification: tokens of all requests lie in one row
[T], and the attention backend knows which belong together. Between attentions the rows are padded
to a count that products like (`linear.cheap_rows`); residual sums are made in place.

Shape suffixes: see `layers`; P padded rows, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812

from ..attention import AttentionBackend
from .config import ModelConfig
from .layers import Linear, NamedSlices, RMSNorm, Rotary, SwigluMLP, load_named, rotate
from .linear import cheap_rows, linear, pad_rows


class DecoderLayer:
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.input_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.o = Linear(
            query_size, {"o_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device
        )
        self.post_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.mlp = SwigluMLP(config, dtype=dtype, device=device)

    def named_slices(self, prefix: str) -> NamedSlices:
        yield from self.input_norm.named_slices(f"{prefix}input_layernorm")
        yield from self.qkv.named_slices(f"{prefix}self_attn.")
        yield from self.o.named_slices(f"{prefix}self_attn.")
        yield from self.post_norm.named_slices(f"{prefix}post_attention_layernorm")
        yield from self.mlp.named_slices(f"{prefix}mlp.")

    def rotated(
        self, qk_THE: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries and keys, side by side [T, H + K, E], turned by their positions."""
        return rotate(qk_THE, *rope)

    def forward(
        self,
        hidden_PD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
    ) -> None:
        """Add this layer's output to ``hidden_PD`` in place; its first T rows are the tokens."""
        tokens, padded = rope[0].shape[0], hidden_PD.shape[0]
        heads, kv_heads = self.num_heads, self.num_kv_heads
        # Attention wants a token's heads together, whatever layout the product chose.
        qkv_PO = self.qkv(self.input_norm(hidden_PD)).contiguous()
        qkv_THE = qkv_PO.view(padded, -1, self.head_dim)[:tokens]
        qk_THE = self.rotated(qkv_THE[:, : heads + kv_heads], rope)
        attended_THE = attention.run(
            self.index, qk_THE[:, :heads], qk_THE[:, heads:], qkv_THE[:, heads + kv_heads :]
        )
        attended_TO = attended_THE.reshape(tokens, heads * self.head_dim)
        hidden_PD += self.o(pad_rows(attended_TO, padded))
        hidden_PD += self.mlp(self.post_norm(hidden_PD))


class Model:
    """A causal language model for inference. Weights are undefined until `load_weights`."""

    layer_class = DecoderLayer

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding_VD = torch.empty(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = [
            self.layer_class(config, index, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head_VD = (
            self.embedding_VD if config.tie_word_embeddings else torch.empty_like(self.embedding_VD)
        )
        self.rotary = Rotary(config, dtype=dtype, device=device)

    def named_slices(self) -> NamedSlices:
        """Every tensor of a checkpoint, by its Hugging Face name, as a view to copy it into."""
        yield "model.embed_tokens.weight", self.embedding_VD
        for index, layer in enumerate(self.layers):
            yield from layer.named_slices(f"model.layers.{index}.")
        yield from self.norm.named_slices("model.norm")
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head_VD

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the model from (Hugging Face name, tensor) pairs in any order and dtype.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or misshaped.
        """
        tied = self.config.tie_word_embeddings
        load_named(dict(self.named_slices()), weights, ignored=("lm_head.weight",) if tied else ())

    @torch.inference_mode()
    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, D]. ``attention`` has planned this step.

        ``input_ids_T`` and ``positions_T`` are int64 on the model's device.
        """
        tokens = input_ids_T.shape[0]
        padded = cheap_rows(tokens, self.embedding_VD)
        hidden_PD = pad_rows(F.embedding(input_ids_T, self.embedding_VD), padded)
        rope = self.rotary.at(positions_T)
        for layer in self.layers:
            layer.forward(hidden_PD, rope, attention)
        return self.norm(hidden_PD[:tokens])

    @torch.inference_mode()
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, float32 [R, V]."""
        rows = hidden_RD.shape[0]
        padded_PD = pad_rows(hidden_RD, cheap_rows(rows, self.head_VD))
        return linear(padded_PD, self.head_VD)[:rows].float().contiguous()
