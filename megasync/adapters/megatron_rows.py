"""Which canonical rows a range of Megatron's fused rows holds.

A fused tensor's rows repeat a period of parts: one period for gate and up, one per query group for QKV. Any range of
rows, however tensor parallelism cut it, becomes spans of whole rows of single canonical tensors. Used by megatron.py
for every leaf; pure integers, must not import torch or Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megasync.adapters.names import Rows


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of one canonical tensor inside a range of fused rows.

    Attributes:
        part: Which canonical tensor.
        start: First row of it.
        local: First row inside the range.
        count: Rows.
    """

    part: int
    start: int
    local: int
    count: int


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The canonical tensors in the rows of a global tensor.

    Attributes:
        totals: Rows of each canonical tensor.
        parts: Rows that each has in one period.
        num_periods: Periods that follow each other.
    """

    totals: tuple[int, ...]
    parts: tuple[int, ...]
    num_periods: int

    def spans(self, start: int, count: int) -> list[RowSpan]:
        """Take a range of fused rows apart.

        Args:
            start: First row, global.
            count: Rows. Those beyond the last period are padding and vanish.

        Returns:
            Spans in row order; together with the padding they cover the range once.
        """
        period = sum(self.parts)
        stop = min(start + count, period * self.num_periods)
        found: list[RowSpan] = []
        if count <= 0 or period == 0:
            return found
        for number in range(start // period, self.num_periods):
            at = number * period
            if at >= stop:
                break
            for part, rows in enumerate(self.parts):
                first, last = max(start, at), min(stop, at + rows)
                if first < last:
                    found.append(RowSpan(part, number * rows + first - at, first - start, last - first))
                at += rows
        return found


def split_rows(rows: Rows, num_rows: int, num_names: int, config: Any, vocab_size: int | None) -> RowSplit:
    """How the rows of a global tensor are laid out.

    Args:
        rows: Kind of layout.
        num_rows: Rows of the global tensor.
        num_names: Canonical tensors in it.
        config: Megatron's transformer configuration (heads, query groups, head size for ``qkv``).
        vocab_size: Rows of a ``vocab`` tensor without padding.

    Returns:
        The split.

    Raises:
        ValueError: The rows do not fit the layout; the message says what was expected.
    """
    if rows == "gated":
        if num_rows % num_names:
            raise ValueError(f"{num_rows} rows are not {num_names} equal parts")
        each = num_rows // num_names
        return RowSplit((each,) * num_names, (each,) * num_names, 1)
    if rows == "vocab":
        if vocab_size is None:
            raise ValueError(
                f"the model has {num_rows} vocabulary rows, some of which may be padding: "
                "pass the checkpoint's vocab_size"
            )
        if vocab_size > num_rows:
            raise ValueError(f"vocab_size is {vocab_size}, but the model has only {num_rows} rows")
        return RowSplit((vocab_size,), (vocab_size,), 1)
    if rows == "qkv":
        groups = config.num_query_groups or config.num_attention_heads
        head = config.kv_channels
        query = config.num_attention_heads // groups * head
        period = query + 2 * head
        if num_rows != groups * period:
            raise ValueError(
                f"{num_rows} fused QKV rows; {groups} query groups of {query} query, {head} key and {head} value rows "
                f"make {groups * period}"
            )
        return RowSplit((groups * query, groups * head, groups * head), (query, head, head), groups)
    return RowSplit((num_rows,), (num_rows,), 1)
