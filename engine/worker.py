"""A worker owns a device: the model, its KV cache, the state tables and the extensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .attention import AttentionBackend, make_backend
from .config import EngineConfig
from .hooks import WorkerExtension
from .models.config import ModelConfig
from .runner import CausalLM, Flight, Pending, Runner
from .state import DeviceState
from .types import MaskRows, StepPlan


class Worker:
    """Runs plans on one device.

    Args:
        model: forward and head; see `runner.CausalLM`.
        attention: backend that holds the KV cache of ``config.num_blocks`` blocks.
        config: the engine's limits.
        vocab_size: width of the model's head.
        extensions: device halves of features, loaded in order.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        config: EngineConfig,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
        extensions: Sequence[WorkerExtension] = (),
    ) -> None:
        self.model = model
        self.attention = attention
        self.config = config
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.state = DeviceState(config, vocab_size, self.device)
        self.extensions = list(extensions)
        for extension in self.extensions:
            extension.load(self)
        self.runner = Runner(model, attention, self.state, config.block_size, self.extensions)

    def execute(self, plan: StepPlan) -> Flight:
        """Forget rows that were freed, then launch the forward."""
        if plan.freed_rows:
            for extension in self.extensions:
                extension.forget(plan.freed_rows)
        return self.runner.execute(plan)

    def sample(self, flight: Flight, masks: MaskRows | None) -> Pending:
        """Launch sampling behind a forward."""
        return self.runner.sample(flight, masks)


class SizedModel(CausalLM, Protocol):
    """A model file's ``Model``: it also says its sizes and where it lies."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device


def build_worker(
    model: SizedModel,
    config: EngineConfig,
    *,
    attention: str = "sdpa",
    extensions: Sequence[WorkerExtension] = (),
) -> Worker:
    """A worker around a loaded model, with a KV cache of ``config.num_blocks`` blocks.

    Raises:
        ValueError: ``attention`` names no backend.
    """
    sizes = model.config
    backend = make_backend(
        attention,
        num_layers=sizes.num_layers,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_heads=sizes.num_heads,
        dtype=model.dtype,
        device=model.device,
    )
    return Worker(
        model,
        backend,
        config,
        vocab_size=sizes.vocab_size,
        device=model.device,
        extensions=extensions,
    )
