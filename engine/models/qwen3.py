"""Qwen3 (``model_type`` "qwen3"): Llama with every query and key head normalised before rotation.

The head size is its own setting here, independent of the hidden size.
"""

from __future__ import annotations

import torch

from . import llama
from .config import ModelConfig
from .layers import RMSNorm, rms_norm, rotate
from .linear import NamedSlices


class DecoderLayer(llama.DecoderLayer):
    """Llama's layer with two norms over the head size, shared by all the heads of a kind."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, index, dtype=dtype, device=device)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(config.head_dim, eps, dtype=dtype, device=device)

    def named_slices(self, prefix: str) -> NamedSlices:
        yield from super().named_slices(prefix)
        yield from self.q_norm.named_slices(f"{prefix}self_attn.q_norm")
        yield from self.k_norm.named_slices(f"{prefix}self_attn.k_norm")

    def rotated(
        self, qk_THE: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        # One norm without a weight serves both kinds; the weights differ by kind.
        normed_THE = rms_norm(qk_THE, None, self.q_norm.eps)
        normed_THE[:, : self.num_heads].mul_(self.q_norm.weight)
        normed_THE[:, self.num_heads :].mul_(self.k_norm.weight)
        return rotate(normed_THE, *rope)


class Model(llama.Model):
    """A causal language model for inference. Weights are undefined until `load_weights`."""

    layer_class = DecoderLayer
