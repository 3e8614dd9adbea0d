"""What a reader refuses by ``FORMAT.md`` beyond types and lengths: rules between documents, limits, and look-alikes."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasync import frames
from megasync import manifest as manifests
from megasync.codecs.planes import compress, unpack
from megasync.codecs.zstd_walk import check_zstd_frames
from megasync.digest import content_digest
from megasync.documents import decode_map
from megasync.errors import FormatError, MegasyncError, MissingPackageError, NeedsAnchorError
from megasync.frames import FrameColumns, FrameRecord, make_table
from megasync.manifest import Head, Manifest, decode_head, decode_manifest, manifest_key, root_of, rows_of
from megasync.schema import MAX_TENSORS, MAX_TILES, Schema, decode_schema, make_schema, schema_key
from megasync.sinks.faulty import FaultySink
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from megasync.versions import publication
from megasync.versions.head import claim, write_manifest, write_schema, write_state_table
from megasync.versions.publication import PublicationReader

SCHEMA = make_schema("r", [TensorSpec("w", "BF16", (512, 4096), layer=0), TensorSpec("x", "U8", (70,), layer=0)])


def record(name: str = "w", offset: int = 0, **changes: object) -> FrameRecord:
    i = SCHEMA.ids[name]
    w = SCHEMA.tensors[i].word_nbytes
    planes = (4, *[1] * (2 + 2 * w))
    r = FrameRecord(0, offset, 1, w, 0, 5, planes, b"d" * 16, np.array([i], np.uint32), np.array([0], np.uint32))
    return dataclasses.replace(r, **changes)  # type: ignore[arg-type]


def manifest(records: list[FrameRecord], schema: Schema = SCHEMA, **changes: object) -> Manifest:
    table = make_table(records)
    ids = np.unique(table.runs["tensor_id"]).astype("<u4")
    zero = np.zeros((len(ids), 16), np.uint8)
    num = sum(r.num_changed for r in records)
    sizes = (1000,) if records else ()
    m = Manifest("delta", "r", 1, 7, 6, b"b" * 16, schema.digest, sizes, table, ids, zero, zero, bytes(16), num)
    return dataclasses.replace(m, **changes)  # type: ignore[arg-type]


def anchor(states: np.ndarray, **changes: object) -> Manifest:
    frame = record("x", codec=8, plane_nbytes=(70,))
    root = root_of(states)
    fields: dict[str, Any] = {
        "what": "anchor",
        "base_version": -1,
        "base_digest": b"",
        "root": root,
        "state_table": root,
    }
    return manifest([frame], **(fields | {"new_states": states[[SCHEMA.ids["x"]]]} | changes))


def sink_of(*found: Manifest, schemas: tuple[Schema, ...] = (SCHEMA,)) -> MemorySink:
    sink = MemorySink()
    for s in schemas:
        write_schema(sink, s)
    for m in found:
        write_manifest(sink, m)
    return sink


# ---- rules of one manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_digest": b"b"}, "named by 1 bytes"),
        ({"base_digest": b"b" * 15}, "named by 15 bytes"),
        ({"base_digest": b"b" * 33}, "named by 33 bytes"),
        ({"records": [], "payload_nbytes": (0,)}, "without frames lists 1 payloads"),
        ({"records": [], "payload_nbytes": (10, 10)}, "without frames lists 2 payloads"),
        ({"what": "checkpoint", "records": [], "base_version": -1, "base_digest": b""}, "must name a table"),
        ({"payload_nbytes": (1000,) * 65_537}, "length <= 65536"),
        ({"info": {"x": True}}, r"at `\$\.info\[...\]`"),
        ({"info": {"x": None}}, r"at `\$\.info\[...\]`"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    decode_manifest(manifest([record()]).encoded, SCHEMA)
    with pytest.raises(FormatError, match=message):
        decode_manifest(manifest(**({"records": [record()]} | change)).encoded, SCHEMA)


def test_as_many_payloads_as_the_format_has_are_taken() -> None:
    assert (
        len(decode_manifest(manifest([record()], payload_nbytes=(1000,) * 65_536).encoded, SCHEMA).payload_nbytes)
        == 65_536
    )


def test_an_anchor_with_touched_old_digests_is_refused() -> None:
    states = np.arange(32, dtype=np.uint8).reshape(2, 16)
    assert decode_manifest(anchor(states).encoded, SCHEMA).what == "anchor"
    with pytest.raises(FormatError, match="anchor has touched-old digests"):
        decode_manifest(anchor(states, touched_olds=rows_of([bytes(15) + b"\1"])).encoded, SCHEMA)


def test_the_new_states_of_an_anchor_are_rows_of_its_table() -> None:
    states = np.arange(32, dtype=np.uint8).reshape(2, 16)
    good = anchor(states)
    bad = anchor(states, new_states=rows_of([bytes(16)]), version=8)
    sink = sink_of(good, bad)
    write_state_table(sink, "r", root_of(states), states.tobytes())
    reader = PublicationReader(sink, "r")
    assert np.array_equal(reader.state_table(reader.manifest(7, 1, good.digest)), states)
    with pytest.raises(FormatError, match="not the rows of its table"):
        reader.state_table(reader.manifest(8, 1, bad.digest))


@pytest.mark.parametrize(
    ("offsets", "payloads", "overlap"),
    [
        ((0, 10), (0, 0), False),
        ((10, 0), (0, 0), False),
        ((0, 9), (0, 0), True),
        ((9, 0), (0, 0), True),
        ((5, 5), (0, 0), True),
        ((5, 5), (0, 1), False),
    ],
)
def test_frames_of_a_payload_do_not_overlap(offsets: tuple[int, ...], payloads: tuple[int, ...], overlap: bool) -> None:
    frames_ = [record(offset=a, payload=p) for a, p in zip(offsets, payloads, strict=True)]  # 10 bytes each
    m = manifest(frames_, payload_nbytes=(20, 20))
    if overlap:
        with pytest.raises(FormatError, match="frames 0 and 1 overlap in payload 0"):
            decode_manifest(m.encoded, SCHEMA)
    else:
        assert len(decode_manifest(m.encoded, SCHEMA).frames) == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 6)), max_size=8))
def test_overlaps_are_found_wherever_they_are(places: list[tuple[int, int, int]]) -> None:
    columns = [np.array([p[k] for p in places], np.int64) for k in range(3)]
    bytes_of = [(p, b) for p, at, n in places for b in range(at, at + n)]
    if len(bytes_of) == len(set(bytes_of)):
        frames._check_places(*columns)
    else:
        with pytest.raises(FormatError, match="overlap"):
            frames._check_places(*columns)


def test_a_codec_that_nobody_knows_is_refused_with_the_manifest() -> None:
    m = manifest([record(), record("x", 20, codec=9)])
    assert len(decode_manifest(m.encoded, SCHEMA).frames) == 2
    with pytest.raises(FormatError, match=r"manifest of version 7 .* codec id 9 is unknown"):
        PublicationReader(sink_of(m), "r").manifest(7, 1, m.digest)


def test_without_a_key_signatures_are_ignored_but_for_their_length() -> None:
    signed = manifest([record()], key=b"secret")
    found = decode_manifest(signed.encoded, SCHEMA)
    assert (found.digest, found.digest_algorithm) == (signed.digest, 1)
    wrapper = msgspec.msgpack.decode(signed.encoded)
    for nbytes in (1, 31, 33):
        data = msgspec.msgpack.encode(wrapper | {"signature": bytes(nbytes)})
        with pytest.raises(FormatError, match=f"signature of {nbytes} bytes"):
            decode_manifest(data, SCHEMA)
    assert decode_manifest(msgspec.msgpack.encode(wrapper | {"signature": bytes(32)}), SCHEMA).version == 7


# ---- digests of manifests


def named(algorithm: int) -> Manifest:
    return manifest([], digest_algorithm=algorithm)


def test_a_manifest_must_name_the_algorithm_of_its_digest() -> None:
    for named_as, found in ((2, 3), (3, 1), (2, 1)):
        m = named(named_as)
        digest = content_digest(m.encoded, found)
        with pytest.raises(FormatError, match=f"by algorithm {found} and names algorithm {named_as}"):
            decode_manifest(m.encoded, SCHEMA, digest=digest)
        with pytest.raises(FormatError, match=f"by algorithm {found} and names algorithm {named_as}"):
            PublicationReader(sink_of(m), "r").manifest(7, 1, digest)


def test_a_digest_by_blake3_asks_for_its_package_only_where_the_manifest_does() -> None:
    m = named(2)
    if importlib.util.find_spec("blake3") is not None:
        assert decode_manifest(m.encoded, SCHEMA, digest=content_digest(m.encoded, 2)).version == 7
        return
    with pytest.raises(MissingPackageError, match="pip install blake3"):
        decode_manifest(m.encoded, SCHEMA, digest=bytes(32))
    with pytest.raises(MegasyncError, match="fetch it again"):
        decode_manifest(named(3).encoded, SCHEMA, digest=bytes(32))
    assert manifests.algorithm_of(b"garbage", bytes(32)) == 0


# ---- chains


def pair(base_schema: Schema = SCHEMA, **changes: object) -> tuple[Manifest, Manifest]:
    """A base under epoch 3, and a delta that starts from it."""
    base = manifest([], base_schema, version=6, base_version=5, epoch=3)
    return base, manifest([], **({"base_digest": base.digest} | changes))  # type: ignore[arg-type]


def test_a_delta_keeps_the_schema_of_its_base() -> None:
    other = make_schema("r", [TensorSpec("y", "U8", (4,))])
    base, delta = pair(other)
    reader = PublicationReader(sink_of(base, delta, schemas=(SCHEMA, other)), "r")
    for _ in range(2):  # found, then remembered
        with pytest.raises(FormatError, match="a delta keeps its base's schema"):
            reader.chain(reader.manifest(7, 1, delta.digest), 5)


def test_a_base_is_found_among_garbage() -> None:
    base, delta = pair()
    for garbage in (b"", b"garbage", base.encoded[:-1], base.encoded, named(2).encoded):
        sink = sink_of(base, delta)
        for name in ("e000001", "e000009", "e9", "x000004", "e000003/more"):  # before and after epoch 3, and no epochs
            sink.create(f"r/v{6:012d}/{name}/manifest", [garbage])
        reader = PublicationReader(sink, "r")
        assert reader.base_of(reader.manifest(7, 1, delta.digest)).encoded == base.encoded


def test_a_base_that_lies_under_another_epoch_alone_is_gone() -> None:
    base, delta = pair()
    sink = sink_of(delta)
    sink.create(manifest_key("r", 6, 4), [base.encoded])
    with pytest.raises(NeedsAnchorError, match="no longer in"):
        PublicationReader(sink, "r").base_of(delta)


def test_a_base_that_is_damaged_is_said_to_lie_there() -> None:
    base, delta = pair()
    sink = sink_of(delta)
    key = manifest_key("r", 6, base.epoch)
    sink.create(key, [base.encoded[:-1] + bytes([base.encoded[-1] ^ 1])])
    with pytest.raises(NeedsAnchorError, match=f"what lies at {key} has another digest"):
        PublicationReader(sink, "r").base_of(delta)


def test_a_manifest_that_is_remembered_is_not_taken_for_another_version() -> None:
    base, delta = pair()
    wrong = dataclasses.replace(delta, base_version=4)
    sink = sink_of(base, delta, dataclasses.replace(wrong, version=8))
    reader = PublicationReader(sink, "r")
    reader.manifest(6, 3, base.digest)
    with pytest.raises(NeedsAnchorError):
        reader.base_of(wrong)
    for version, epoch in ((6, 2), (5, 3)):
        with pytest.raises(NeedsAnchorError):
            reader.manifest(version, epoch, base.digest)


# ---- maps


def entries_of(data: bytes) -> list[bytes]:
    """Key and value of each entry of a map, as msgpack."""
    found = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    return [msgspec.msgpack.encode(key) + bytes(value) for key, value in found.items()]


def map_of(entries: list[bytes], wide: int = 0) -> bytes:
    """A map of these entries, its header in the shortest form or as a map16 or map32."""
    num = len(entries)
    short = bytes([0x80 | num]) if num < 16 else b"\xde" + struct.pack(">H", num)
    return {0: short, 16: b"\xde" + struct.pack(">H", num), 32: b"\xdf" + struct.pack(">I", num)}[wide] + b"".join(
        entries
    )


def rebuilt(edit: Callable[[bytes], bytes], where: str) -> bytes:
    """A manifest in which one of its maps went through ``edit``."""
    wrapper = msgspec.msgpack.decode(manifest([record()]).encoded)
    body = msgspec.msgpack.decode(wrapper["body"], type=dict[str, msgspec.Raw])
    if where == "frames":
        body["frames"] = msgspec.Raw(edit(bytes(body["frames"])))
    packed = msgspec.msgpack.encode(body)
    data = msgspec.msgpack.encode({"body": edit(packed) if where == "body" else packed, "signature": b""})
    return edit(data) if where == "wrapper" else data


READ: dict[str, Callable[[Callable[[bytes], bytes]], object]] = {
    "schema": lambda edit: decode_schema(edit(SCHEMA.encoded)),
    "head": lambda edit: decode_head(edit(Head("r", 5, 2, b"d" * 16, 3, b"12345678").encode()), "r"),
    "wrapper": lambda edit: decode_manifest(rebuilt(edit, "wrapper"), SCHEMA),
    "body": lambda edit: decode_manifest(rebuilt(edit, "body"), SCHEMA),
    "frames": lambda edit: decode_manifest(rebuilt(edit, "frames"), SCHEMA),
}


@pytest.mark.parametrize("where", READ)
def test_a_key_that_is_there_twice_is_refused(where: str) -> None:
    for wide in (0, 16, 32):
        READ[where](lambda data, wide=wide: map_of(entries_of(data), wide))  # type: ignore[misc]
        for pick in (0, -1):
            with pytest.raises(FormatError, match="one is there twice"):
                READ[where](lambda data, wide=wide, pick=pick: map_of([*(e := entries_of(data)), e[pick]], wide))  # type: ignore[misc]


# ---- limits


def test_a_schema_of_too_many_tiles_is_refused_before_anything_is_allocated() -> None:
    for shape in ((1 << 48,), (1 << 24, 1 << 24), (MAX_TILES + 1, 1, 1 << 16)):
        hostile = Schema("r", (TensorSpec("w", "U8", shape),)).encoded
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match=r"tiles in all, at most 67108864"):
                decode_schema(hostile)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        with pytest.raises(ValueError, match="tiles in all"):
            make_schema("r", [TensorSpec("w", "U8", shape)])
    assert (
        decode_schema(Schema("r", (TensorSpec("w", "U8", (MAX_TILES, 1, 1 << 16)),)).encoded).grids[0].num_tiles
        == MAX_TILES
    )


@pytest.mark.parametrize(("at", "value"), [(2, [1 << 48] * 1_000_000), (5, [1 << 20] * 1_000_000), (2, [1] * 9)])
def test_a_schema_of_too_many_axes_is_refused_before_their_product_is_made(at: int, value: list[int]) -> None:
    document = msgspec.msgpack.decode(SCHEMA.encoded)
    document["tensors"][0][at] = value
    data = msgspec.msgpack.encode(document)
    started = time.perf_counter()
    with pytest.raises(FormatError, match="length <= 8"):
        decode_schema(data)
    assert time.perf_counter() - started < 1


def test_a_schema_of_too_many_tensors_is_refused_before_they_are_read() -> None:
    empty = Schema("r", ()).encoded
    assert empty[-1] == 0x90
    with pytest.raises(FormatError, match=f"length <= {MAX_TENSORS}"):
        decode_schema(empty[:-1] + b"\xdd" + struct.pack(">I", MAX_TENSORS + 1))


def test_a_schema_of_a_run_that_cannot_be_part_of_a_key_is_refused() -> None:
    for run in ("a/b", ".a", "é", "x" * 101, "a\n"):
        with pytest.raises(FormatError, match="cannot be part of a key"):
            decode_schema(Schema(run, SCHEMA.tensors).encoded)
        with pytest.raises(ValueError, match="cannot be part of a key"):
            make_schema(run, SCHEMA.tensors)


def test_documents_that_are_too_large_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    m = manifest([record()])
    columns = msgspec.msgpack.encode(m.frames.to_columns())
    assert decode_map(columns, FrameColumns, "frame table", len(columns)) == m.frames.to_columns()
    with pytest.raises(FormatError, match=f"{len(columns)} bytes, at most {len(columns) - 1}"):
        decode_map(columns, FrameColumns, "frame table", len(columns) - 1)
    sink, again = FaultySink(sink_of(m)), dataclasses.replace(m)
    monkeypatch.setattr(manifests, "MAX_MANIFEST_NBYTES", len(m.encoded) - 1)
    with pytest.raises(FormatError, match=f"{len(m.encoded)} bytes, at most"):
        decode_manifest(m.encoded, SCHEMA)
    with pytest.raises(FormatError, match="publish fewer, longer frames"):
        _ = again.encoded
    monkeypatch.setattr(publication, "MAX_SCHEMA_NBYTES", len(SCHEMA.encoded) - 1)
    with pytest.raises(FormatError, match=f"schema .* has {len(SCHEMA.encoded)} bytes"):
        PublicationReader(sink, "r").schema(SCHEMA.digest)
    assert sink.calls == [("size", schema_key("r", SCHEMA.digest))]


def test_tables_that_list_or_span_too_many_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = np.array([0, 1, 7], np.uint32)
    ids = np.full(3, SCHEMA.ids["w"], np.uint32)
    m = manifest([record(tensor_ids=ids, tiles=tiles), record("x", 20)])
    for name, most in (("MAX_LISTED_TILES", 4), ("MAX_SPANNED_TILES", 9)):
        with monkeypatch.context() as patch:
            patch.setattr(frames, name, most)
            decode_manifest(m.encoded, SCHEMA)
            patch.setattr(frames, name, most - 1)
            with pytest.raises(FormatError, match=f"more than {most - 1} tiles"):
                decode_manifest(m.encoded, SCHEMA)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=4), st.sampled_from(["U8", "F64"]), st.sampled_from(["row", "last"]))
def test_words_of_tiles_are_those_of_the_grid(shape: list[int], dtype: str, cut: Any) -> None:
    assume(math.prod(shape) < 1 << 41)  # beyond it the tiles may be more than a schema allows
    s = make_schema("r", [TensorSpec("a", dtype, tuple(shape), cut=cut), TensorSpec("b", "U8", (9,))])
    grid = s.grids[s.ids["a"]]
    tiles = np.arange(min(grid.num_tiles, 5_000))
    assert np.array_equal(s.tile_words(np.full(len(tiles), s.ids["a"]), tiles), grid.tile_words(tiles))
    assert s.num_tile_words(s.ids["b"], 0) == 9


# ---- Zstd

RAW = bytes(range(200)) * 5
GOOD = compress(RAW)


def with_window(descriptor: int, raw: bytes = RAW) -> bytes:
    """A Zstd frame of one run-length block with this window descriptor and a content size of four bytes."""
    block = (len(raw) << 3 | 3).to_bytes(3, "little") + raw[:1]
    return b"\x28\xb5\x2f\xfd" + bytes([0x80, descriptor]) + struct.pack("<I", len(raw)) + block


def test_zstd_windows_up_to_128_mib_are_taken() -> None:
    same = b"\5" * 1000
    for descriptor in (0, 0x48, 0x88):
        stored = with_window(descriptor, same)
        assert bytes(unpack(memoryview(stored), 1000, "plane")) == same
        check_zstd_frames(np.frombuffer(stored, np.uint8), *(np.array([n]) for n in (0, len(stored), 1000)))


@pytest.mark.parametrize(
    "stored",
    [
        b"\x50\x2a\x4d\x18\4\0\0\0skip",
        b"\x50\x2a\x4d\x18\4\0\0\0skip" + GOOD,
        GOOD + b"\x50\x2a\x4d\x18\4\0\0\0skip",
        GOOD + compress(b""),
        b"\x27\xb5\x2f\xfd" + GOOD[4:],
        GOOD[:5],
        b"",
        GOOD[:4] + bytes([GOOD[4] | 1]) + GOOD[5:6] + b"\0" + GOOD[6:],
        with_window(0x89),
        with_window(0xFF),
        zstandard.ZstdCompressor(write_content_size=False).compress(RAW),
        compress(RAW[:-1]),
        GOOD[:-1],
    ],
    ids=("skippable only", "skippable first", "skippable last", "two frames", "other magic", "header cut", "nothing")
    + ("dictionary", "window 144 MiB", "window 3.75 TiB", "no content size", "another content size", "cut"),
)
def test_what_is_not_one_plain_zstd_frame_is_refused(stored: bytes) -> None:
    assert len(stored) < len(RAW)
    with pytest.raises(FormatError):
        unpack(memoryview(stored), len(RAW), "plane")
    with pytest.raises(FormatError):
        check_zstd_frames(np.frombuffer(stored, np.uint8), *(np.array([n]) for n in (0, len(stored), len(RAW))))


def test_a_publisher_takes_no_token_that_readers_refuse() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        claim(MemorySink(), "r", publisher=b"short")
