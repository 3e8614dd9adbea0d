"""The kept trace of a two-slot pass: it opens, and the next step is decoded while the XOR of the one before runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

TRACE = Path(__file__).parents[2] / "launch" / "bench" / "results" / "trace-stream.json.gz"

Span = tuple[float, float]


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Span]]:
    """Begin and end of the kernels that decode and of those that XOR, in microseconds, in the order of their begin."""
    with gzip.open(TRACE) as f:
        events = json.load(f)["traceEvents"]
    found: dict[str, list[tuple[int, Span]]] = {"decode": [], "xor": []}
    for e in events:
        if e.get("ph") == "X" and e.get("cat") == "kernel":
            kind = "xor" if "walk_kernel" in e["name"] else "decode" if "lz4" in e["name"].lower() else None
            if kind is not None:
                found[kind].append((e["args"]["stream"], (e["ts"], e["ts"] + e["dur"])))
    streams = [{stream for stream, _ in spans} for spans in found.values()]
    assert all(len(s) == 1 for s in streams), streams
    assert streams[0].isdisjoint(streams[1])
    return {kind: sorted(span for _, span in spans) for kind, spans in found.items()}


def test_trace_is_small_enough_to_keep() -> None:
    assert TRACE.stat().st_size < 1_000_000


def test_every_step_but_the_last_is_xored_beside_the_decoding_of_the_next(kernels: dict[str, list[Span]]) -> None:
    decode, xor = kernels["decode"], kernels["xor"]
    assert len(decode) >= 6
    beside = 0
    for (begin, end), (after, _) in zip(decode[1:], [*decode[2:], (float("inf"), 0.0)], strict=True):
        mine = [min(end, stop) - max(begin, start) for start, stop in xor if start < after and stop > begin]
        beside += max(mine, default=0.0) > 0
    assert beside == len(decode) - 1


def test_slot_is_not_filled_before_its_last_reader_is_done(kernels: dict[str, list[Span]]) -> None:
    """Two slots: a step goes into the slot of the one before the last, whose XOR began between both their decodings' ends."""
    decode, xor = kernels["decode"], kernels["xor"]
    for n in range(2, len(decode)):
        readers = [(start, stop) for start, stop in xor if decode[n - 2][1] <= start < decode[n - 1][1]]
        assert readers
        assert max(stop for _, stop in readers) <= decode[n][0]
