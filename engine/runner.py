"""One model on one device: the forward of a plan, then sampling behind it.

The two are separate launches so that masks are made on the host while the forward runs. The runner
owns the head: only the rows that sample are ever multiplied with it. Everything it does is in
stream order on its device, so the next step's `execute` may be called before this step's result is
read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .attention import AttentionBackend
from .batch import BatchBuilder, StepBatch
from .hooks import Outcome, WorkerExtension
from .logprobs import PromptLogprobs, prompt_logprobs
from .sampler import SampleOutput, sample
from .state import DeviceState
from .types import Entry, MaskRows, PositionLogprobs, StepPlan, StepResult, TokenResult


class CausalLM(Protocol):
    """What the runner asks of a model (`models/`)."""

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Final hidden states [T, D], after the last norm."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size]."""
        ...


@dataclass(slots=True)
class Flight:
    """A forward that was launched and not yet sampled from."""

    plan: StepPlan
    batch: StepBatch
    hidden_TD: torch.Tensor


@dataclass(slots=True)
class Pending:
    """A sampled step whose tokens are still on the device."""

    plan: StepPlan
    output: SampleOutput | None
    drafts_SK: torch.Tensor | None
    prompt: list[tuple[Entry, PromptLogprobs]]

    def wait(self) -> StepResult:
        """The one place where the host waits for the device."""
        result = StepResult({})
        if self.output is not None:
            self._read(self.output, result)
        for entry, logprobs in self.prompt:
            output = result.outputs.setdefault(entry.request.request_id, TokenResult([]))
            output.prompt_logprobs = logprobs.to_host()
        return result

    def _read(self, output: SampleOutput, result: StepResult) -> None:
        tokens = output.token_R.tolist()
        accepted = output.num_accepted_S.tolist()
        empty = output.empty_R.tolist()
        drafts = self.drafts_SK.tolist() if self.drafts_SK is not None else None
        logprobs = output.logprobs_to_host()
        entries = [entry for entry in self.plan.entries if entry.samples]
        for i, (entry, count) in enumerate(zip(entries, accepted, strict=True)):
            first = entry.first_logits_row
            end = first + count + 1
            wanted: list[PositionLogprobs] | None = None
            if logprobs is not None and entry.request.params.logprobs is not None:
                wanted = [logprobs[row] for row in range(first, end)]
            result.outputs[entry.request.request_id] = TokenResult(
                tokens=tokens[first:end],
                logprobs=wanted,
                drafts=drafts[i] if drafts is not None else [],
                error=empty[end - 1],
            )


class Runner:
    """Executes plans. ``vocab_size`` is the width of the head."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        state: DeviceState,
        block_size: int,
        extensions: Sequence[WorkerExtension] = (),
    ) -> None:
        self.model = model
        self.attention = attention
        self.state = state
        self.batches = BatchBuilder(state, block_size)
        self.extensions = extensions
        self.prepare_seconds = 0.0  # host time to write tables, gather inputs and plan attention

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Flight:
        """Launch the target forward of a closed plan."""
        began = time.perf_counter()
        self.state.apply(plan)
        if plan.block_copies:
            self.attention.copy_blocks(plan.block_copies)
        batch = self.batches.build(plan)
        self.attention.plan(batch.attention)
        self.prepare_seconds += time.perf_counter() - began
        hidden_TD = self.model.forward(batch.input_ids_T, batch.positions_T, self.attention)
        return Flight(plan, batch, hidden_TD)

    @torch.inference_mode()
    def sample(self, flight: Flight, masks: MaskRows | None) -> Pending:
        """Launch head, masks, sampling and verification, then the extensions' drafting."""
        plan, batch, state = flight.plan, flight.batch, self.state
        prompt = self._prompt_logprobs(flight)
        state.computed[batch.chunk_rows] += batch.chunk_counts
        if batch.sampling is None:
            return Pending(plan, None, None, prompt)
        sampling = batch.sampling
        hidden_RD = flight.hidden_TD[batch.logits_index_R]
        output = sample(self.model.logits(hidden_RD), sampling, state.sampling, masks)
        # Rows past the accepted ones write drafts' places, which the next draft overwrites.
        state.tokens[sampling.row_R, sampling.position_R] = output.token_R
        state.length[sampling.rows_S] += output.num_accepted_S + 1
        state.computed[sampling.rows_S] = state.length[sampling.rows_S] - 1
        drafts_SK = None
        if self.extensions:
            drafts_SK = self._draft(flight, hidden_RD, output)
        return Pending(plan, output, drafts_SK, prompt)

    def _draft(self, flight: Flight, hidden_RD: torch.Tensor, output: SampleOutput) -> torch.Tensor:
        """Let extensions draft; read back what they wrote behind the committed tokens."""
        sampling = flight.batch.sampling
        assert sampling is not None
        outcome = Outcome(
            entries=[entry for entry in flight.plan.entries if entry.samples],
            rows_S=sampling.rows_S,
            first_row_S=sampling.first_row_S,
            num_accepted_S=output.num_accepted_S,
            hidden_RD=hidden_RD,
        )
        for extension in self.extensions:
            extension.launch(flight.plan, outcome)
        most = max(extension.num_draft for extension in self.extensions)
        columns_SK = self.state.length[sampling.rows_S, None] + torch.arange(
            most, device=self.state.device
        )
        columns_SK.clamp_(max=self.state.tokens.shape[1] - 1)
        return self.state.tokens[sampling.rows_S[:, None], columns_SK]

    def _prompt_logprobs(self, flight: Flight) -> list[tuple[Entry, PromptLogprobs]]:
        """Logits of every prompt position whose next token is in the prompt too."""
        found: list[tuple[Entry, PromptLogprobs]] = []
        for i, entry in enumerate(flight.plan.entries):
            top = entry.request.params.prompt_logprobs
            count = min(entry.num_tokens, entry.request.num_prompt - 1 - entry.start)
            if top is None or count <= 0 or entry.cancelled:
                continue
            first = flight.batch.query_starts[i]
            logits = self.model.logits(flight.hidden_TD[first : first + count])
            targets = self.state.tokens[entry.row, entry.start + 1 : entry.start + 1 + count]
            found.append((entry, prompt_logprobs(logits, targets, top)))
        return found
