"""Llama: the decoder of Llama 2 and 3, SmolLM2 and their kin (``model_type`` "llama").

One forward serves prompt chunks, decoding and verification: tokens of all requests lie in one row
[T], and the attention backend knows which belong together. Residual sums are made by the products.

Shape suffixes: see `layers`; R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812

from ..attention import AttentionBackend
from .config import ModelConfig
from .layers import RMSNorm, Rotary, SwigluMLP, load_named, rotate
from .linear import Linear, NamedSlices, head_product


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

    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, self.mlp.gate_up, self.mlp.down)

    def forward(
        self,
        hidden_TD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """The residual stream after this layer, [T, D]; a new tensor."""
        tokens = hidden_TD.shape[0]
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv_THE = self.qkv(self.input_norm(hidden_TD)).view(tokens, -1, self.head_dim)
        qk_THE = self.rotated(qkv_THE[:, : heads + kv_heads], rope)
        attended_THE = attention.run(
            self.index, qk_THE[:, :heads], qk_THE[:, heads:], qkv_THE[:, heads + kv_heads :]
        )
        hidden_TD = self.o(attended_THE.reshape(tokens, heads * self.head_dim), hidden_TD)
        return self.mlp(self.post_norm(hidden_TD), hidden_TD)


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
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size,
                {"lm_head": config.vocab_size},
                bias=False,
                dtype=dtype,
                device=device,
            )
        )
        self.rotary = Rotary(config, dtype=dtype, device=device)

    def named_slices(self) -> NamedSlices:
        """Every tensor of a checkpoint, by its Hugging Face name, as a view to copy it into."""
        yield "model.embed_tokens.weight", self.embedding_VD
        for index, layer in enumerate(self.layers):
            yield from layer.named_slices(f"model.layers.{index}.")
        yield from self.norm.named_slices("model.norm")
        if self.head is not None:
            yield from self.head.named_slices("")

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the model from (Hugging Face name, tensor) pairs in any order and dtype.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or misshaped.
        """
        ignored = ("lm_head.weight",) if self.head is None else ()
        load_named(dict(self.named_slices()), weights, ignored=ignored)
        for layer in self.layers:
            for part in layer.linears():
                part.pack()
        if self.head is not None:
            self.head.pack()

    @torch.inference_mode()
    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, D]. ``attention`` has planned this step.

        ``input_ids_T`` and ``positions_T`` are int64 on the model's device.
        """
        hidden_TD = F.embedding(input_ids_T, self.embedding_VD)
        rope = self.rotary.at(positions_T)
        for layer in self.layers:
            hidden_TD = layer.forward(hidden_TD, rope, attention)
        return self.norm(hidden_TD)

    @torch.inference_mode()
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, float32 [R, V]."""
        if self.head is None:
            return head_product(hidden_RD, self.embedding_VD).float()
        return self.head(hidden_RD).float()
