"""Golden files of format 1: today's reader decodes them, today's writer still writes them, and no flipped byte passes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasync.codecs.planes import unpack
from megasync.codecs.sparse import Segments
from megasync.digest import bytes_lanes, lanes_to_bytes, state_digest
from megasync.errors import FormatError, MegasyncError
from megasync.frames import FrameRecord
from megasync.manifest import Manifest, root_of
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.tools.examine import verify
from megasync.types import Entries, Lanes
from megasync.versions.changes import word_sums
from megasync.versions.publication import PublicationReader, decode_frame
from tests.golden import format1_inputs as inputs
from tests.golden.make_format1 import EXPECTED, LIBRARIES, RUNS, SINK, files_of, read_tar, tar_of, write_all

ROWS = {"golden-steps": inputs.STEPS_ROWS}
Words = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """The golden files by path."""
    return read_tar(SINK.read_bytes())


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What they must decode to."""
    return json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def written() -> MemorySink:
    """What today's writer makes of the same inputs."""
    sink = MemorySink()
    write_all(sink)
    return sink


def sink_of(files: dict[str, bytes]) -> MemorySink:
    sink = MemorySink()
    for path, data in files.items():
        if path.startswith(".heads/"):
            sink.swap_head(Path(path).stem, None, data)
        else:
            sink.create(path, [data])
    return sink


def key_of(run: str) -> bytes | None:
    return inputs.SIGN_KEY if "signed" in run else None


def start_words(run: str, schema: Schema, what: str) -> Words:
    """Words before any frame: the checkpoint's, or zero but for frozen tensors under an anchor."""
    words = inputs.first_words(ROWS.get(run, inputs.ANCHOR_ROWS))
    zero = {t.name for t in schema.tensors if what == "anchor" and not t.frozen}
    return {name: w * 0 if name in zero else w for name, w in words.items()}


def flat_of(schema: Schema, entries: Entries) -> Iterator[tuple[int, np.ndarray, slice]]:
    """Tensor id, canonical word indices and span of the entries of each touched tile."""
    stops = np.cumsum(entries.counts, dtype=np.int64)
    for tensor_id, tile, count, stop in zip(entries.tensor_ids, entries.tiles, entries.counts, stops, strict=True):
        span = slice(int(stop) - int(count), int(stop))
        yield int(tensor_id), schema.grids[int(tensor_id)].flat_index(tile, entries.positions[span]), span


def apply_(words: Words, schema: Schema, entries: Entries) -> None:
    for tensor_id, flat, span in flat_of(schema, entries):
        words[schema.tensors[tensor_id].name][flat] ^= entries.values[span]


def sums_of(schema: Schema, words: Words) -> list[Lanes]:
    return [bytes_lanes(words[t.name].view(np.uint8)) for t in schema.tensors]


def checked_after(reader: PublicationReader, manifest: Manifest, words: Words, entries: list[Entries]) -> Words:
    """The words after a publication; every digest in its manifest is compared by its definition."""
    schema = reader.schema(manifest.schema_digest)
    after = {name: w.copy() for name, w in words.items()}
    touched = {t.name: np.zeros_like(words[t.name]) for t in schema.tensors}
    for found in entries:
        apply_(after, schema, found)
        for tensor_id, flat, _ in flat_of(schema, found):
            name = schema.tensors[tensor_id].name
            touched[name][flat] = words[name][flat]
    states = [state_digest(t, lanes) for t, lanes in zip(schema.tensors, sums_of(schema, after), strict=True)]
    table = np.frombuffer(b"".join(states), np.uint8).reshape(-1, 16)
    assert root_of(table) == manifest.root
    assert np.array_equal(table[manifest.touched_ids], manifest.new_states)
    olds = b"".join(lanes_to_bytes(lanes) for lanes in sums_of(schema, touched))
    assert np.array_equal(np.frombuffer(olds, np.uint8).reshape(-1, 16)[manifest.touched_ids], manifest.touched_olds)
    if manifest.what != "delta":
        assert np.array_equal(reader.state_table(manifest), table)
    return after


def versions_of(sink: Sink, run: str, rows: list[dict[str, Any]]) -> Iterator[tuple[Manifest, PublicationReader]]:
    reader = PublicationReader(sink, run, key_of(run))
    for row in rows:
        yield reader.manifest(row["version"], row["epoch"], bytes.fromhex(row["manifest"])), reader


@pytest.mark.parametrize("run", RUNS)
def test_every_golden_publication_decodes_to_the_expected_bytes(
    run: str, files: dict[str, bytes], expected: dict[str, Any]
) -> None:
    rows = expected["runs"][run]
    words: Words = {}
    for (manifest, reader), row in zip(versions_of(sink_of(files), run, rows), rows, strict=True):
        schema = reader.schema(manifest.schema_digest)
        if manifest.what != "delta":
            words = start_words(run, schema, manifest.what)
        entries = [e for _, e in reader.entries(manifest)]
        words = checked_after(reader, manifest, words, entries)
        assert {name: sha256(w.tobytes()).hexdigest() for name, w in words.items()} == row["sha256"]


@pytest.mark.parametrize("run", RUNS)
def test_the_head_leads_back_to_the_expected_manifests(
    run: str, files: dict[str, bytes], expected: dict[str, Any]
) -> None:
    rows = expected["runs"][run]
    # Without the key too: a signature is part of the bytes that a digest names, whoever can check it.
    for key in (key_of(run), None):
        reader = PublicationReader(sink_of(files), run, key)
        newest = reader.newest()
        assert newest is not None
        chain = reader.chain(newest)
        assert [m.digest.hex() for m in chain] == [row["manifest"] for row in rows][-len(chain) :]
        assert [m.epoch for m in chain] == [row["epoch"] for row in rows][-len(chain) :]
        assert chain[0].what == ("anchor" if run in ("golden-anchor", "golden-signed") else "checkpoint")
        assert len(chain) == (2 if chain[0].what == "anchor" else len(rows))


def test_the_golden_files_are_a_directory_sink(tmp_path: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    sink = LocalSink(tmp_path)
    for run in RUNS:
        report = verify(sink, run, key=key_of(run))
        assert (report.faults, report.complete) == ([], True)
    lost = [key for key in verify(sink, "golden-steps").orphans if "/v000000000010/" in key]
    assert len(lost) == 3


def test_golden_files_hold_what_the_format_has(files: dict[str, bytes], expected: dict[str, Any]) -> None:
    codecs: set[int] = set()
    tiles: list[tuple[int, int]] = []
    dense = sparse = 0
    for manifest, reader in versions_of(sink_of(files), "golden-steps", expected["runs"]["golden-steps"]):
        codecs |= set(manifest.frames.columns["codec"].tolist())
        _, ids, numbers = manifest.frames.touched
        tiles += [t for t in set(zip(ids.tolist(), numbers.tolist(), strict=True)) if manifest.version == 9]
        if manifest.version == 9:
            assert len(tiles) < len(ids), "a tile is in frames of two owners"
            assert len(manifest.payload_nbytes) == 2
        for i in np.flatnonzero(manifest.frames.columns["codec"] == 1):
            planes = raw_sparse_planes(reader, manifest, manifest.frames.record(int(i)))
            sparse += len(planes[1]) > 0
            dense += len(planes[-1]) > 0
    assert codecs == {1, 2, 3, 4, 5, 6, 7}
    assert dense > 3
    assert sparse > 10
    assert sum(map(len, files.values())) < 150_000


def raw_sparse_planes(reader: PublicationReader, manifest: Manifest, record: FrameRecord) -> list[bytes]:
    """Planes of a sparse frame before Zstd, by the lengths that the format gives them."""
    schema = reader.schema(manifest.schema_digest)
    stored, w = reader.frame_bytes(manifest, record), record.word_nbytes
    segments = Segments.of(schema.tile_words(record.tensor_ids, record.tiles))
    ends = np.cumsum(record.plane_nbytes)
    planes = [stored[int(e) - n : int(e)] for e, n in zip(ends, record.plane_nbytes, strict=True)]
    columns = np.frombuffer(unpack(planes[0], 4 * len(segments.words), "counts"), np.uint8).reshape(4, -1)
    counts = (columns.astype(np.int64) << np.array([[0], [8], [16], [24]])).sum(axis=0)
    dense = counts * (2 + w) >= segments.words * w
    n, d = int(counts[~dense].sum()), int(segments.words[dense].sum())
    sizes = [4 * len(counts), n, n, *[n] * w, *[d] * w]
    return [bytes(unpack(p, size, "plane")) for p, size in zip(planes, sizes, strict=True)]


@pytest.mark.parametrize("run", RUNS)
def test_the_writer_still_gives_the_same_frames(
    run: str, files: dict[str, bytes], expected: dict[str, Any], written: MemorySink
) -> None:
    reader = PublicationReader(written, run, key_of(run))
    old_versions = versions_of(sink_of(files), run, expected["runs"][run])
    for old, golden in old_versions:
        new = reader.manifest(old.version, old.epoch, None)
        assert len(new.frames) == len(old.frames)
        assert np.array_equal(new.new_states, old.new_states)
        for i in range(len(old.frames)):
            a, b = old.frames.record(i), new.frames.record(i)
            assert (a.payload, a.word_nbytes, a.layer, a.num_changed) == (
                b.payload,
                b.word_nbytes,
                b.layer,
                b.num_changed,
            )
            assert np.array_equal(a.tensor_ids, b.tensor_ids)
            assert np.array_equal(a.tiles, b.tiles)
            if a.codec == b.codec == 1:
                assert raw_sparse_planes(golden, old, a) == raw_sparse_planes(reader, new, b)
            schema = golden.schema(old.schema_digest)
            x = decode_frame(schema, old, a, golden.frame_bytes(old, a))
            y = decode_frame(schema, new, b, reader.frame_bytes(new, b))
            assert np.array_equal(x.positions, y.positions)
            assert np.array_equal(x.values, y.values)


def test_the_writer_still_gives_the_same_bytes(
    files: dict[str, bytes], expected: dict[str, Any], written: MemorySink
) -> None:
    if expected["libraries"] != LIBRARIES:
        pytest.skip(f"written with {expected['libraries']}, here are {LIBRARIES}: outer bytes may differ")
    now = files_of(written)
    assert sorted(now) == sorted(files)
    assert [path for path in files if files[path] != now[path]] == []
    assert tar_of(now) == SINK.read_bytes()


def is_document(path: str) -> bool:
    return "payload" not in path


def content_of(files: dict[str, bytes], run: str, key: bytes | None) -> list[tuple[int, bytes, bytes]]:
    """Everything that a reader takes from a run: versions, roots, and digests of what each publication changes."""
    reader = PublicationReader(sink_of(files), run, key)
    newest = reader.newest()
    if newest is None:
        raise FormatError("nothing is published")
    out = []
    for m in reader.chain(newest):
        if m.what != "delta":
            reader.state_table(m)
        found = sha256()
        for record, e in reader.entries(m):
            for part in (record.tensor_ids, record.tiles, e.counts, e.positions, e.values):
                found.update(np.ascontiguousarray(part).tobytes())
        out.append((m.version, m.root, found.digest()))
    return out


@pytest.mark.parametrize(
    ("run", "key"), [("golden-anchor", None), ("golden-signed", inputs.SIGN_KEY), ("golden-signed-steps", None)]
)
def test_a_flipped_byte_is_refused_or_changes_nothing(run: str, key: bytes | None, files: dict[str, bytes]) -> None:
    mine = {
        path: data for path, data in files.items() if path.removeprefix(".heads/").split(".")[0].split("/")[0] == run
    }
    whole = content_of(mine, run, key)
    rng = random.Random(run)
    refused: dict[bool, int] = {True: 0, False: 0}
    for path, data in mine.items():
        for at in rng.sample(range(8 * len(data)), 40):
            flipped = bytearray(data)
            flipped[at >> 3] ^= 1 << (at & 7)
            try:
                assert content_of({**mine, path: bytes(flipped)}, run, key) == whole, (path, at)
            except MegasyncError:
                refused[is_document(path)] += 1
    assert min(refused.values()) > 20


def test_a_head_that_was_flipped_is_never_older_content(files: dict[str, bytes], expected: dict[str, Any]) -> None:
    path = ".heads/golden-steps.head"
    for at in range(8 * len(files[path])):
        flipped = bytearray(files[path])
        flipped[at >> 3] ^= 1 << (at & 7)
        try:
            newest = PublicationReader(sink_of({**files, path: bytes(flipped)}), "golden-steps").newest()
        except MegasyncError:
            continue
        assert newest is not None
        assert newest.digest.hex() == expected["runs"]["golden-steps"][-1]["manifest"]


def test_a_flipped_frame_with_a_right_digest_breaks_a_rule_or_the_state_digest(
    files: dict[str, bytes], expected: dict[str, Any]
) -> None:
    """What remains where the bytes on the way were changed by somebody who can make digests of frames."""
    rng = random.Random(1)
    refused = seen = 0
    words: Words = {}
    for manifest, reader in versions_of(sink_of(files), "golden-steps", expected["runs"]["golden-steps"]):
        schema = reader.schema(manifest.schema_digest)
        words = words or start_words("golden-steps", schema, manifest.what)
        right = list(reader.entries(manifest))
        for record, entries in right:
            truth = change_of(schema, words, entries)
            stored = bytes(reader.frame_bytes(manifest, record))
            for at in rng.sample(range(8 * len(stored)), 4):
                flipped = bytearray(stored)
                flipped[at >> 3] ^= 1 << (at & 7)
                try:
                    found = decode_frame(schema, manifest, record, memoryview(flipped))
                except FormatError:
                    refused += 1
                    continue
                same = all(np.array_equal(getattr(found, f), getattr(entries, f)) for f in ("positions", "values"))
                assert (change_of(schema, words, found) == truth) is same
                seen += not same
        for _, entries in right:
            apply_(words, schema, entries)
    assert refused > 50
    assert seen > 10


def change_of(schema: Schema, words: Words, entries: Entries) -> dict[int, Lanes]:
    """What entries do to the digest sums of their tensors."""
    old = np.concatenate([words[schema.tensors[i].name][flat] for i, flat, _ in flat_of(schema, entries)])
    new, before = word_sums(schema, entries, old ^ entries.values), word_sums(schema, entries, old)
    return {i: new[i] - before[i] for i in new}
