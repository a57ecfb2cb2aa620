"""Checkpoints in safetensors: a stream of (name, tensor), one tensor at a time.

The files are mapped, so a tensor's pages are read when it is copied into the model and nothing is
held twice. GGUF files are read by `gguf_weights.py`; both give Hugging Face's parameter names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def iter_safetensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint folder, on the CPU, in the checkpoint's own dtype.

    Reads ``model.safetensors.index.json`` and its shards where there is one, else
    ``model.safetensors``, else a folder's only ``*.safetensors`` file.

    Raises:
        ValueError: no checkpoint, a missing or unreadable shard, or a tensor that the index names
            and its shard lacks. Missing shards are found before the first tensor is yielded.
    """
    for path, names in _shards(Path(folder)):
        yield from _read(path, names)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ValueError names the file when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _shards(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """Files and the tensors to take from each (None: all)."""
    index = folder / INDEX
    if not index.is_file():
        return [(_single(folder), None)]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} must map tensor names to files under 'weight_map'")
    names: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} names the shard {shard!r}; a plain file name is allowed")
        names.setdefault(shard, []).append(name)
    missing = sorted(shard for shard in names if not (folder / shard).is_file())
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(names)} shards that {INDEX} names: "
            f"{', '.join(missing)}; download the checkpoint again"
        )
    return [(folder / shard, names[shard]) for shard in sorted(names)]


def _single(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} *.safetensors files and no index" if files else "no *.safetensors file"
    raise ValueError(
        f"{folder} has {found}; a checkpoint needs {SINGLE} or {INDEX} "
        "(save_pretrained of transformers writes them)"
    )


def _read(path: Path, names: list[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); download it again"
        ) from error
    with file as shard:
        held: list[str] = list(shard.keys())
        lost = sorted(set(names or ()) - set(held))
        if lost:
            raise ValueError(f"{path} lacks tensors that {INDEX} names: {', '.join(lost[:5])}")
        for name in held if names is None else names:
            yield name, shard.get_tensor(name)
