"""The shape of a decoder, read from a Hugging Face ``config.json``.

One frozen description serves every model file. A setting that would change the mathematics and is
not implemented is refused by name here, so that no model ever runs with a part of its
configuration ignored. Configurations written by transformers 5 (``rope_parameters``) and before
(``rope_theta``, ``rope_scaling``) are both read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

ROPE_TYPES = ("default", "linear", "llama3")
_REQUIRED_BY_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder-only transformer.

    ``rope_scaling`` is None for plain rotary embeddings, else a mapping with ``rope_type``
    (``linear`` or ``llama3``) and that type's factors. ``intermediate_size`` counts the features
    of gate and of up, each. ``attention_bias`` and ``mlp_bias`` add a bias to all the linear layers
    of the part.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the mapping of a ``config.json``.

        Raises:
            ValueError: a field is missing, malformed or asks for something not implemented; the
                message names the field and what is allowed.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ValueError(f"model_type must name a model file, got {model_type!r}")
        _refuse_unsupported(config)
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        head_dim = config.get("head_dim")
        if head_dim is None:
            # Qwen3's own default is 128, whatever the hidden size.
            head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
        num_kv_heads = config.get("num_key_value_heads")
        theta, scaling = _rope(config)
        return cls(
            model_type=model_type,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_integer(config, "intermediate_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_integer(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            # Qwen3 has no such field: its MLP never has biases.
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        )


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {activation!r}")
    # Qwen3 configurations carry sliding_window with use_sliding_window false: not in use.
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise ValueError(f"sliding_window must be null (full attention only), got {window!r}")
    kinds = config.get("layer_types")
    for kind in kinds or ():
        if kind != "full_attention":
            raise ValueError(f"layer_types may only hold 'full_attention', got {kind!r}")
    if config.get("quantization_config") is not None:
        raise ValueError("quantization_config must be absent: give unquantised weights or a GGUF")
    partial = config.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor must be 1.0, got {partial!r}")


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling, from either spelling."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping or null, got {value!r}")
    given = cast("Mapping[str, Any]", value or {})
    if any(isinstance(inner, Mapping) for inner in given.values()):
        raise ValueError(f"{name} must be one set for all layers, got one for each layer type")
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{name}.rope_type must be one of {ROPE_TYPES}, got {rope_type!r}")
    partial = given.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{name}.partial_rotary_factor must be 1.0, got {partial!r}")
    if rope_type == "default":
        return float(theta), None
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in _REQUIRED_BY_ROPE[rope_type]:
        factor = given.get(key)
        if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
            raise ValueError(f"{name}.{key} must be a positive number, got {factor!r}")
        scaling[key] = factor
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError(
            f"{name}.high_freq_factor must be greater than low_freq_factor="
            f"{scaling['low_freq_factor']}, got {scaling['high_freq_factor']}"
        )
    return float(theta), scaling
