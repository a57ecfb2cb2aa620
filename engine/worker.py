"""A worker owns a device: the model, its KV cache, the state tables and the extensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import AttentionBackend
from .config import EngineConfig
from .hooks import WorkerExtension
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
