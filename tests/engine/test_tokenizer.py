"""Tokenizers from GGUF files and folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from tightrope.engine.models import zoo
from tightrope.engine.models.tokenizer import TokenizerBundle, load_tokenizer, wrap_transformers
from tightrope.tests.engine.checkpoints import llama, smollm2_or_skip, write_gguf

UNICODE = [
    "plain words, and don't",
    "  12 \n\n\t 34567 x",
    "naïve café Ünïcödé",
    "日本語のテキスト 中文 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00a0 nbsp",
    "١٢٣ ½ ² Ⅷ",
    "\x00\x7f\ufeff",
    "trailing space ",
    "",
]


SPECIALS = ["<|end|>", "<|bos|>", "<|user|>"]
MERGES = ["Ġ Ġ", "1 2", "h e", "l l", "he ll", "Ġ a", "' t"]


def with_vocabulary(pre: str, *, add_bos: bool) -> Callable[[gguf.GGUFWriter], None]:
    def write(writer: gguf.GGUFWriter) -> None:
        tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokens += [merge.replace(" ", "") for merge in MERGES] + ["<tool>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 4) + [4])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eot_token_id(0)
        writer.add_add_bos_token(add_bos)
        writer.add_chat_template("{{ bos_token }}<|user|>{{ messages[0]['content'] }}")

    return write


def gguf_tokenizer(folder: Path, pre: str, *, add_bos: bool = False) -> TokenizerBundle:
    extra = with_vocabulary(pre, add_bos=add_bos)
    bundle = load_tokenizer(write_gguf(folder / f"{pre}.gguf", llama(), extra=extra))
    assert bundle is not None
    return bundle


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "default"])
def test_every_text_comes_back(pre: str, tmp_path: Path) -> None:
    bundle = gguf_tokenizer(tmp_path, pre)
    for text in UNICODE:
        # qwen2 composes what can be composed (NFC) before splitting.
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert bundle.decode(bundle.encode(text)) == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "  12", ["ĠĠ", "1", "2"]),
        ("gpt-2", "  12", ["Ġ", "Ġ", "12"]),
        ("qwen2", "  12", ["Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", "  12", ["Ġ", "Ġ", "12"]),
        ("gpt-2", "1212", ["12", "12"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),  # at most three digits a piece
        ("qwen2", "'T", ["'", "T"]),
        ("default", "hell's<|user|>12", ["hell", "'", "s", "<|user|>", "12"]),
    ],
)
def test_pre_tokenizers_split_as_named(
    pre: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    bundle = gguf_tokenizer(tmp_path, pre)
    assert bundle.tokenizer.encode(text).tokens == expected


def test_smollm_splits_as_the_library_s_own_digits_and_byte_level(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path, "smollm").tokenizer
    theirs = Tokenizer.from_str(ours.to_str())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in [*UNICODE, "a\n\n  b", "\n\n\nx  ", "it's  we'll\t\t'", " \u3000 x\u2028\u2029y"]:
        assert ours.encode(text).ids == theirs.encode(text).ids, repr(text)


def test_special_tokens_are_never_added_twice(tmp_path: Path) -> None:
    bundle = gguf_tokenizer(tmp_path, "llama-bpe", add_bos=True)
    hell = bundle.encode("hell", add_special_tokens=False)
    assert bundle.encode("hell") == [1, *hell]
    assert bundle.encode("<|bos|>hell") == [1, *hell]
    assert bundle.encode("") == [1]
    chat = bundle.render_chat([{"role": "user", "content": "hell"}])
    assert chat == "<|bos|><|user|>hell"
    assert bundle.encode(chat) == bundle.encode(chat, add_special_tokens=False) == [1, 2, *hell]
    assert bundle.special_token_ids == {0, 1, 2}
    assert bundle.eos_token_ids == {0, 2}  # eot, and the model's eos
    tool = bundle.encode("<tool>", add_special_tokens=False)
    assert len(tool) == 1  # user-defined: one token, and part of the text
    assert bundle.decode([1, 2, *hell, *tool]) == "hell<tool>"
    assert bundle.decode([1, *hell], skip_special_tokens=False) == "<|bos|>hell"


def test_the_transformers_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    bundle = gguf_tokenizer(tmp_path, "smollm", add_bos=True)
    hf = bundle.transformers
    for text in [*UNICODE, "hell<|user|>12"]:
        assert hf(text).input_ids == bundle.encode(text)
        assert hf.decode(bundle.encode(text), skip_special_tokens=True) == bundle.decode(
            bundle.encode(text)
        )
    again = wrap_transformers(hf)
    assert again.add_bos
    assert again.encode("hell 12") == bundle.encode("hell 12")
    assert again.transformers is hf


def test_unknown_gguf_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre='tekken'; smollm.*are allowed"):
        gguf_tokenizer(tmp_path, "tekken")
    path = write_gguf(
        tmp_path / "spm.gguf", llama(), extra=lambda w: w.add_tokenizer_model("llama")
    )
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model='llama'; 'gpt2' is allowed"):
        load_tokenizer(path)
    assert load_tokenizer(write_gguf(tmp_path / "none.gguf", llama())) is None


def test_folder_tokenizer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = load_tokenizer(tiny_checkpoint)
    assert bundle is not None
    assert bundle.add_bos
    assert bundle.encode("<|endoftext|>the") == bundle.encode("the")
    assert bundle.encode("the")[0] == 0
    assert bundle.eos_token_ids == {2}
    text = "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert bundle.render_chat([{"role": "user", "content": "hi"}]) == text
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text("from the file")
    other = load_tokenizer(folder)
    assert other is not None
    assert other.chat_template == "from the file"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    assert load_tokenizer(folder) is None
    assert zoo.load_model(folder, device="cpu").tokenizer is None


def test_smollm2_tokenizer() -> None:
    bundle = load_tokenizer(smollm2_or_skip())
    assert bundle is not None
    assert bundle.tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    assert bundle.encode("<|im_start|>user") == [1, 4093]
    assert (bundle.eos_token_ids, bundle.add_bos, bundle.vocab_size) == ({2}, False, 49152)
    for text in UNICODE:
        assert bundle.decode(bundle.encode(text)) == text
