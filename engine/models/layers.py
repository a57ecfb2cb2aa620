"""Pieces that model files are built of: plain inference classes, not ``nn.Module``.

A decoding step on the CPU runs some thirty layers of ten small operations, so the calls themselves
count: weights are plain tensors, fused where one product can replace several, and elementwise work
is done in place. Every piece lists its checkpoint tensors in ``named_slices``: Hugging Face name ->
view into the (fused) weight, so that loading copies straight to the final place.

Shape suffixes: T tokens, D hidden size, H query heads, K KV heads, E head size, I input features,
O output features, F gate (or up) features, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from .config import ModelConfig
from .linear import Linear, NamedSlices


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def named_slices(self, name: str) -> NamedSlices:
        yield f"{name}.weight", self.weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; a new tensor."""
    size = x.shape[-1]
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, (size,), weight, eps)
    # The CPU has no fused kernel: F.rms_norm there is ten operations, this is five.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(size).add_(eps).rsqrt_()
    normed = torch.mul(x, scale)
    return normed if weight is None else normed.mul_(weight)


class SwigluMLP:
    """residual + down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        size = config.intermediate_size
        self.size = size
        self.gate_up = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            size,
            {"down_proj": config.hidden_size},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        gate_up_T2F = self.gate_up(x_TD)
        gate_TF, up_TF = gate_up_T2F[:, : self.size], gate_up_T2F[:, self.size :]
        return self.down(F.silu(gate_TF).mul_(up_TF), residual_TD)

    def named_slices(self, prefix: str) -> NamedSlices:
        yield from self.gate_up.named_slices(prefix)
        yield from self.down.named_slices(prefix)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [E / 2], float32, radians a position, after the configured scaling.

    ``llama3`` keeps wavelengths below ``original / high_freq_factor``, divides those above
    ``original / low_freq_factor`` by ``factor`` and blends in between.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - share) * frequencies / factor + share * frequencies


class Rotary:
    """Cosines and sines of every position, and their application to queries and keys.

    The pairing is Hugging Face's: feature i turns with feature i + E / 2.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        angles_PE = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32),
            rope_frequencies(config),
        ).repeat(1, 2)
        sin_PE = angles_PE.sin()
        sin_PE[:, : config.head_dim // 2].neg_()  # the sign of rotate_half, folded in
        self.cos_PE = angles_PE.cos_().to(device=device, dtype=dtype)
        self.signed_sin_PE = sin_PE.to(device=device, dtype=dtype)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, [T, 1, E] each: looked up once for all the layers."""
        cos_TE = self.cos_PE.index_select(0, positions_T)
        sin_TE = self.signed_sin_PE.index_select(0, positions_T)
        return cos_TE.unsqueeze(1), sin_TE.unsqueeze(1)


def rotate(
    x_THE: torch.Tensor, cos_T1E: torch.Tensor, signed_sin_T1E: torch.Tensor
) -> torch.Tensor:
    """Turn every head by its position; a new tensor [T, H, E]."""
    swapped_THE = x_THE.roll(x_THE.shape[2] // 2, 2)
    return torch.mul(x_THE, cos_T1E).addcmul_(swapped_THE, signed_sin_T1E)


def load_named(
    slices: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Copy a checkpoint's tensors into their slices, converting them on the way.

    One tensor of ``weights`` is alive at a time. Names in ``ignored`` and the rotary frequencies
    that old checkpoints carry are skipped.

    Raises:
        ValueError: a tensor is missing, unknown, given twice or of the wrong shape.
    """
    missing = dict.fromkeys(slices)
    for name, tensor in weights:
        if name in ignored or name.endswith("rotary_emb.inv_freq"):
            continue
        target = slices.get(name)
        if target is None:
            raise ValueError(f"weight {name!r} does not belong to this model")
        if name not in missing:
            raise ValueError(f"weight {name!r} is given twice")
        if tensor.shape != target.shape:
            raise ValueError(
                f"weight {name!r} must have shape {tuple(target.shape)}, got {tuple(tensor.shape)}"
            )
        target.copy_(tensor)
        del missing[name]
    if missing:
        names = list(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(f"weights are missing: {', '.join(map(repr, names[:3]))}{more}")
