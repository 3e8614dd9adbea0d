"""Updates through the whole receiver: real codec, manifest, sink; values compared byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from megasync.config import ApplyConfig
from megasync.receiver.applier import Applier
from megasync.receiver.backend import FetchedFrame, Placed
from megasync.receiver.cpu import CpuBackend
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import plain_engine, words_of

SPECS = [
    spec("model.embed_tokens.weight", "BF16", (300, 64)),
    spec("model.layers.0.mlp.w1", "U8", (700, 512)),
    spec("model.layers.0.mlp.w2", "F32", (90, 33)),
    spec("model.layers.1.norm.weight", "BF16", (64,)),
    spec("model.layers.1.count", "I64", (7, 3)),
    spec("model.layers.1.scale", "F32", ()),
    spec("model.layers.1.empty", "F32", (0, 4)),
]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("codec", ["sparse", "zstd", "lz4", "stored"])
def test_update(codec: str, workers: int) -> None:
    sink = MemorySink()
    publisher = Publisher(sink, make_schema("run", SPECS), codec=codec)
    old = random_words(SPECS)
    publisher.checkpoint(old)
    engine = plain_engine(old)
    applier = Applier(engine, sink, ApplyConfig(workers=workers))
    joined = applier.join()
    assert (joined.version, joined.from_version, applier.ready) == (0, 0, True)
    words = old
    for v in range(1, 4):
        words = changed(words, 0.01 if v != 2 else 0.5, seed=v)
        publisher.delta(words)
        result = applier.update()
        assert (result.from_version, result.version, result.versions) == (v - 1, v, (v,))
        assert result.num_changed == result.num_written == publisher.newest.num_changed > 0
        for name, expected in words.items():
            np.testing.assert_array_equal(words_of(engine.live[name]).reshape(expected.shape), expected)
        assert applier.audit().version == v


def test_backends_that_gain_from_threads_place_and_prove_on_the_pool() -> None:
    seen: set[str] = set()

    class Threaded(CpuBackend):
        threads = True

        def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
            seen.add(threading.current_thread().name)
            return super().place(frames)

    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    words = random_words(SPECS)
    publisher.checkpoint(words)
    engine = plain_engine(words)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=2), backend=Threaded)
    applier.join()
    for v in (1, 2):
        words = changed(words, 0.02, seed=v)
        publisher.delta(words)
    assert applier.stage(2) is not None
    assert applier.update().versions == (1, 2)
    assert all(name.startswith("megasync") for name in seen)
    for name, expected in words.items():
        np.testing.assert_array_equal(words_of(engine.live[name]).reshape(expected.shape), expected)
    applier.close()
