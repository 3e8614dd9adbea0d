import dataclasses
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import FormatError, RefetchError, SchemaMismatchError
from megasync.frames import FrameRecord, make_table, read_table
from megasync.manifest import Head, Manifest, check_run, decode_head, decode_manifest, root_of, rows_of
from megasync.schema import Schema, decode_schema, make_schema, require_same
from megasync.sinks.memory import MemorySink
from megasync.types import TensorSpec
from megasync.versions.head import write_manifest


def schema() -> Schema:
    return make_schema(
        "r",
        [
            TensorSpec("model.embed", "BF16", (3000, 1024), aliases=("lm_head",)),
            TensorSpec("l.0.w", "BF16", (512, 4096), layer=0),
            TensorSpec("l.0.s", "F32", (8,), layer=0),
            TensorSpec("l.1.w", "BF16", (512, 4096), layer=1, cut="last"),
            TensorSpec("l.1.f", "BF16", (4,), layer=1, frozen=True),
            TensorSpec("empty", "U8", (0, 4)),
        ],
    )


def record(s: Schema, name: str, where: list[int], offset: int = 0, **changes: object) -> FrameRecord:
    i = s.ids[name]
    spec = s.tensors[i]
    planes = tuple([4] + [1] * (2 + 2 * spec.word_nbytes))
    r = FrameRecord(
        0,
        offset,
        1,
        spec.word_nbytes,
        spec.layer,
        5,
        planes,
        b"d" * 16,
        np.full(len(where), i, np.uint32),
        np.array(where, np.uint32),
    )
    return dataclasses.replace(r, **changes)  # type: ignore[arg-type]


def manifest(s: Schema, records: list[FrameRecord], **changes: object) -> Manifest:
    table = make_table(records)
    touched = np.unique(table.runs["tensor_id"]).astype("<u4")
    digests = rows_of([bytes([i]) * 16 for i in range(len(touched))])
    m = Manifest(
        "delta",
        "r",
        3,
        7,
        6,
        b"b" * 16,
        s.digest,
        (1000,) if records else (),
        table,
        touched,
        digests,
        digests,
        b"r" * 16,
        int(table.columns["num_changed"].sum()),
    )
    return dataclasses.replace(m, **changes)  # type: ignore[arg-type]


def test_schema_round_trip_and_digest() -> None:
    s = schema()
    again = decode_schema(s.encoded, digest=s.digest)
    assert again == s
    assert again.digest == s.digest
    assert s.ids["lm_head"] == s.ids["model.embed"]
    assert [(t.layer, t.word_nbytes) for t in s.tensors] == sorted((t.layer, t.word_nbytes) for t in s.tensors)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("l.0.w", "BF16", (4,)), "appears twice"),
        (TensorSpec("x", "BF17", (4,)), "dtype BF17"),
        (TensorSpec("x", "BF16", (4,), block=(1, 1)), "block"),
        (TensorSpec("lm_head", "BF16", (4,)), "appears twice"),
        (TensorSpec("x\0y", "BF16", (4,)), "NUL"),
        (TensorSpec("x" * 513, "BF16", (4,)), "has 513 characters, at most 512"),
        (TensorSpec("x", "BF16", (4,), aliases=("y" * 513,)), "has 513 characters, at most 512"),
        (TensorSpec("x\ud800", "BF16", (4,)), "surrogate"),
        (TensorSpec("x", "BF16", (4,), group="\ud800"), "surrogate"),
        (TensorSpec("x", "BF16", (1 << 62, 1 << 62, 0)), "x has shape"),
        (TensorSpec("x", "BF16", (1 << 64, 0)), "x has shape"),
        (TensorSpec("x", "BF16", (-1,)), "x has shape"),
        (TensorSpec("x", "BF16", (1,) * 9), "x has shape"),
        (TensorSpec("x", "BF16", (4,), block=(0,)), "x has block"),
        (TensorSpec("x", "BF16", (4,), layer=1 << 31), "x has layer"),
        (TensorSpec("x", "BF16", (4,), layer=-2), "x has layer"),
        (TensorSpec("x", "BF16", (np.int64(4),)), "no reader would take it"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_schema_is_refused_with_the_tensor(spec: TensorSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schema("r", [*schema().tensors, spec])


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=3) | st.sampled_from(["a" * 512, "a" * 513, "\ud800"]),
    st.lists(st.sampled_from([-1, 0, 1, 5, (1 << 48), (1 << 48) + 1, 1 << 62, 1 << 64]), max_size=9),
    st.sampled_from([-2, -1, 0, (1 << 31) - 1, 1 << 31]),
    st.lists(st.sampled_from([0, 1, 16, 1 << 20, (1 << 20) + 1]), max_size=3),
)
def test_what_is_made_is_what_a_reader_takes(name: str, shape: list[int], layer: int, block: list[int]) -> None:
    spec = TensorSpec(name, "U8", tuple(shape), layer=layer, block=tuple(block))
    try:
        made = make_schema("r", [spec])
    except ValueError:
        made = None
    if made is None:
        try:
            encoded = Schema("r", (spec,)).encoded
        except (ValueError, OverflowError):
            return
        with pytest.raises(FormatError):
            decode_schema(encoded)
    else:
        assert decode_schema(made.encoded, digest=made.digest) == made


@pytest.mark.parametrize("extra", [False, True])
def test_newer_documents_say_to_upgrade(extra: bool) -> None:
    """Whether or not a newer format has keys that this one does not know."""

    def newer(data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        return msgspec.msgpack.encode({**fields, "format": 2, **({"more": [1]} if extra else {})})

    s = schema()
    with pytest.raises(FormatError, match=r"schema document is of format 2, .* reads format 1.*upgrade megasync"):
        decode_schema(newer(s.encoded))
    signed = msgspec.msgpack.decode(manifest(s, []).encoded)
    signed["body"] = newer(signed["body"])
    with pytest.raises(FormatError, match=r"manifest is of format 2.*upgrade megasync"):
        decode_manifest(msgspec.msgpack.encode(signed), s)
    with pytest.raises(FormatError, match=r"head of run 'r' .* is of format 2.*upgrade megasync"):
        decode_head(newer(Head("r", 1, 1, b"d" * 16, 1, b"p" * 8).encode()), "r")


def test_a_manifest_that_no_reader_takes_is_not_written() -> None:
    s, sink = schema(), MemorySink()
    good = manifest(s, [record(s, "model.embed", [0])])
    for m in (
        manifest(s, [record(s, "model.embed", [0], codec=8)]),  # full bytes in a delta
        dataclasses.replace(good, base_version=good.version),
        dataclasses.replace(good, touched_ids=np.array([4], "<u4")),
        dataclasses.replace(good, root=b"short"),
    ):
        with pytest.raises(FormatError):
            write_manifest(sink, m)
    assert list(sink.keys("")) == []
    assert write_manifest(sink, good) == len(good.encoded)


def test_case_81_another_model_is_refused_by_schema_digest() -> None:
    s = schema()
    other = make_schema("r", [*s.tensors[:-1], TensorSpec("l.1.w", "BF16", (512, 2048), layer=1)])
    with pytest.raises(SchemaMismatchError, match=r"l\.1\.w"):
        require_same(s, other)
    with pytest.raises(SchemaMismatchError, match=s.digest.hex()):
        decode_schema(other.encoded, digest=s.digest)
    with pytest.raises(SchemaMismatchError, match="not this model"):
        decode_manifest(manifest(s, []).encoded, other)


def test_manifest_round_trip() -> None:
    s = schema()
    records = [record(s, "model.embed", [0, 3]), record(s, "l.1.w", [1], 20)]
    m = manifest(s, records, info={"density": 0.5, "step": 3})
    again = decode_manifest(m.encoded, s, digest=m.digest)
    assert again.digest == m.digest
    assert again.info == {"density": 0.5, "step": 3}
    for i, r in enumerate(records):
        found = again.frames.record(i)
        assert found.tiles.tolist() == r.tiles.tolist()
        assert found.tensor_ids.tolist() == r.tensor_ids.tolist()
        assert dataclasses.replace(found, tensor_ids=r.tensor_ids, tiles=r.tiles) == r


def test_a_frame_record_takes_at_most_128_bytes() -> None:
    s = schema()
    records = [record(s, "model.embed", list(range(i % 2, 8)), 20 * i) for i in range(1000)]
    table = make_table(records).to_columns()
    assert sum(len(getattr(table, f)) for f in table.__struct_fields__) / 1000 <= 128


def test_case_07_an_empty_delta_is_explicit_and_case_05_lost_metadata_is_an_error() -> None:
    s = schema()
    assert decode_manifest(manifest(s, []).encoded, s).num_changed == 0
    with pytest.raises(FormatError, match="metadata was lost"):
        decode_manifest(manifest(s, [], num_changed=5).encoded, s)
    full = manifest(s, [record(s, "l.0.w", [0])])
    with pytest.raises(FormatError, match="metadata was lost"):
        decode_manifest(
            dataclasses.replace(
                full, touched_ids=np.empty(0, "<u4"), new_states=rows_of([]), touched_olds=rows_of([])
            ).encoded,
            s,
        )


def frames_with(s: Schema, **changes: object) -> list[FrameRecord]:
    return [record(s, "model.embed", [0, 3], **changes)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"payload": 1}, "payload id"),
        ({"offset": 995}, "passes the end"),
        ({"offset": 2**63 + 5}, "past the end"),
        ({"word_nbytes": 4}, "word size"),
        ({"layer": 1}, "another layer"),
        ({"num_changed": 0}, "no changed words"),
        ({"tiles": np.array([0, 99], np.uint32)}, "passes its"),
        ({"tensor_ids": np.array([77, 77], np.uint32)}, "tensor id past"),
    ],
)
def test_a_frame_table_that_breaks_a_rule_is_refused(change: dict[str, object], message: str) -> None:
    s = schema()
    with pytest.raises(FormatError, match=message):
        decode_manifest(manifest(s, frames_with(s, **change)).encoded, s)


def test_frozen_tensors_are_never_touched() -> None:
    s = schema()
    with pytest.raises(FormatError, match="frozen"):
        decode_manifest(manifest(s, [record(s, "l.1.f", [0])]).encoded, s)


@settings(max_examples=300)
@given(st.integers(0, 1 << 30), st.integers(0, 7))
def test_flipped_or_cut_manifests_never_crash(at: int, bit: int) -> None:
    s = schema()
    m = manifest(s, [record(s, "model.embed", [0, 3]), record(s, "l.1.w", [1], 20)])
    data = bytearray(m.encoded)
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(RefetchError if _parses(bytes(data), s) else (FormatError, SchemaMismatchError, RefetchError)):
        decode_manifest(bytes(data), s, digest=m.digest)
    with pytest.raises(FormatError):
        decode_manifest(m.encoded[: at % len(m.encoded)], s)


def _parses(data: bytes, s: Schema) -> bool:
    try:
        decode_manifest(data, s)
    except (FormatError, SchemaMismatchError):
        return False
    return True


def test_signed_manifests() -> None:
    s = schema()
    m = manifest(s, frames_with(s), key=b"secret", digest_algorithm=3)
    m = dataclasses.replace(m, frames=make_table(frames_with(s, digest=b"d" * 32), 32))
    assert decode_manifest(m.encoded, s, key=b"secret").version == 7
    with pytest.raises(FormatError, match="signature"):
        decode_manifest(m.encoded, s, key=b"other")
    with pytest.raises(FormatError, match="signature"):
        decode_manifest(manifest(s, []).encoded, s, key=b"secret")


@pytest.mark.parametrize("what", ["anchor", "checkpoint"])
def test_anchors_have_no_base(what: str) -> None:
    s = schema()
    with pytest.raises(FormatError, match="no base"):
        decode_manifest(manifest(s, [], what=what).encoded, s)
    root = {"what": what, "base_version": -1, "base_digest": b"", "state_table": b"t" * 16}
    assert decode_manifest(manifest(s, [], version=0, **root).encoded, s).what == what
    if what == "checkpoint":
        with pytest.raises(FormatError, match="only version 0 may be a checkpoint"):
            decode_manifest(manifest(s, [], **root).encoded, s)


def test_unknown_fields_and_kinds_are_refused() -> None:
    s = schema()
    document = msgspec.msgpack.decode(s.encoded)
    for change in ({"kind": "x"}, {"format": 2}, {"more": 1}):
        with pytest.raises(FormatError):
            decode_schema(msgspec.msgpack.encode(document | change))


def test_case_06_an_unparsable_head_is_an_error_not_a_fallback() -> None:
    head = Head("r", 5, 2, b"d" * 16, 3, b"tokens of 8 or more")
    assert decode_head(head.encode(), "r") == head
    for data in (
        b"",
        head.encode()[:-3],
        b"garbage",
        dataclasses.replace(head, run="other").encode(),
        dataclasses.replace(head, digest=b"").encode(),
        dataclasses.replace(head, version=-1).encode(),
        dataclasses.replace(head, digest=b"d" * 15).encode(),
        dataclasses.replace(head, digest=b"d" * 33).encode(),
        dataclasses.replace(head, publisher=b"seven77").encode(),
        dataclasses.replace(head, publisher=b"x" * 65_536).encode(),
    ):
        with pytest.raises(FormatError, match="head of run 'r'"):
            decode_head(data, "r")


def test_case_22_run_names_cannot_leave_the_sink() -> None:
    for name in ("..", "a/b", "/a", ".hidden", "", "a b", "é", "a\n", "x" * 101):
        with pytest.raises(ValueError, match="run name"):
            check_run(name)
    assert check_run("glm-5.rl_3") == "glm-5.rl_3"


def test_root_covers_every_state() -> None:
    table = np.zeros((3, 16), np.uint8)
    changed = table.copy()
    changed[2, 15] = 1
    assert root_of(table) != root_of(changed)


def test_random_bytes_as_a_frame_table() -> None:
    s = schema()
    rng = random.Random(0)
    good = make_table([record(s, "model.embed", [0, 3])]).to_columns()
    for _ in range(300):
        name = rng.choice(good.__struct_fields__)
        junk = rng.randbytes(rng.choice([0, 1, 4, 8, 12, 16]))
        try:
            read_table(msgspec.structs.replace(good, **{name: junk}), s, [1000], 16)
        except FormatError:
            pass
