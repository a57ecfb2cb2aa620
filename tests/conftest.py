"""Shared fixtures: a tiny random Llama checkpoint on disk, and an LLM on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from tightrope import LLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: ids 0-2 are special, then one token a byte, then a few words.

    Like Llama's, it puts its begin token ``<|endoftext|>`` before a text.
    """
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "a"), ("Ġ", "the"), ("{", '"'), ('"', ":")]
    words += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )
    return tokenizer


_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Tiny models gain nothing from threads, and on busy cores their barriers cost tenfold."""
    torch.set_num_threads(_THREADS if request.node.get_closest_marker("slow") else 1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, weights (float32), tokenizer, chat template and generation config.

    Llama, 2 layers, hidden 64, 4 heads over 2 KV heads of 16, vocabulary 272 (a few more rows than
    the tokenizer has tokens), context 256, end token ``<|im_end|>`` (2). Its greedy outputs differ
    from prompt to prompt.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=2, do_sample=True, temperature=0.7, top_p=0.9
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def shared_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    """An engine on the tiny checkpoint that tests share; see `llm`."""
    from tightrope import LLM

    with LLM(tiny_checkpoint, device="cpu", max_num_seqs=8) as made:
        yield made


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test must leave empty."""
    yield shared_llm
    stats = shared_llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["free_blocks"] == stats["blocks"]
