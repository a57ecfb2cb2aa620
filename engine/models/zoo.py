"""Names -> files -> a loaded model.

A model is one module of this package, named as Hugging Face's ``model_type`` and holding a class
``Model(config, *, dtype, device)`` with ``load_weights``; it is found by importing that name, so
adding an architecture edits nothing here.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import smollm2
from .config import ModelConfig
from .gguf_weights import GGUFFile
from .tokenizer import TokenizerBundle, load_tokenizer, wrap_transformers
from .weights import iter_safetensors, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BUILT_IN = {smollm2.NAME: smollm2.ensure_smollm2}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class LoadedModel:
    """A model on its device, in eval mode, and what its files say about generating with it.

    ``eos_token_ids`` is the union of config, generation_config and tokenizer;
    ``generation_config`` holds what the checkpoint sets, {} where it says nothing.
    """

    model: Any
    config: ModelConfig
    tokenizer: TokenizerBundle | None
    eos_token_ids: frozenset[int]
    name: str
    dtype: torch.dtype
    device: torch.device
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])


def resolve(name: str | Path) -> Path:
    """The folder or .gguf file behind a model's name, fetched when it is not here yet.

    Raises:
        ValueError: nothing is found under the name; the message says what to do.
    """
    if isinstance(name, str) and name in _BUILT_IN:
        return _BUILT_IN[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model {str(name)!r} is a file; only .gguf files are allowed")
        return path
    if isinstance(name, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ValueError(
        f"model {str(name)!r} not found: give {', '.join(_BUILT_IN)}, a folder with config.json "
        "and *.safetensors, a .gguf file, or a Hub id (organisation/name)"
    )


def load_model(
    name: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
) -> LoadedModel:
    """Load a model by name (see ``resolve``).

    ``device="auto"`` is CUDA where there is one. ``dtype="auto"`` is the checkpoint's own on CUDA
    (bfloat16 for GGUF) and float32 on the CPU.

    Raises:
        ValueError: the model is missing, unreadable, or of a ``model_type`` without a module.
    """
    path = resolve(name)
    on = _device(device)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return _load(str(name), path, on, dtype, pool)


def _load(
    name: str, path: Path, on: torch.device, dtype: str | torch.dtype, pool: Executor
) -> LoadedModel:
    """The tokenizer is built beside the weights, whose copies do not hold the interpreter."""
    if path.suffix == ".gguf":
        gguf = GGUFFile(path)
        hf_config = gguf.config()
        as_dtype = _dtype(dtype, on, torch.bfloat16)
        weights = gguf.tensors(as_dtype)
        tokenizer = pool.submit(load_tokenizer, gguf)
        generation = {key: value for key in _TOKEN_KEYS if (value := hf_config[key]) is not None}
    else:
        hf_config = read_json(path / "config.json")
        as_dtype = _dtype(dtype, on, _checkpoint_dtype(hf_config))
        weights = iter_safetensors(path)
        tokenizer = pool.submit(load_tokenizer, path)
        file = path / "generation_config.json"
        generation = read_json(file) if file.is_file() else {}
    return _build(hf_config, weights, tokenizer.result, generation, name, as_dtype, on)


def from_pretrained_model(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | TokenizerBundle | str | Path | None = None,
) -> LoadedModel:
    """Copy the weights of a loaded transformers model, on its device and in its dtype."""
    match tokenizer:
        case None | TokenizerBundle():
            bundle = tokenizer
        case str() | Path():
            bundle = load_tokenizer(resolve(tokenizer))
        case _:
            bundle = wrap_transformers(tokenizer)
    generation: Any = hf_model.generation_config  # None for models that cannot generate
    return _build(
        hf_model.config.to_dict(),
        hf_model.state_dict().items(),
        lambda: bundle,
        {} if generation is None else generation.to_diff_dict(),
        hf_model.config.name_or_path or type(hf_model).__name__,
        hf_model.dtype,
        hf_model.device,
    )


_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _build(
    hf_config: Mapping[str, Any],
    weights: Weights,
    tokenizer_of: Callable[[], TokenizerBundle | None],
    generation: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    model_class = _model_class(str(hf_config.get("model_type", "")))
    config = ModelConfig.from_hf(hf_config)
    with torch.inference_mode():
        model = model_class(config, dtype=dtype, device=device)
        model.load_weights(weights)
    tokenizer = tokenizer_of()
    ends = set(() if tokenizer is None else tokenizer.eos_token_ids)
    for source in (hf_config, generation):
        value = source.get("eos_token_id")
        ends.update(value if isinstance(value, list) else [] if value is None else [value])
    return LoadedModel(model, config, tokenizer, frozenset(ends), name, dtype, device, generation)


def _model_class(model_type: str) -> Any:
    """``Model`` of the module called ``model_type``."""
    modules = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found = _import(model_type) if model_type in modules else None
    if found is None:
        known = [name for name in sorted(modules) if _import(name) is not None]
        raise ValueError(f"model_type {model_type!r} is unknown; {', '.join(known)} are allowed")
    return found


def _import(module: str) -> Any:
    return getattr(importlib.import_module(f".{module}", __package__), "Model", None)


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ValueError(
            f"{folder} has several models; name one: {', '.join(file.name for file in ggufs)}"
        )
    raise ValueError(
        f"{folder} has no config.json and no .gguf file; save_pretrained of transformers writes "
        "a folder that can be loaded"
    )


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return _in_folder(Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model {name!r} is neither a folder here nor a public repository of the Hub; check "
            "the name (a gated one needs `hf auth login`)"
        ) from error
    except OSError as error:  # every network and cache error of the library is one
        raise ValueError(
            f"model {name!r} is neither a folder here nor in the Hub's cache, and the Hub cannot "
            f"be reached ({type(error).__name__}): connect and try again, run `hf download {name}` "
            "where there is a network, or give the path of a folder"
        ) from error


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        on = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown; auto, cpu and cuda are allowed") from error
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available here; auto and cpu are allowed")
    return on


def _dtype(dtype: str | torch.dtype, device: torch.device, own: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else own
    named = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if named not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is unknown; auto, {', '.join(DTYPES)} are allowed")
    assert named is not None
    return named


def _checkpoint_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """``dtype``, or ``torch_dtype`` as it was called before; float32 where neither is set."""
    named = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    return DTYPES.get(named.removeprefix("torch."), torch.float32)
