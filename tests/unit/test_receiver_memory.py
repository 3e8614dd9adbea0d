"""Memory: flat over many updates, no second copy of the weights while updating or auditing."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np

from megasync.config import ApplyConfig
from megasync.receiver import audit as audit_module
from megasync.receiver.applier import Applier
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import plain_engine

SPECS = [spec(f"layers.{i}.w", "U8", (2048, 1024)) for i in range(4)]
TOTAL = sum(t.nbytes for t in SPECS)


def world() -> tuple[Publisher, Applier]:
    publisher = Publisher(MemorySink(num_versions=2), make_schema("run", SPECS))
    words = random_words(SPECS)
    publisher.checkpoint(words)
    applier = Applier(plain_engine(words), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    return publisher, applier


def test_case_64_repeated_updates_leave_memory_flat() -> None:
    publisher, applier = world()
    sizes = []
    tracemalloc.start()
    for v in range(1, 7):
        publisher.delta(changed(publisher.words, 0.002, seed=v))
        applier.update()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[2:]) - min(sizes[2:]) < 200_000, sizes


def test_case_65_update_takes_memory_for_its_changes_not_for_the_weights() -> None:
    publisher, applier = world()
    publisher.delta(changed(publisher.words, 0.002))
    gc.collect()
    tracemalloc.start()
    result = applier.update()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < TOTAL / 4
    assert peak < 80 * result.num_written + (3 << 20)


def test_case_76_audit_holds_one_piece_at_a_time(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(audit_module, "PIECE_NBYTES", 1 << 16)
    _, applier = world()
    found: list[int] = []
    true_read = audit_module.read_words

    def read(layout, live):  # type: ignore[no-untyped-def]
        words: np.ndarray = true_read(layout, live)
        found.append(words.nbytes)
        return words

    monkeypatch.setattr(audit_module, "read_words", read)
    gc.collect()
    tracemalloc.start()
    assert applier.audit().nbytes == TOTAL
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(found) == TOTAL
    assert max(found) <= 1 << 16
    assert peak < TOTAL / 2
