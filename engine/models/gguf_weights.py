"""GGUF checkpoints: metadata as a Hugging Face config, weights under Hugging Face's names.

gguf-py does the parsing and names the quantisation types. Two things are ours, for speed:

* ``_Reader`` gives the same fields without two costs of ``GGUFReader``: a ``np.memmap`` object for
  every slice, and the recursion through each of 100,000 token strings (4 s become 0.07 s). Should
  gguf-py rename the method that it overrides, loading turns slow, not wrong.
* Blocks are dequantised by vectorised torch arithmetic, a bounded number at a time, into the target
  dtype: in float32 the same operations in the same order as gguf-py's, so bit-equal to it.

llama.cpp stores llama's Q and K rows interleaved for its own rotary kernel (qwen3's are stored
as they are); the rows are put back before dequantising, while they are small.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFValueType as ValueType

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QUANT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
# Blocks (of 32 elements) at a time: fewer elements than torch starts threads for. The chunk stays
# in cache and nothing waits for a thread: on a busy machine, 10 times faster than large chunks.
CHUNK_BLOCKS = 1000

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """``GGUFReader`` over a plain array, with arrays of strings and numbers read in one go."""

    @property
    def data(self) -> Any:
        return self._array

    @data.setter
    def data(self, value: Any) -> None:
        self._array = value.view(np.ndarray)
        self._bytes = memoryview(self._array)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != ValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, count = struct.unpack_from("<IQ", self._bytes, orig_offs)
        item = ValueType(raw_item)
        at = orig_offs + 12
        header = self._array[orig_offs:at]
        if item is ValueType.STRING:
            parts: list[Any] = [header]
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(count):
                (length,) = unpack(self._bytes, at)
                parts.append(self._bytes[at + 8 : at + 8 + length])
                at += 8 + length
            return at - orig_offs, parts, range(1, count + 1), [ValueType.ARRAY, item]
        if item not in self.gguf_scalar_to_np:
            raise ValueError(f"arrays of {item.name} are not supported")
        values = self._get(at, self.gguf_scalar_to_np[item], count)
        return 12 + values.nbytes, [header, values], [1], [ValueType.ARRAY, item]


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``config()`` and ``tensors(dtype)``.

    Raises:
        ValueError: the file is not GGUF, cut short, split, big-endian, or of an architecture other
            than llama and qwen3; the message names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # Copy-on-write: torch warns about memory that it could not write to. Nothing writes.
            self._reader = _Reader(self.path, "c")
        except (ValueError, IndexError, KeyError, OverflowError, OSError, struct.error) as error:
            raise ValueError(
                f"{self.path} is not a readable GGUF file ({type(error).__name__}: {error})"
            ) from error
        if self._reader.byte_order != "I":
            raise ValueError(f"{self.path} has the other byte order; little-endian is allowed")
        if int(self.get("split.count", 1)) > 1:
            raise ValueError(f"{self.path} is one part of a split GGUF; merge the parts first")
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{self.path} has general.architecture={self.architecture!r}; "
                f"{' and '.join(ARCHITECTURES)} are allowed"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """One metadata value: str, int, float, bool or a list of them."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value = field.contents()
        if field.types == [ValueType.FLOAT32]:
            return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
        return value

    @cached_property
    def _tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def _hparam(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self.path} lacks the metadata {self.architecture}.{key}")
        return value

    def config(self) -> dict[str, Any]:
        """The model as the fields of a Hugging Face ``config.json``."""
        heads = int(self._hparam("attention.head_count"))
        hidden = int(self._hparam("embedding_length"))
        head_dim = int(self._hparam("attention.key_length", hidden // heads))
        theta = float(self._hparam("rope.freq_base", 10000.0))
        self._refuse_unsupported(head_dim)
        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self.path} lacks the tensor token_embd.weight")
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": int(self._hparam("feed_forward_length")),
            "num_hidden_layers": int(self._hparam("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._hparam("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(self._hparam("context_length")),
            "rms_norm_eps": float(self._hparam("attention.layer_norm_rms_epsilon")),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(head_dim, theta),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            token = self.get(f"tokenizer.ggml.{key}_token_id")
            config[f"{name}_token_id"] = None if token is None else int(token)
        return config

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, CPU tensor of ``dtype``), one at a time.

        Unquantised tensors that already have ``dtype`` may share the file's mapped memory: copy
        them. Raises ValueError for a tensor whose name or quantisation type is not known.
        """
        heads = int(self._hparam("attention.head_count"))
        kv_heads = int(self._hparam("attention.head_count_kv", heads))
        interleaved = {"attn_q": heads, "attn_k": kv_heads} if self.architecture == "llama" else {}
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FREQS:
                continue  # part of config()
            if tensor.tensor_type.name not in QUANT_TYPES:
                raise ValueError(
                    f"{self.path}: tensor {tensor.name} has type {tensor.tensor_type.name}; "
                    f"{', '.join(QUANT_TYPES)} are allowed"
                )
            name, data = self._hf_name(tensor.name), tensor.data
            part = tensor.name.split(".")[-2]
            if part in interleaved:
                data = _halves_from_pairs(data, interleaved[part])
            yield name, dequantize(data, tensor.tensor_type, dtype)

    def _hf_name(self, name: str) -> str:
        match name.split("."):
            case [part, kind] if part in _TOP:
                return f"{_TOP[part]}.{kind}"
            case ["blk", layer, part, kind] if part in _BLOCK:
                return f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
            case _:
                raise ValueError(
                    f"{self.path}: unknown tensor {name!r} for architecture {self.architecture}"
                )

    def _refuse_unsupported(self, head_dim: int) -> None:
        if int(self._hparam("expert_count", 0)):
            raise ValueError(f"{self.path} is a mixture of experts; dense models are allowed")
        if int(self._hparam("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"{self.path} rotates part of a head; only whole heads are allowed")

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        kind = self._hparam("rope.scaling.type", "none")
        if _ROPE_FREQS in self._tensors:
            factors = self._tensors[_ROPE_FREQS].data.astype(np.float64)
            return self._llama3_scaling(factors, head_dim, theta)
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self._hparam("rope.scaling.factor"))}
        if kind != "none":
            raise ValueError(
                f"{self.path} has rope.scaling.type={kind!r}; none, linear and {_ROPE_FREQS} "
                "(llama3) are allowed"
            )
        return None

    def _llama3_scaling(self, factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
        """llama.cpp keeps llama3's frequency divisors, not the four numbers that they came from.

        Every published llama 3.x has the same low and high factors and original context, so only
        the largest divisor is read; the recipe is then recomputed and must agree.
        """
        scaling: dict[str, Any] = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        turns = 8192 * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
        smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ValueError(
                f"{self.path}: {_ROPE_FREQS} does not follow llama3's rope scaling with "
                "low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192"
            )
        return scaling


def dequantize(data: np.ndarray, kind: QuantType, dtype: torch.dtype) -> torch.Tensor:
    """Turn a GGUF tensor as gguf-py maps it into a CPU tensor of ``dtype``.

    ``data``: ``[..., columns]`` of float32 or float16, or ``[..., bytes of a row]`` of uint8. The
    float32 values are bit-equal to ``gguf.dequantize``; other dtypes are those values rounded.
    """
    name = kind.name
    if name in ("F32", "F16"):
        return torch.from_numpy(data).to(dtype)
    if name == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).to(dtype)
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks_NS = torch.from_numpy(data.reshape(-1, size))
    out_NW = torch.empty(len(blocks_NS), width, dtype=dtype)
    for first in range(0, len(blocks_NS), CHUNK_BLOCKS):
        chunk_NS = blocks_NS[first : first + CHUNK_BLOCKS]
        target_NW = out_NW[first : first + CHUNK_BLOCKS]
        values_NW = target_NW if dtype is torch.float32 else torch.empty(len(chunk_NS), width)
        _dequantize_blocks(chunk_NS, name, values_NW)
        if values_NW is not target_NW:
            target_NW.copy_(values_NW)
    return out_NW.view(*data.shape[:-1], data.shape[-1] // size * width)


def _dequantize_blocks(blocks_NS: torch.Tensor, name: str, out_NW: torch.Tensor) -> None:
    """Blocks of 32: a float16 scale (Q4_1: and a minimum), then the integers, packed.

    Product and sum stay two operations: a fused one would round differently from gguf-py.
    """
    scale_N1 = blocks_NS[:, :2].contiguous().view(torch.float16).float()
    if name == "Q8_0":
        out_NW.copy_(blocks_NS[:, 2:].view(torch.int8)).mul_(scale_N1)
        return
    packed_NB = blocks_NS[:, -16:]
    out_NW[:, :16].copy_(packed_NB & 15)
    out_NW[:, 16:].copy_(packed_NB >> 4)
    if name == "Q4_0":
        out_NW.sub_(8).mul_(scale_N1)
    else:
        minimum_N1 = blocks_NS[:, 2:4].contiguous().view(torch.float16).float()
        out_NW.mul_(scale_N1).add_(minimum_N1)


def _halves_from_pairs(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows (0, half, 1, half + 1, ...) of each head -> (0, 1, ..., half, half + 1, ...)."""
    half = data.shape[0] // heads // 2
    return data.reshape(heads, half, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
