"""What does a linear layer cost on two CPU cores, by its number of rows and the way it is called?

SmolLM2's five products in float32, weights larger than the last-level cache in all, as in a real
step. Every cell is the lower decile of many calls, so that other processes on the same cores matter
little; microseconds of one call. The ways:

* ``linear``: ``F.linear``, the weight as stored, [out, in];
* ``pretransposed``: ``mm`` with a weight stored [in, out];
* ``transposed``: ``mm(W, x^T)^T`` on the stored weight;
* ``packed``: oneDNN's prepacked weight (an opaque layout), packed once for sixteen rows;
* ``packed_for_count``: the same, packed anew for every row count;
* ``rows``: a matrix-vector product for every row.

``same_bits`` lists, for three of the ways, row counts whose results are equal bit by bit.

Finding: the pack for sixteen rows is the cheapest way, or within noise of it, from 2 to 300 rows
(a single row is some 15 % cheaper stored [in, out], which is twice as dear at 4 to 8), and the only
one in which a row has the same bits in any company; ``F.linear`` costs twice as much at 2 to 4
rows. So `engine.models.linear` packs. A tied head cannot be packed without a second copy (the
embedding reads its rows): there the transposed call, padded to 4, 8 or 16 rows, comes next.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from .records import contention, environment, folder_argument

SHAPES = {
    "qkv": (576, 960),
    "o": (576, 576),
    "gate_up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
_SHORT = 9  # rows up to which one product a row is tried
_PACKED_FOR = 16
_BITS_UP_TO = 40


@dataclass(frozen=True)
class Config:
    """``cache_bytes``: the weights cycled through exceed it. ``calls``: of each cell, a quarter of
    them for the head, whose calls are long."""

    rows: tuple[int, ...] = (*range(1, 18), 24, 32, 64, 128, 300)
    threads: int = 2
    cache_bytes: int = 48 << 20
    calls: int = 40
    seed: int = 0


Call = Callable[[torch.Tensor, torch.Tensor], object]


def _packed(x_RI: torch.Tensor, weight: torch.Tensor) -> object:
    return torch.ops.mkldnn._linear_pointwise(x_RI, weight, None, "none", [], "")


def _pack(weight_OI: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, rows)


def _by_row(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> object:
    return [torch.mv(weight_OI, x_I) for x_I in x_RI]


CALLS: dict[str, Call] = {
    "linear": F.linear,
    "pretransposed": torch.mm,
    "transposed": lambda x_RI, weight_OI: torch.mm(weight_OI, x_RI.t()),
    "packed": _packed,
    "packed_for_count": _packed,
    "rows": _by_row,
}


def _microseconds(call: Call, x: torch.Tensor, weights: list[torch.Tensor], calls: int) -> float:
    seconds: list[float] = []
    for i in range(calls):
        began = time.perf_counter()
        call(x, weights[i % len(weights)])
        seconds.append(time.perf_counter() - began)
    return round(sorted(seconds)[len(seconds) // 10] * 1e6, 1)


def _same_bits(call: Call, x_RI: torch.Tensor, weight: torch.Tensor) -> list[list[int]]:
    """Row counts in classes that give the first row the same bits."""
    classes: list[tuple[torch.Tensor, list[int]]] = []
    for count in range(1, len(x_RI) + 1):
        result = call(x_RI[:count], weight)
        assert isinstance(result, torch.Tensor)
        # The transposed call has features first.
        first = result[0] if len(result) == count else result[:, 0]
        for known, members in classes:
            if torch.equal(known, first):
                members.append(count)
                break
        else:
            classes.append((first.clone(), [count]))
    return [members for _, members in classes]


def _measure_shape(config: Config, shape: tuple[int, int]) -> dict[str, Any]:
    size_in, size_out = shape
    calls = config.calls if size_out < 10_000 else config.calls // 4
    copies = -(-config.cache_bytes // (4 * size_in * size_out))
    weights = [torch.randn(size_out, size_in) for _ in range(copies)]
    stored: dict[str, list[torch.Tensor]] = dict.fromkeys(CALLS, weights)
    stored["pretransposed"] = [weight.t().contiguous() for weight in weights]
    stored["packed"] = [_pack(weight, _PACKED_FOR) for weight in weights]
    table: dict[str, dict[str, float]] = {name: {} for name in CALLS}
    for count in config.rows:
        x_RI = torch.randn(count, size_in)
        stored["packed_for_count"] = [_pack(weight, count) for weight in weights]
        for name, call in CALLS.items():
            if name != "rows" or count <= _SHORT:
                table[name][str(count)] = _microseconds(call, x_RI, stored[name], calls)
    x_RI = torch.randn(_BITS_UP_TO, size_in)
    bits = {
        name: _same_bits(CALLS[name], x_RI, stored[name][0])
        for name in ("linear", "transposed", "packed")
    }
    return {"microseconds": table, "same_bits": bits}


@torch.inference_mode()
def run(config: Config) -> dict[str, Any]:
    """One record: host, versions, and for every product the table and the classes of equal bits."""
    torch.manual_seed(config.seed)
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        shapes = {name: _measure_shape(config, shape) for name, shape in SHAPES.items()}
    finally:
        torch.set_num_threads(before)
    return {
        "experiment": "linear_rows",
        "config": asdict(config),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **environment(),
        "contention": round(contention(), 3),
        "shapes": shapes,
    }


def main() -> None:
    folder = folder_argument(__doc__)
    record = run(Config())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "linear_rows.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
