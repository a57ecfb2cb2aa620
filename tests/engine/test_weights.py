"""Weights: dequantisation, GGUF against transformers, safetensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFValueType
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tightrope.engine.attention import AttentionBatch, make_backend
from tightrope.engine.models import gguf_weights, zoo
from tightrope.engine.models.gguf_weights import GGUFFile, dequantize
from tightrope.engine.models.weights import INDEX, iter_safetensors
from tightrope.tests.engine.checkpoints import (
    MODELS,
    llama,
    smollm2_or_skip,
    write_gguf,
)

CPU = torch.device("cpu")


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """One prompt through one of our models: float32 [T, V]."""
    config, tokens = model.config, len(token_ids)
    backend = make_backend(
        "sdpa",
        num_layers=config.num_layers,
        num_blocks=1,
        block_size=32,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        dtype=torch.float32,
        device=CPU,
    )
    positions_T = torch.arange(tokens)
    backend.plan(
        AttentionBatch(
            query_start_loc_B1=torch.tensor([0, tokens]),
            seq_lens_B=torch.tensor([tokens]),
            block_table_BM=torch.zeros(1, 1, dtype=torch.long),
            slot_mapping_T=positions_T,
            query_lens=[tokens],
            seq_lens=[tokens],
        )
    )
    return model.logits(model.forward(torch.tensor(token_ids), positions_T, backend))


# --- dequantisation ---


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "BF16"])
def test_dequantisation_is_bit_equal_to_gguf_py(name: str) -> None:
    """Random bytes: every scale there is, with zeros of both signs, subnormals, infinities, NaN."""
    kind = QuantType[name]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = 2 * gguf_weights.CHUNK_BLOCKS + 3  # not a multiple of the chunk
    rows = np.random.default_rng(5).integers(0, 256, (1, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(rows, kind)
    ours = dequantize(rows, kind, torch.float32)
    assert ours.shape == (1, blocks * width)
    # A NaN's payload is nobody's business; every other bit is, the sign of zero too.
    nan = np.isnan(expected)
    assert 0 < nan.sum() < nan.size / 2
    assert np.array_equal(np.isnan(ours.numpy()), nan)
    assert np.array_equal(ours.numpy().view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    rounded = dequantize(rows, kind, torch.bfloat16)
    torch.testing.assert_close(
        rounded, torch.from_numpy(expected).bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_unquantised_types_keep_their_values() -> None:
    values = np.random.default_rng(6).standard_normal((3, 5)).astype(np.float32)
    torch.testing.assert_close(
        dequantize(values, QuantType.F32, torch.float32), torch.from_numpy(values), rtol=0, atol=0
    )
    half = values.astype(np.float16)
    torch.testing.assert_close(
        dequantize(half, QuantType.F16, torch.float32),
        torch.from_numpy(gguf.dequantize(half, QuantType.F16)),
        rtol=0,
        atol=0,
    )


# --- GGUF against transformers ---


@pytest.mark.parametrize("variant", list(MODELS))
def test_gguf_gives_the_logits_of_the_same_weights(variant: str, tmp_path: Path) -> None:
    theirs = MODELS[variant]()
    ids = [5, 80, 3, 211, 3, 47, 90, 12]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    theirs.save_pretrained(tmp_path / "folder")
    by_folder = zoo.load_model(tmp_path / "folder", device="cpu")
    by_gguf = zoo.load_model(write_gguf(tmp_path / "model.gguf", theirs), device="cpu")
    torch.testing.assert_close(logits(by_folder.model, ids), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(by_gguf.model, ids), logits(by_folder.model, ids))
    assert by_gguf.config == by_folder.config
    by_object = zoo.from_pretrained_model(theirs)
    assert torch.equal(logits(by_object.model, ids), logits(by_folder.model, ids))


@pytest.mark.parametrize("quant", [QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_1])
def test_quantised_gguf_gives_the_tensors_that_transformers_reads(
    quant: QuantType, tmp_path: Path
) -> None:
    model = MODELS["llama-tied"]()
    path = write_gguf(tmp_path / "model.gguf", model, quant=quant)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    expected: dict[str, torch.Tensor] = read["tensors"]
    ours = dict(GGUFFile(path).tensors(torch.float32))
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), name


def test_llama3_rope_scaling_is_recovered_from_the_frequency_factors(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = llama(rope_parameters=dict(scaling))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, CPU)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)

    def with_factors(factors: np.ndarray) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", factors)

    factors = (plain / scaled).numpy()
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", model, extra=with_factors(factors)))
    found = file.config()
    assert found["rope_theta"] == scaling.pop("rope_theta")
    assert found["rope_scaling"] == pytest.approx(scaling)
    assert "rope_freqs.weight" not in dict(file.tensors(torch.float32))
    factors[2] *= 1.5
    file = GGUFFile(write_gguf(tmp_path / "b.gguf", model, extra=with_factors(factors)))
    with pytest.raises(ValueError, match="does not follow llama3"):
        file.config()


def test_gguf_refusals_name_the_tensor_and_what_is_allowed(tmp_path: Path) -> None:
    model = llama()

    def odd_tensor(writer: gguf.GGUFWriter) -> None:
        data = np.zeros((1, 210), dtype=np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight2", data, raw_dtype=QuantType.Q6_K)

    path = write_gguf(tmp_path / "a.gguf", model, extra=odd_tensor)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight2 has type Q6_K; F32.*Q4_1"):
        list(GGUFFile(path).tensors(torch.float32))
    path = write_gguf(
        tmp_path / "b.gguf", model, extra=lambda w: w.add_tensor("odd", np.zeros(1, np.float32))
    )
    with pytest.raises(ValueError, match="unknown tensor 'odd'"):
        list(GGUFFile(path).tensors(torch.float32))
    writer = gguf.GGUFWriter(str(tmp_path / "c.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'mamba'; llama and qwen3 are allowed"):
        GGUFFile(tmp_path / "c.gguf")


def test_damaged_gguf_is_a_value_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", llama()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (3, 20, 100, 700, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF"):
            GGUFFile(cut)
    cut.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ValueError, match="not a readable GGUF"):
        GGUFFile(cut)


def test_fast_reader_reads_what_gguf_py_reads(tmp_path: Path) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_array("t.strings", ["", "a", "ĠĠ", "日本"])
        writer.add_array("t.numbers", [1, -2, 3])
        writer.add_array("t.floats", [0.5, -1.25])
        writer.add_array("t.flags", [True, False])
        writer.add_bool("t.flag", True)
        writer.add_key_value("t.wide", 2**40, GGUFValueType.UINT64)

    path = write_gguf(tmp_path / "a.gguf", llama(), extra=metadata)
    ours, reader = GGUFFile(path), gguf.GGUFReader(path)
    fields = [name for name in reader.fields if not name.startswith("GGUF.")]
    assert {"t.strings", "t.numbers", "t.floats", "t.flags", "t.flag", "t.wide"} < set(fields)
    for name in fields:
        assert ours.get(name) == pytest.approx(reader.fields[name].contents()), name


# --- safetensors ---


def test_sharded_checkpoint_gives_every_tensor_once(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    read = list(iter_safetensors(tmp_path))
    expected = model.state_dict()
    assert sorted(name for name, _ in read) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read)


def test_missing_and_damaged_files_say_which(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors file; a checkpoint needs"):
        next(iter_safetensors(tmp_path))
    save_file({"a": torch.ones(4)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 shards.*two\.safetensors"):
        next(iter_safetensors(tmp_path))
    save_file({"c": torch.ones(4)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"two\.safetensors lacks tensors.*: b"):
        list(iter_safetensors(tmp_path))
    content = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "one.safetensors").write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"one\.safetensors is not a readable"):
        next(iter_safetensors(tmp_path))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ValueError, match="plain file name"):
        next(iter_safetensors(tmp_path))
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        next(iter_safetensors(tmp_path))


def test_smollm2_reads_as_published() -> None:
    file = smollm2_or_skip()
    config = file.config()
    assert config["tie_word_embeddings"]
    assert (config["num_hidden_layers"], config["rms_norm_eps"]) == (30, 1e-5)
    assert (config["rope_theta"], config["head_dim"], config["vocab_size"]) == (1e5, 64, 49152)
    # The embedding and the first layer; weights of a trained network, so no scale is off.
    first = dict(itertools.islice(file.tensors(torch.bfloat16), 10))
    assert first.keys() >= {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}
    assert first["model.embed_tokens.weight"].shape == (49152, 576)
    assert all(0.01 < tensor.float().std() < 2 for tensor in first.values())
