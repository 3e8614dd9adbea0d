"""``FORMAT.md`` against the code: tables, constants, examples; and the refusals that it asks of a reader."""

from __future__ import annotations

import dataclasses
import re
from ast import literal_eval

import msgspec
import numpy as np
import pytest

from megasync import frames, schema, tiles
from megasync import manifest as manifests
from megasync.codecs.registry import codecs
from megasync.digest import C, S, bytes_lanes, content_digest, state_digest
from megasync.errors import FormatError, RefetchError, SchemaMismatchError
from megasync.frames import FrameRecord, make_table
from megasync.manifest import Manifest, _Document, _Head, _Signed, decode_manifest, manifest_key, rows_of
from megasync.schema import Schema, decode_schema, make_schema, schema_key
from megasync.sinks.base import MAX_HEAD_NBYTES
from megasync.sinks.memory import MemorySink
from megasync.tiles import make_grid
from megasync.types import DTYPE_NBYTES, SEGMENT_WORDS, TensorSpec
from megasync.versions.publication import PublicationReader
from tests.golden.format1_example import DOCUMENT, example_objects, objects_in, with_example

TEXT = DOCUMENT.read_text()


def table(header: str) -> list[list[str]]:
    """Cells of the table whose header row begins so."""
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(header):
            break
    else:
        raise AssertionError(f"FORMAT.md has no table {header!r}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def section(title: str) -> str:
    """A section by its heading."""
    return TEXT.split(f"{title}\n")[1].split("\n#")[0]


def keys(title: str) -> list[str]:
    """First cells, in back-quotes, of the tables of a section."""
    return re.findall(r"^\| `(\w+)` \|", section(title), re.MULTILINE)


def test_the_example_is_what_the_code_gives() -> None:
    printed = objects_in(TEXT)
    assert printed == example_objects()
    assert len(printed) == 7
    assert with_example(TEXT) == TEXT, "run python -m tests.golden.make_format1"


def test_documents_have_the_fields_of_the_text() -> None:
    fields = [name for _, name, *_ in table("| # | name |")]
    assert [f.strip("`") for f in fields] == list(schema._Row.__struct_fields__)
    assert keys("### 3.1 Schema") == list(schema._Document.__struct_fields__)
    assert keys("### 3.2 Manifest") == [*_Signed.__struct_fields__, *_Document.__struct_fields__]
    assert keys("### 3.3 Head") == list(_Head.__struct_fields__)
    assert keys("## 7. Frame table") == list(frames.FrameColumns.__struct_fields__)


def test_columns_have_the_types_of_the_text() -> None:
    names = {"u1": "u8", "<u4": "u32", "<u8": "u64", "<i4": "i32"}
    rows = {row[0].strip("`"): row[1:3] for row in table("| key | type | rows |")}
    for columns, count in ((frames._FRAME_COLUMNS, "F"), (frames._RUN_COLUMNS, "R")):
        for name, dtype in columns.items():
            assert rows[name] == [names[dtype], count], name


def test_dtypes_and_codecs_are_those_of_the_text() -> None:
    found = {d: int(w) for w, dtypes in table("| word bytes |") for d in dtypes.split()}
    assert found == DTYPE_NBYTES
    rows = {int(row[0]): (row[1].strip("`"), row[2]) for row in table("| id | name | planes |")}
    assert {i: name for i, (name, _) in rows.items()} == {c.id: c.name for c in codecs().values()}


def test_tile_grids_are_those_of_the_text() -> None:
    rows = table("| shape | w | cut |")
    assert len(rows) == 14
    for shape, w, cut, block, cells, num, tile, start, extent in rows:
        grid = make_grid(tuple(literal_eval(shape.strip("`"))), int(w), cut, tuple(literal_eval(block.strip("`"))))  # type: ignore[arg-type]
        assert grid.num_tiles == int(num), shape
        if cells:
            assert [a.num for a in grid.axes] == literal_eval(cells.strip("`")), shape
            box = grid.box(int(tile))
            assert list(box.start) == literal_eval(start.strip("`")), shape
            assert list(box.extent) == literal_eval(extent.strip("`")), shape


def test_digests_are_those_of_the_text() -> None:
    for label, a, b in table("| | lane a |"):
        values = [int(x.strip("`"), 16) for x in (a, b)]
        assert values == (list(S) if label == "S" else [lane[int(label[2])] for lane in C]), label
    rows = table("| name | dtype | shape | canonical")
    assert len(rows) == 6
    for row in rows:
        name, dtype, shape, data, a, b, digest = (c.strip("`").replace("(none)", "") for c in row)
        spec = TensorSpec(name, dtype, tuple(map(int, filter(None, shape.split(",")))))
        assert spec.nbytes == len(bytes.fromhex(data)), name
        lanes = bytes_lanes(np.frombuffer(bytes.fromhex(data), np.uint8))
        assert (lanes.a, lanes.b) == (int(a, 16), int(b, 16)), name
        assert state_digest(spec, lanes).hex() == digest, name
    assert f"`{content_digest(b'').hex()}`" in TEXT
    assert f"`{content_digest(b'megasync').hex()}`" in TEXT


def test_limits_are_those_of_the_text() -> None:
    limits = dict(table("| what | limit |"))  # type: ignore[arg-type]
    for what, value in {
        "words of a tensor, and of each axis": schema.MAX_WORDS,
        "words of a block": schema.MAX_BLOCK_WORDS,
        "words of a tile": tiles.MAX_TILE_WORDS,
        "words of a segment": SEGMENT_WORDS,
        "bytes of words of a frame's tiles": frames.MAX_FRAME_NBYTES,
        "bytes of a schema": schema.MAX_SCHEMA_NBYTES,
        "tensors of a schema": schema.MAX_TENSORS,
        "tiles of all tensors of a schema": schema.MAX_TILES,
        "axes": schema.MAX_AXES,
        "bytes of a manifest": manifests.MAX_MANIFEST_NBYTES,
        "payloads of a publication": manifests.MAX_PAYLOADS,
        "frames of a publication": frames.MAX_FRAMES,
        "tiles listed by all frames, each as often as it is listed": frames.MAX_LISTED_TILES,
        "tiles spanned by all runs (bits of the bitmaps)": frames.MAX_SPANNED_TILES,
        "bytes of a head": MAX_HEAD_NBYTES,
    }.items():
        text = limits[what].replace(",", "")
        base, _, power = text.partition("^")
        assert int(base) ** int(power or 1) == value, what
    assert manifests.MAX_HEAD_NBYTES == MAX_HEAD_NBYTES


def small_schema() -> Schema:
    return make_schema(
        "r", [TensorSpec("w", "BF16", (8192, 4096), layer=0), TensorSpec("x", "U8", (40, 1 << 20), layer=0)]
    )


def record(s: Schema, name: str, num: int, planes: tuple[int, ...], codec: int = 1) -> FrameRecord:
    i = s.ids[name]
    w = s.tensors[i].word_nbytes
    ids = np.full(num, i, np.uint32)
    return FrameRecord(0, 0, codec, w, 0, 5, planes, b"d" * 16, ids, np.arange(num, dtype=np.uint32))


def manifest(s: Schema, records: list[FrameRecord], **changes: object) -> Manifest:
    frame_table = make_table(records)
    ids = np.unique(frame_table.runs["tensor_id"]).astype("<u4")
    digests = rows_of([bytes(16)] * len(ids))
    num = int(frame_table.columns["num_changed"].sum())
    m = Manifest(
        "delta",
        "r",
        1,
        7,
        6,
        b"b" * 16,
        s.digest,
        (1 << 40,) if records else (),
        frame_table,
        ids,
        digests,
        digests,
        bytes(16),
        num,
    )
    return dataclasses.replace(m, **changes)  # type: ignore[arg-type]


def test_a_frame_of_more_than_64_mib_is_refused_before_anything_is_allocated() -> None:
    s = small_schema()
    num = s.grids[s.ids["x"]].num_tiles
    assert num * (1 << 20) <= 64 << 20
    decode_manifest(manifest(s, [record(s, "x", num, (4, 9, 9, 9, 0))]).encoded, s)
    wide = make_schema("r", [TensorSpec("x", "U8", (65, 1 << 20), layer=0)])
    most = [record(wide, "x", 64, (4, 9, 9, 9, 0)), record(wide, "x", 65, (4, 9, 9, 9, 0))]
    decode_manifest(manifest(wide, most[:1]).encoded, wide)
    with pytest.raises(FormatError, match="more than 67108864 bytes of weights"):
        decode_manifest(manifest(wide, most[1:]).encoded, wide)


def test_a_frame_that_stores_more_than_its_mask_is_refused_before_it_is_read() -> None:
    s = small_schema()
    words = int(s.tile_words(np.array([s.ids["w"]]), np.array([0]))[0])
    most = 2 * words + 4 * -(-words // SEGMENT_WORDS)
    decode_manifest(manifest(s, [record(s, "w", 1, (most, 0, 0, 0, 0, 0, 0))]).encoded, s)
    with pytest.raises(FormatError, match="stores more than its whole mask"):
        decode_manifest(manifest(s, [record(s, "w", 1, (most, 1, 0, 0, 0, 0, 0))]).encoded, s)


def test_a_block_that_no_tile_could_hold_is_refused() -> None:
    s = make_schema("r", [TensorSpec("w", "U8", (1 << 20, 1 << 13), block=(1, 1 << 13))])
    document = msgspec.msgpack.decode(s.encoded)
    document["tensors"][0][5] = [1 << 20, 1 << 13]  # 2^33 words: a u32 would wrap
    with pytest.raises(FormatError, match="at most 1048576 words"):
        decode_schema(msgspec.msgpack.encode(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "anchor", "base_version": -1, "base_digest": b"", "state_table": b"t" * 16}, "full bytes in every"),
        ({"state_table": b"t" * 16}, "a delta has no table"),
        ({"schema_digest": b"d" * 300}, "names its schema by 300 bytes"),
    ],
)
def test_documents_whose_fields_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    s = small_schema()
    with pytest.raises(FormatError, match=message):
        decode_manifest(manifest(s, [record(s, "w", 1, (4,) * 7)], **change).encoded, s)


def test_full_bytes_in_a_delta_and_odd_table_names_are_refused() -> None:
    s = small_schema()
    with pytest.raises(FormatError, match="full bytes in every"):
        decode_manifest(manifest(s, [record(s, "w", 1, (4,), 8)]).encoded, s)
    root = {"what": "checkpoint", "version": 0, "base_version": -1, "base_digest": b""}
    with pytest.raises(FormatError, match="named by 200 bytes"):
        decode_manifest(manifest(s, [], state_table=b"t" * 200, **root).encoded, s)


def test_a_key_asks_for_digests_that_resist() -> None:
    s = small_schema()
    with pytest.raises(FormatError, match="xxh3-128"):
        decode_manifest(manifest(s, [], key=b"secret").encoded, s, key=b"secret")
    assert decode_manifest(manifest(s, [], key=b"secret", digest_algorithm=3).encoded, s, key=b"secret").version == 7


def test_a_manifest_is_named_by_the_bytes_that_were_stored() -> None:
    s = small_schema()
    signed = manifest(s, [], key=b"secret", digest_algorithm=3)
    assert decode_manifest(signed.encoded, s).digest == signed.digest
    # Another writer's order of keys: still the same document, under the digest of its own bytes.
    wrapper = msgspec.msgpack.decode(manifest(s, []).encoded)
    body = dict(reversed(msgspec.msgpack.decode(wrapper["body"]).items()))
    data = msgspec.msgpack.encode({"signature": b"", "body": msgspec.msgpack.encode(body)})
    assert decode_manifest(data, s).digest == content_digest(data)


def test_a_manifest_of_another_run_is_refused_under_this_ones_key() -> None:
    sink, s = MemorySink(), small_schema()
    other = make_schema("other", s.tensors)
    m = dataclasses.replace(manifest(other, []), run="other")
    sink.create(schema_key("r", other.digest), [other.encoded])
    sink.create(manifest_key("r", 7, 1), [m.encoded])
    with pytest.raises((FormatError, SchemaMismatchError), match="misplaced"):
        PublicationReader(sink, "r").manifest(7, 1, m.digest)


def test_a_manifest_is_asked_for_by_any_algorithm() -> None:
    sink, s = MemorySink(), small_schema()
    m = manifest(s, [], digest_algorithm=3)
    sink.create(schema_key("r", s.digest), [s.encoded])
    sink.create(manifest_key("r", 7, 1), [m.encoded])
    assert PublicationReader(sink, "r").manifest(7, 1, m.digest).digest == m.digest
    for wrong in (content_digest(m.encoded)[::-1], m.digest[:-1], bytes(32), b""):
        with pytest.raises(RefetchError, match="fetch it again"):
            PublicationReader(sink, "r").manifest(7, 1, wrong)
    with pytest.raises(FormatError, match="by algorithm 1 and names algorithm 3"):
        PublicationReader(sink, "r").manifest(7, 1, content_digest(m.encoded))
