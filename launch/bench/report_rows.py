"""Reads the raw rows of all benchmarks for the report: checked, by file, with what is missing said in words.

Before it: the benchmarks, through ``rows.RowWriter``. After it: report_measures. Must not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench.rows import Row, middle

WRITTEN_BY = {
    "apply-gpu": "bench.bench_apply",
    "audit-gpu": "bench.bench_audit",
    "counters-gpu": "bench.bench_counters",
    "cpu": "bench.bench_cpu",
    "deltas-cpu": "bench.bench_deltas",
    "end-to-end-gpu": "bench.bench_end_to_end",
    "engine-gpu": "bench.bench_engine",
    "mask-gpu": "bench.bench_mask",
    "megatron-gpu": "gpu_megatron",
    "nvfp4-gpu": "bench.bench_nvfp4",
    "one-queue-gpu": "bench.bench_one_queue",
    "payload-cpu": "bench.bench_payload",
    "peers-gpu": "bench.bench_peers",
    "peers-nvlink-gpu": "bench.bench_peers",
    "plan-moe-445gb-cpu": "bench.bench_plan",
    "receiver-gpu": "bench.bench_receiver",
    "trainer-gpu": "bench.bench_trainer",
    "trainer-gpu-connections1": "bench.bench_trainer",
}
"""Result files that the report reads, without their ending, and the module of launch that writes each."""

MEGATRON = "megatron-gpu"
"""File of the runs of Megatron, and what the names of those in other layouts begin with, then a hyphen."""

_NEEDED: dict[str, type] = {"stage": str, "case": str, "sample": int, "device": str, "commit": str}


class BrokenRowsError(ValueError):
    """A result file is not what ``RowWriter`` writes; nothing is reported from any."""


class NotMeasuredError(LookupError):
    """Rows that a figure needs are not there; the message says which, and what writes them."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Samples of one figure.

    Attributes:
        p50: Median.
        p20: 20th percentile.
        p80: 80th percentile.
        num: Samples.
    """

    p50: float
    p20: float
    p80: float
    num: int

    def scaled(self, factor: float) -> Stat:
        """In another unit."""
        return Stat(self.p50 * factor, self.p20 * factor, self.p80 * factor, self.num)


def stat(rows: Sequence[Row], value: str | Callable[[Row], float]) -> Stat:
    """Median and percentiles of a column, or of a function of the row.

    Raises:
        BrokenRowsError: A row without the column.
    """
    try:
        values = [float(r[value] if isinstance(value, str) else value(r)) for r in rows]
    except (KeyError, TypeError, ZeroDivisionError) as e:
        raise BrokenRowsError(f"rows of case {rows[0]['case']!r} give no {value}: {e!r}; take them again") from e
    p50, p20, p80 = middle(values)
    return Stat(p50, p20, p80, len(values))


def commit_of(row: Row) -> str:
    """The commit that a row was taken at; a copy of the tree without history could not tell."""
    return row["commit"] if re.fullmatch(r"[0-9a-f]{7,40}\+?", row["commit"]) else "not recorded"


class Results:
    """All rows of a folder.

    Args:
        folder: Where the ``*.jsonl`` lie.

    Raises:
        BrokenRowsError: A file is broken; every fault of every file is named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[Row]] = {}
        faults: list[str] = []
        for path in sorted(folder.glob("*.jsonl")):
            self.files[path.stem] = _read(path, faults)
        if faults:
            raise BrokenRowsError("\n".join(faults))

    def missing(self) -> list[str]:
        """Files that the report reads and that are not there."""
        return [_how_to_get(name) for name in WRITTEN_BY if name not in self.files]

    def unread(self) -> list[str]:
        """Files that nothing reads."""
        known = {*WRITTEN_BY, *self.family(MEGATRON)}
        return [name for name, rows in self.files.items() if name not in known and "target_id" not in rows[0]]

    def family(self, name: str) -> list[str]:
        """Files of this name, and of names that go on after it with a hyphen; those that are there, by name."""
        return sorted(found for found in self.files if found == name or found.startswith(f"{name}-"))

    def take(self, file: str, case: str | None = None, **columns: Any) -> list[Row]:
        """Rows of a file with these values.

        Args:
            file: Its name without ending.
            case: The case, if one is asked for.
            columns: Further columns.

        Raises:
            NotMeasuredError: There is none.
        """
        if file not in self.files:
            raise NotMeasuredError(_how_to_get(file))
        wanted = columns if case is None else {"case": case} | columns
        rows = [r for r in self.files[file] if all(r.get(k) == v for k, v in wanted.items())]
        if not rows:
            named = ", ".join(f"{k} {v!r}" for k, v in wanted.items())
            raise NotMeasuredError(f"{file}.jsonl has no rows with {named} (python -m launch.{WRITTEN_BY[file]})")
        return rows

    def cases(self, file: str, prefix: str = "") -> list[str]:
        """Cases of a file in the order they were taken, none where the file is missing."""
        return list(dict.fromkeys(r["case"] for r in self.files.get(file, []) if r["case"].startswith(prefix)))


def _how_to_get(file: str) -> str:
    return f"{file}.jsonl is missing (python -m launch.{WRITTEN_BY[file]} writes it)"


def _read(path: Path, faults: list[str]) -> list[Row]:
    rows: list[Row] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        faults.append(f"{path}: cannot be read: {e}")
        return rows
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number} of {len(lines)}"
        try:
            row = json.loads(line, parse_constant=_refuse)
        except ValueError as e:
            faults.append(f"{where}: not JSON ({e}); take this benchmark again")
            continue
        if not isinstance(row, dict):
            faults.append(f"{where}: expected an object, found {type(row).__name__}")
            continue
        wrong = [f"{k} {row.get(k)!r}" for k, kind in _NEEDED.items() if not isinstance(row.get(k), kind)]
        if wrong:
            faults.append(f"{where}: missing or of another type: {', '.join(wrong)}; expected rows of RowWriter")
        rows.append(row)
    if not lines:
        faults.append(f"{path}: no rows; take this benchmark again or remove the file")
    return rows


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no measurement")
