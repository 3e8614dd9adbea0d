"""Fetch: only the frames that are needed, in few reads, digests checked, a bad frame read once more."""

from __future__ import annotations

import numpy as np
import pytest

from megasync.config import ApplyConfig
from megasync.errors import MemoryPlanError, RefetchError, RetryError
from megasync.layout.compose import arrange
from megasync.receiver.applier import Applier
from megasync.receiver.bind import bind
from megasync.receiver.fetch import RANGE_NBYTES, Fetched, fetch, plan_ranges
from megasync.sinks.memory import MemorySink
from megasync.types import Box
from megasync.versions.publication import PublicationReader
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, live, plain_engine, words_of

SPECS = [spec(f"layers.{i}.w", "U8", (512, 600), cut="row") for i in range(3)]


class LossySink(MemorySink):
    """Gives other bytes for the first reads of payloads."""

    def __init__(self, num_bad: int) -> None:
        super().__init__()
        self.num_bad, self.reads = num_bad, []  # type: ignore[var-annotated]

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = 60.0) -> None:
        super().read_into(key, offset, out, timeout_s=timeout_s)
        self.reads.append((offset, len(out)))
        if self.num_bad:
            self.num_bad -= 1
            out[len(out) // 2] ^= 1


def run(sink: MemorySink, workers: int = 1) -> tuple[Publisher, Applier, PlainEngine, dict[str, np.ndarray]]:
    publisher = Publisher(sink, make_schema("run", SPECS), frame_changed=500)
    words = random_words(SPECS)
    publisher.checkpoint(words)
    engine = plain_engine(words)
    applier = Applier(engine, sink, ApplyConfig(workers=workers))
    applier.join()
    new = changed(words, 0.02)
    publisher.delta(new)
    return publisher, applier, engine, new


@pytest.mark.parametrize("workers", [1, 4])
def test_case_70_bad_frame_is_dropped_and_refetched(workers: int) -> None:
    sink = LossySink(1)
    _, applier, engine, new = run(sink, workers)
    result = applier.update()
    assert result.num_refetched == 1
    for n, w in new.items():
        np.testing.assert_array_equal(words_of(engine.live[n]), w)
    assert result.fetched_nbytes == sum(n for _, n in sink.reads)


def test_case_58_70_frame_that_stays_bad_is_refused_and_nothing_is_written() -> None:
    sink = LossySink(2)
    _, applier, engine, _ = run(sink)
    before = {n: t.clone() for n, t in engine.live.items()}
    with pytest.raises(RefetchError, match=r"version 1\): digest .* expected .*read twice"):
        applier.update()
    assert all((before[n] == engine.live[n]).all() for n in before)
    assert (applier.version, engine.events) == (0, [])
    assert applier.update().version == 1


def test_only_frames_that_touch_this_ranks_slices_are_read() -> None:
    publisher, _, _, _ = run(MemorySink())
    schema, manifest = publisher.schema, publisher.newest
    assert manifest is not None
    half = [arrange((512, 600), word_nbytes=1, start=(0, 0), stop=(256, 600)).to(t.name) for t in SPECS]
    places = dict(zip((t.name for t in SPECS), half, strict=True))
    from tests.unit.receiving import Mailbox, RankEngine, on_ranks

    mailbox = Mailbox(2)
    other = [arrange((512, 600), word_nbytes=1, start=(256, 0), stop=(512, 600)).to(t.name) for t in SPECS]
    engines = [
        RankEngine(mailbox, 0, live={t.name: live(np.zeros((256, 600), np.uint8)) for t in SPECS}, places=places),
        RankEngine(
            mailbox,
            1,
            live={t.name: live(np.zeros((256, 600), np.uint8)) for t in SPECS},
            places=dict(zip((t.name for t in SPECS), other, strict=True)),
        ),
    ]
    bindings = on_ranks([lambda e=e: bind(e, schema, shadow_limit_nbytes=0) for e in engines])  # type: ignore[misc]
    frames = [set(b.frames_of(manifest).tolist()) for b in bindings]  # type: ignore[attr-defined]
    for rank, wanted in enumerate(frames):
        expected = set()
        for f in range(len(manifest.frames)):
            record = manifest.frames.record(f)
            for i, tile in zip(record.tensor_ids.tolist(), record.tiles.tolist(), strict=True):
                mine = Box((256 * rank, 0), (256, 600))
                if schema.grids[i].box(tile).intersect(mine) is not None:
                    expected.add(f)
        assert wanted == expected
    assert frames[0] | frames[1] == set(range(len(manifest.frames)))
    assert frames[0] != frames[1]


def test_ranges_join_neighbours_and_never_pass_their_limit() -> None:
    publisher, _, _, _ = run(MemorySink())
    manifest = publisher.newest
    assert manifest is not None
    everything = np.arange(len(manifest.frames))
    spans = plan_ranges(manifest, everything)
    assert sorted(f for s in spans for f in s.frames) == everything.tolist()
    assert sum(s.nbytes for s in spans) == manifest.payload_total_nbytes
    assert len(spans) == 1
    assert all(s.nbytes <= RANGE_NBYTES for s in spans)
    alone = plan_ranges(manifest, everything[:1])
    assert (alone[0].nbytes, alone[0].offset) == (manifest.frames.record(0).nbytes, 0)


def test_fetch_in_flight_is_bounded() -> None:
    """Ranges beyond the limit are not read while the caller has not taken results."""
    from concurrent.futures import ThreadPoolExecutor

    sink = LossySink(0)
    publisher = Publisher(sink, make_schema("run", SPECS), frame_changed=100)
    words = random_words(SPECS)
    publisher.checkpoint(words)
    publisher.delta(changed(words, 0.05))
    manifest = publisher.newest
    assert manifest is not None
    reader = PublicationReader(sink, "run")
    schema = reader.schema(manifest.schema_digest)
    import megasync.receiver.fetch as module

    old = module.RANGE_NBYTES
    module.RANGE_NBYTES = 1
    try:
        with ThreadPoolExecutor(2) as pool:
            counts = Fetched()
            results = fetch(
                reader, schema, manifest, np.arange(len(manifest.frames)), len, pool, in_flight=3, fetched=counts
            )
            next(results)
            results.close()
        assert len(sink.reads) <= 5 < len(manifest.frames)
    finally:
        module.RANGE_NBYTES = old


def test_publication_that_does_not_fit_is_refused_before_it_is_read_to_the_end() -> None:
    publisher, _, _, _ = run(MemorySink())
    engine = plain_engine(random_words(SPECS))
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1, staged_limit_nbytes=10_000))
    applier.join()
    with pytest.raises(MemoryPlanError, match=r"version 1 .* staged_limit_nbytes 10000"):
        applier.update()
    assert (applier.version, engine.events) == (0, [])


def test_payload_that_is_gone() -> None:
    publisher, applier, _, _ = run(MemorySink())
    assert publisher.newest is not None
    key = publisher.newest.payload_key(0)
    payload = publisher.sink.read(key)
    publisher.sink.delete(key)
    with pytest.raises(RetryError, match="though its manifest is: the publication is incomplete, nothing was touched"):
        applier.update()
    publisher.sink.create(key, [payload])
    assert applier.update().version == 1


def test_ranges_of_a_payload_are_about_equally_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as the limit allows, and none of them a small rest that keeps one thread waiting for another."""
    publisher, _, _, _ = run(MemorySink())
    manifest = publisher.newest
    assert manifest is not None
    changed = manifest.frames.columns["num_changed"].astype(np.int64)
    limit = int(changed.sum()) * 10 // 29  # 2.9 of them: by filling one after the other the last would be 0.9 of one
    monkeypatch.setattr("megasync.receiver.fetch.RANGE_CHANGED", limit)
    sizes = [int(changed[list(s.frames)].sum()) for s in plan_ranges(manifest, np.arange(len(changed)))]
    assert sum(sizes) == changed.sum()
    assert len(sizes) == 3
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 3 * changed.max()
