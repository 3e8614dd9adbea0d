"""The reader that was made from ``FORMAT.md`` alone: against the golden runs, the examples of the text, and damage."""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cramjam
import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from tests.golden import format1_inputs as inputs
from tests.golden import tiny_reader
from tests.golden.tiny_reader import Refused, Tensor, read_run

GOLDEN = Path(tiny_reader.__file__).parent
TEXT = (GOLDEN.parents[1] / "megasync" / "FORMAT.md").read_text("utf-8")
EXPECTED = json.loads((GOLDEN / "format1_expected.json").read_text("utf-8"))
RUNS: dict[str, list[dict[str, Any]]] = EXPECTED["runs"]
KEY = bytes.fromhex(EXPECTED["key"])
BASES = {run: inputs.first_words(inputs.STEPS_ROWS if run == "golden-steps" else inputs.ANCHOR_ROWS) for run in RUNS}
DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def sink(tmp_path: Path) -> Path:
    """A copy of the golden sink."""
    with tarfile.open(GOLDEN / "format1_sink.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture(scope="module")
def shared_sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy for tests that put back what they change."""
    path = tmp_path_factory.mktemp("sink")
    with tarfile.open(GOLDEN / "format1_sink.tar") as tar:
        tar.extractall(path, filter="data")
    return path


@contextmanager
def kept(*paths: Path) -> Iterator[None]:
    """Put files back afterwards."""
    before = [path.read_bytes() for path in paths]
    try:
        yield
    finally:
        for path, data in zip(paths, before, strict=True):
            path.write_bytes(data)


def key_of(run: str) -> bytes | None:
    return KEY if "signed" in run else None


def read(sink: Path, run: str) -> dict[int, dict[str, bytes]]:
    return read_run(sink, run, key_of(run), BASES[run])


def hashes(version: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in version.items()}


def folder_of(sink: Path, run: str, version: int) -> Path:
    epoch = next(v["epoch"] for v in RUNS[run] if v["version"] == version)
    return sink / run / f"v{version:012d}" / f"e{epoch:06d}"


def point(sink: Path, run: str, version: int, /, **other: object) -> None:
    """Let the head be what it was when this version was published."""
    row = next(v for v in RUNS[run] if v["version"] == version)
    head = {"kind": "megasync.head", "format": 1, "run": run, "version": version, "epoch": row["epoch"]}
    head |= {"digest": bytes.fromhex(row["manifest"]), "fence": row["epoch"], "publisher": b"somebody", **other}
    (sink / ".heads" / f"{run}.head").write_bytes(msgspec.msgpack.encode(head))


def body_of(sink: Path, run: str, version: int) -> dict[str, Any]:
    wrapper = msgspec.msgpack.decode((folder_of(sink, run, version) / "manifest").read_bytes())
    body: dict[str, Any] = msgspec.msgpack.decode(wrapper["body"])
    return body


def forge(sink: Path, run: str, version: int, edit: Edit, key: bytes | None = None) -> None:
    """Change the manifest of a version, sign it again, and point the head at it."""
    body = body_of(sink, run, version)
    edit(body)
    raw = msgspec.msgpack.encode(body)
    wrapper = {"body": raw, "signature": hmac.digest(key, raw, "sha256") if key else b""}
    data = msgspec.msgpack.encode(wrapper)
    (folder_of(sink, run, version) / "manifest").write_bytes(data)
    digest = hashlib.sha256(data).digest() if body.get("digest_algorithm") == 3 else xxhash.xxh3_128_digest(data)
    point(sink, run, version, digest=digest)


def spans(body: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Payload, first byte and end of each frame."""
    col = {k: np.frombuffer(v, tiny_reader.COLUMNS[k]).tolist() for k, v in body["frames"].items()}
    ends = np.cumsum([0, *col["num_planes"]]).tolist()
    lengths = [sum(col["plane_nbytes"][a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    return [(p, at, at + n) for p, at, n in zip(col["payload"], col["offset"], lengths, strict=True)]


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def table_of(header: str) -> list[list[str]]:
    """Rows of the Markdown table with this header line in ``FORMAT.md``."""
    lines = TEXT.split(header, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_stands_alone() -> None:
    tree = ast.parse((GOLDEN / "tiny_reader.py").read_text("utf-8"))
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {"__future__", "hashlib", "hmac", "re", "collections.abc", "itertools", "math", "pathlib", "typing"}
    assert found <= ours | {"numpy", "msgspec", "xxhash", "zstandard", "cramjam", "blake3"}
    assert not any(isinstance(n, ast.Name) and n.id in ("__import__", "exec", "eval") for n in ast.walk(tree))


@pytest.mark.parametrize("run", RUNS)
def test_golden_run(shared_sink: Path, run: str) -> None:
    sink = shared_sink
    got = read(sink, run)
    assert max(got) == RUNS[run][-1]["version"]
    expected = {v["version"]: v["sha256"] for v in RUNS[run]}
    assert {v: hashes(x) for v, x in got.items()} == {v: expected[v] for v in got}


@pytest.mark.parametrize(("run", "version"), [(run, v["version"]) for run, rows in RUNS.items() for v in rows])
def test_golden_version(shared_sink: Path, run: str, version: int) -> None:
    with kept(shared_sink / ".heads" / f"{run}.head"):
        point(shared_sink, run, version)
        got = read(shared_sink, run)
    expected = {v["version"]: v["sha256"] for v in RUNS[run]}
    assert max(got) == version
    assert {v: hashes(x) for v, x in got.items()} == {v: expected[v] for v in got}


def test_garbage_is_not_looked_at(sink: Path) -> None:
    expected = read(sink, "golden-steps")
    for path in (sink / "golden-steps" / "v000000000010").rglob("*"):
        if path.is_file():
            path.write_bytes(b"garbage")
    other = sink / "golden-steps" / "v000000000009" / "e000001"
    other.mkdir()
    assert read(sink, "golden-steps") == expected
    (other / "manifest").write_bytes(b"garbage")
    assert read(sink, "golden-steps") == expected
    for epoch in ("e000000", "e999999"):  # copies of a base under keys that its body does not name
        copy = sink / "golden-steps" / "v000000000001" / epoch
        copy.mkdir()
        (copy / "manifest").write_bytes((folder_of(sink, "golden-steps", 1) / "manifest").read_bytes())
    assert read(sink, "golden-steps") == expected


def test_example_of_the_text(tmp_path: Path) -> None:
    objects = re.findall(r"Object `([^`]+)`, (\d+) bytes, xxh3-128 `([0-9a-f]+)`:\n\n```hex\n(.*?)```", TEXT, re.DOTALL)
    assert len(objects) == 7
    for key, size, digest, dump in objects:
        data = bytes.fromhex("".join(line.split("|")[0] for line in dump.splitlines()))
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (int(size), digest)
        path = tmp_path / (".heads/example.head" if key == "(head)" else key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    expected: dict[int, dict[str, bytes]] = {}
    for version, name, words in re.findall(r"^version (\d), ([^:]+): ([0-9a-f ]+)$", TEXT, re.MULTILINE):
        data = b"".join(bytes.fromhex(word)[::-1] for word in words.split())
        expected.setdefault(int(version), {})[name] = data
    assert len(expected[0]) == len(expected[1]) == 4
    assert read_run(tmp_path, "example") == expected


@pytest.mark.parametrize("row", table_of("| shape | w | cut | block | cells |"), ids=lambda r: f"{r[0]}-{r[2]}")
def test_grid_of_the_text(row: list[str]) -> None:
    shape, w, cut, block, cells, tiles, tile, start, extent = row
    t = Tensor(["x", DTYPES[int(w)], json.loads(shape), 0, int(cut == "last"), json.loads(block), False, [], "", ""])
    assert t.num_tiles == int(tiles)
    if t.num_tiles:
        assert [k * p for k, p in zip(t.bands, t.pieces, strict=True)] == json.loads(cells)
        at = t.tile(int(tile))
        assert [s.start for s in at] == json.loads(start)
        assert [s.stop - s.start for s in at] == json.loads(extent)
        if t.num_words < 2**24:
            seen = np.zeros(t.extents, np.uint8)
            for i in range(t.num_tiles):
                seen[t.tile(i)] += 1
            assert (seen == 1).all()


def test_digests_of_the_text() -> None:
    rows = {row[0]: row[1:] for row in table_of("| | lane a | lane b |")}
    for lane, (s, c) in enumerate(tiny_reader.LANES):
        constants = [s, *c]
        assert [int(rows[k][lane], 16) for k in ("S", "C[0]", "C[1]", "C[2]", "C[3]")] == constants
    for name, dtype, shape, data, a, b, state in table_of("| name | dtype | shape | canonical bytes |"):
        extents = [] if shape == "(none)" else [int(x) for x in shape.split(",")]
        t = Tensor([name, dtype, extents, -1, 0, [], False, [], "", ""])
        words = np.frombuffer(b"" if data == "(none)" else bytes.fromhex(data), f"<u{t.w}")
        lanes = tiny_reader.digest_sum(words)
        assert (lanes[:8][::-1].hex(), lanes[8:][::-1].hex(), t.state(words).hex()) == (a, b, state)


def test_nothing_published(sink: Path) -> None:
    assert read_run(sink, "other") == {}
    point(sink, "golden-anchor", 0, version=-1, epoch=0, digest=b"", fence=1)
    assert read(sink, "golden-anchor") == {}


def other(**fields: object) -> Edit:
    """Set fields of the body."""
    return lambda b: b.update(fields)


# ---- damage


def objects_of(sink: Path, run: str) -> list[tuple[Path, int]]:
    """Objects below the run of the chain of the golden head, with a version whose reading meets them."""
    point_at = RUNS[run][-1]["version"]
    reached = sorted(read(sink, run))
    out = [(p, point_at) for p in sorted((sink / run / "schema").iterdir())]
    body = body_of(sink, run, reached[0])
    out.append((sink / run / "state" / body["state_table"].hex(), point_at))
    return out + [(p, v) for v in reached for p in sorted(folder_of(sink, run, v).iterdir())]


@pytest.mark.parametrize("run", RUNS)
def test_flips_and_truncations_are_refused(sink: Path, run: str) -> None:
    rng = np.random.default_rng(1)
    for path, version in objects_of(sink, run):
        point(sink, run, version)
        whole, covered = path.read_bytes(), []
        if path.name.startswith("payload"):
            index = int(path.name.removeprefix("payload-"))
            covered = [x for x in spans(body_of(sink, run, version)) if x[0] == index]
        last = max((end for _, _, end in covered), default=len(whole))
        for at in rng.integers(0, last, 1 if run == "golden-steps" else 8).tolist():
            flip(path, at, int(rng.integers(8)))
            if not covered or any(a <= at < b for _, a, b in covered):
                with pytest.raises(Refused):
                    read(sink, run)
            else:  # the header of an anchor means nothing to a reader
                assert max(read(sink, run)) == version
            path.write_bytes(whole)
        for size in [last - 1, *rng.integers(0, last, 0 if run == "golden-steps" else 3).tolist()]:
            path.write_bytes(whole[:size])
            with pytest.raises(Refused):
                read(sink, run)
        path.write_bytes(whole)


@pytest.mark.parametrize("run", ["golden-signed", "golden-signed-steps"])
def test_missing_objects_are_refused(sink: Path, run: str) -> None:
    for path, version in objects_of(sink, run):
        point(sink, run, version)
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(Refused, match=r"no object|no such manifest"):
            read(sink, run)
        path.write_bytes(whole)


def test_a_frame_is_fetched_once_more(sink: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, seen = read(sink, "golden-signed"), set()
    inner = tiny_reader.fetch

    def once_damaged(path: Path) -> bytes:
        data = inner(path)
        if not path.name.startswith("payload") or path in seen:
            return data
        seen.add(path)
        return data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(tiny_reader, "fetch", once_damaged)
    assert read(sink, "golden-signed") == expected
    assert len(seen) == 2


@pytest.mark.parametrize("run", ["golden-anchor", "golden-signed-steps"])
def test_head_damage(sink: Path, run: str) -> None:
    path, expected = sink / ".heads" / f"{run}.head", read(sink, run)
    whole = path.read_bytes()
    free = len(whole) - whole.index(b"fence")  # what no digest covers and nobody needs for reading
    for at in range(len(whole)):
        flip(path, at, at % 8)
        if at < len(whole) - free:
            with pytest.raises(Refused):
                read(sink, run)
        else:
            try:
                assert read(sink, run) == expected
            except Refused:
                pass
        path.write_bytes(whole[:at])
        with pytest.raises(Refused):
            read(sink, run)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [{"publisher": b"seven77"}, {"fence": -1}, {"more": 1}, {"run": "golden-steps"}, {"epoch": True}, {"digest": b""}]
    + [{"version": -1}, {"version": 2.0}, {"format": 2}, {"kind": "megasync.manifest"}, {"publisher": "somebody"}]
    + [{"epoch": 2}, {"digest": bytes(16)}, {"digest": bytes(32)}, {"digest": bytes(15)}, {"publisher": bytes(65536)}],
    ids=str,
)
def test_heads_are_refused(shared_sink: Path, change: dict[str, object]) -> None:
    with kept(shared_sink / ".heads" / "golden-anchor.head"):
        point(shared_sink, "golden-anchor", 2, **change)
        with pytest.raises(Refused):
            read(shared_sink, "golden-anchor")


@pytest.mark.parametrize(
    ("run", "version"), [("golden-steps", v) for v in (1, 3, 4, 5, 6, 7, 8, 9)] + [("golden-anchor", 2)]
)
def test_damage_under_new_digests(sink: Path, run: str, version: int) -> None:
    """With digests that were made again, the rules of section 8 and the state digests still catch every difference."""
    point(sink, run, version)
    expected, body, rng = read(sink, run), body_of(sink, run, version), np.random.default_rng(version)
    places, reasons = spans(body), []
    for _ in range(6):
        frame = int(rng.integers(len(places)))
        payload, start, stop = places[frame]
        path, manifest = (folder_of(sink, run, version) / name for name in (f"payload-{payload:05d}", "manifest"))
        whole = path.read_bytes(), manifest.read_bytes()
        flip(path, int(rng.integers(start, stop)), int(rng.integers(8)))
        digests = np.frombuffer(body["frames"]["digest"], np.uint8).reshape(-1, 16).copy()
        digests[frame] = np.frombuffer(xxhash.xxh3_128_digest(path.read_bytes()[start:stop]), np.uint8)
        forge(sink, run, version, other(frames={**body["frames"], "digest": digests.tobytes()}))
        try:
            got = read(sink, run)
        except Refused as e:
            reasons.append(str(e))
        else:
            assert got == expected  # other bytes of an encoder for the same words
        path.write_bytes(whole[0])
        manifest.write_bytes(whole[1])
    assert len(reasons) >= 4
    assert "digest of a frame" not in reasons


def put(key: str, at: int, value: int) -> Edit:
    """Set one number of a column of the frame table."""

    def edit(body: dict[str, Any]) -> None:
        column = np.frombuffer(body["frames"][key], tiny_reader.COLUMNS[key]).copy()
        column[at] = value
        body["frames"][key] = column.tobytes()

    return edit


def cut(key: str, nbytes: int) -> Edit:
    """Drop the last bytes of a column of the frame table."""
    return lambda b: b["frames"].update({key: b["frames"][key][:-nbytes]})


def flipped(key: str) -> Edit:
    """Flip a bit in a field of bytes."""
    return lambda b: b.update({key: bytes([b[key][0] ^ 1]) + b[key][1:]})


def one_place(body: dict[str, Any]) -> None:
    """Let the second frame lie where the first one does."""
    offsets = np.frombuffer(body["frames"]["offset"], "<u8").copy()
    offsets[1] = offsets[0]
    body["frames"]["offset"] = offsets.tobytes()


FIELDS: list[dict[str, object]] = [
    {"kind": "megasync.schema"},
    {"format": 2},
    {"format": True},
    {"format": 1.0},
    {"what": "other"},
    {"outer": b""},
]
FIELDS += [{"epoch": -1}, {"version": 1.0}, {"payload_nbytes": [-1]}, {"payload_nbytes": [2**63]}, {"root": bytes(15)}]
FIELDS += [{"schema_digest": bytes(32)}, {"digest_algorithm": 4}, {"formulas": None}, {"info": []}, {"new_states": ""}]
FIELDS += [{"more": 1}, {"info": {1: "x"}}, {"info": {"x": None}}, {"info": {"x": True}}, {"state_table": bytes(3)}]
EDITS: list[tuple[str, int, Edit, str]] = [("golden-steps", 1, other(**x), "fields|info") for x in FIELDS] + [
    ("golden-steps", 1, lambda b: b.pop("outer"), "fields"),
    ("golden-steps", 1, lambda b: b["frames"].pop("bitmap"), "fields"),
    ("golden-steps", 1, other(digest_algorithm=3), "rows of a column"),
    ("golden-steps", 1, other(run="golden-anchor"), "run and version"),
    ("golden-steps", 1, other(version=2), "run and version"),
    ("golden-steps", 1, other(epoch=2), "epoch"),
    ("golden-steps", 1, other(base_version=-1), "base_version"),
    ("golden-steps", 1, other(base_version=1), "base_version"),
    ("golden-steps", 1, other(base_digest=b""), "base and state_table"),
    ("golden-steps", 1, other(state_table=bytes(16)), "base and state_table"),
    ("golden-steps", 1, flipped("base_digest"), "no such manifest"),
    ("golden-steps", 1, flipped("schema_digest"), "schema"),
    ("golden-steps", 1, flipped("touched_ids"), "touched_ids"),
    ("golden-steps", 1, flipped("new_states"), "state digest"),
    ("golden-steps", 1, flipped("touched_olds"), "touched-old digest"),
    ("golden-steps", 1, flipped("root"), "root"),
    ("golden-steps", 1, other(num_changed=1), "num_changed"),
    ("golden-steps", 1, other(touched_olds=bytes(16)), "digests of touched"),
    ("golden-steps", 1, other(payload_nbytes=[]), "place"),
    ("golden-steps", 1, other(payload_nbytes=[1700]), "place"),
    ("golden-steps", 1, put("payload", 0, 1), "place"),
    ("golden-steps", 1, put("offset", 0, 2**64 - 1), "place"),
    ("golden-steps", 1, one_place, "overlap|digest of a frame"),
    ("golden-steps", 1, put("codec", 0, 0), "codec"),
    ("golden-steps", 1, put("codec", 0, 9), "codec"),
    ("golden-steps", 1, put("codec", 0, 8), "codec"),
    ("golden-steps", 1, put("codec", 0, 2), "planes"),
    ("golden-steps", 1, put("word_nbytes", 0, 8), "tensor of a frame"),
    ("golden-steps", 1, put("layer", 0, 7), "tensor of a frame"),
    ("golden-steps", 1, put("num_changed", 0, 0), "nothing"),
    ("golden-steps", 1, put("num_changed", 0, 7), "num_changed"),
    ("golden-steps", 1, put("num_planes", 0, 2), "rows of a column"),
    ("golden-steps", 1, put("num_runs", 0, 0), "rows of a column"),
    ("golden-steps", 1, put("num_runs", 0, 2**32 - 1), "rows of a column"),
    ("golden-steps", 1, put("plane_nbytes", 0, 2**32 - 1), "size of a frame"),
    ("golden-steps", 1, put("digest", 0, 0), "digest of a frame"),
    ("golden-steps", 1, put("tensor_id", 0, 14), "order of tensor ids"),
    ("golden-steps", 1, put("tensor_id", 0, 3), "tensor of a frame"),
    ("golden-steps", 1, put("tensor_id", 0, 1), "tiles of a run"),
    ("golden-steps", 1, put("first_tile", 0, 2**32 - 1), "tiles of a run"),
    ("golden-steps", 1, put("num_tiles", 0, 0), "rows of bitmap"),
    ("golden-steps", 1, put("bitmap", 0, 0xFF), "bitmap of a run"),
    ("golden-steps", 1, put("bitmap", 0, 0), "bitmap of a run"),
    ("golden-steps", 1, cut("payload", 3), "a column"),
    ("golden-steps", 1, cut("payload", 4), "rows of a column"),
    ("golden-steps", 1, cut("bitmap", 1), "rows of bitmap"),
    ("golden-steps", 1, cut("digest", 1), "rows of a column"),
    ("golden-steps", 2, other(payload_nbytes=[1]), "payloads without frames"),
    ("golden-steps", 2, other(payload_nbytes=[0] * 65_537), "number of payloads"),
    ("golden-steps", 0, other(payload_nbytes=[1]), "checkpoint"),
    ("golden-steps", 0, other(what="anchor"), "no object|state digests of the start"),
    ("golden-steps", 0, flipped("root"), "table of state digests"),
    ("golden-steps", 0, flipped("state_table"), "no object"),
    ("golden-anchor", 2, other(what="checkpoint"), "checkpoint"),
    ("golden-anchor", 2, put("codec", 0, 1), "codec"),
    ("golden-anchor", 2, other(what="delta"), "base_version"),
    ("golden-anchor", 2, other(touched_olds=b"\1" * 112), "touched_olds of an anchor"),
]


@pytest.mark.parametrize(("run", "version", "edit", "rule"), EDITS)
def test_manifests_are_refused(shared_sink: Path, run: str, version: int, edit: Edit, rule: str) -> None:
    sink = shared_sink
    with kept(sink / ".heads" / f"{run}.head", folder_of(sink, run, version) / "manifest"):
        forge(sink, run, version, edit)
        with pytest.raises(Refused, match=rule):
            read(sink, run)


def test_forging_nothing_is_read(sink: Path) -> None:
    for run, version in (("golden-steps", 1), ("golden-steps", 0), ("golden-anchor", 2)):
        forge(sink, run, version, other(info={"x": "y"}, outer="another", formulas=["f"]))
        assert max(read(sink, run)) == version


def test_keys_are_there_once(sink: Path) -> None:
    body = body_of(sink, "golden-steps", 1)
    for where, spec in ((body, tiny_reader.BODY), (body["frames"], tiny_reader.BODY["frames"])):
        good = msgspec.msgpack.encode(where)
        entries = good[3:] if good[0] == 0xDE else good[1:]
        for name in where:
            entry = msgspec.msgpack.encode(name) + msgspec.msgpack.encode(where[name])
            assert entry in entries
            twice = b"\xde" + (len(where) + 1).to_bytes(2, "big") + entries + entry
            with pytest.raises(Refused, match="twice"):
                tiny_reader.document(twice, spec, 2**20)
        for header in (b"\xde" + len(where).to_bytes(2, "big"), b"\xdf" + len(where).to_bytes(4, "big")):
            assert tiny_reader.document(header + entries, spec, 2**20) == where
        with pytest.raises(Refused, match="size"):
            tiny_reader.document(good, spec, len(good) - 1)


def test_signatures(sink: Path) -> None:
    run = "golden-signed"
    for key in (b"", b"another key", KEY + b"."):
        with pytest.raises(Refused, match="signature"):
            read_run(sink, run, key, BASES[run])
    assert read_run(sink, run, None, BASES[run]) == read(sink, run)
    with pytest.raises(Refused, match="signature"):
        read_run(sink, "golden-anchor", KEY, BASES["golden-anchor"])
    forge(sink, run, 2, other(info={}))
    with pytest.raises(Refused, match="signature"):
        read(sink, run)
    forge(sink, run, 2, other(info={}), KEY)
    assert list(read(sink, run)) == [2]
    forge(sink, "golden-anchor", 2, other(info={}), KEY)
    with pytest.raises(Refused, match="digest_algorithm"):
        read_run(sink, "golden-anchor", KEY, BASES["golden-anchor"])
    assert list(read(sink, "golden-anchor")) == [2]  # without a key signatures mean nothing


def test_wrong_base_is_refused(sink: Path) -> None:
    for run, name in (("golden-steps", "model.scalar"), ("golden-anchor", "inv_freq")):
        words = BASES[run][name]
        for given in ({}, {name: words ^ words.dtype.type(1)}, {name: np.append(words, words)}):
            base = {k: v for k, v in BASES[run].items() if k != name} | given
            with pytest.raises(Refused):
                read_run(sink, run, None, base)


GOOD_ROW: list[Any] = ["x", "F4", [4, 6], 0, 0, [], False, ["y"], "", ""]


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, ""), (0, "a\0b"), (0, "x" * 513), (0, b"x"), (0, "y"), (1, "F5"), (2, [-1]), (2, [2**24, 2**25]), (2, [1] * 9)]
    + [(2, [2**24, 2**24])]
    + [(2, [2**48 + 1]), (2, [True]), (3, -2), (3, 2**31), (4, 2), (5, [1]), (5, [0, 1]), (5, [2**11, 2**10]), (6, 0)]
    + [(7, [""]), (7, ["z", "z"]), (7, ["x"]), (8, None), (9, 1), (5, [2**20 + 1, 1])],
)
def test_schemas_are_refused(tmp_path: Path, at: int, value: object) -> None:
    for row in (GOOD_ROW, [value if i == at else x for i, x in enumerate(GOOD_ROW)]):
        doc = {"kind": "megasync.schema", "format": 1, "run": "r", "tensors": [row]}
        data = msgspec.msgpack.encode(doc)
        (tmp_path / "r" / "schema").mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / "schema" / xxhash.xxh3_128_hexdigest(data)).write_bytes(data)
        reader = tiny_reader.Reader(tmp_path, "r", None, {})
        if row is GOOD_ROW:
            assert len(reader.schema(xxhash.xxh3_128_digest(data))) == 1
        else:
            with pytest.raises(Refused):
                reader.schema(xxhash.xxh3_128_digest(data))


# ---- codecs


def u32s(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


@pytest.mark.parametrize(
    ("planes", "rule"),
    [
        ([b"\2\0\0\0", b"\1\0", b"\0\0", b"\5\6", b""], ""),
        ([b"\2\0\0\0", b"\1\0", b"\0\0", b"\5\6"], "planes"),
        ([b"\2\0\0\0", b"\1\0", b"\0\0", b"\5\0", b""], "value"),
        ([b"\2\0\0\0", b"\1\6", b"\0\0", b"\5\6", b""], "index"),
        ([b"\2\0\0\0", b"\1\0", b"\0\1", b"\5\6", b""], "index"),
        ([b"\1\0\0\0", b"\1", b"\0", b"\5", b""], "counts"),
        ([b"\2\0\0\0", b"\1\0\0", b"\0\0", b"\5\6", b""], "length of a plane"),
        ([b"\2\0\0\0", b"\1\0", b"\0\0", b"\5\6", b"\1"], "length of a plane"),
        ([b"\2\0\0\0", b"\1", b"\0\0", b"\5\6", b""], "Zstd"),
        ([b"\2\0\0\1", b"\1\0", b"\0\0", b"\5\6", b""], "counts"),
    ],
)
def test_sparse_frames(planes: list[bytes], rule: str) -> None:
    """One tile of 8 words of one byte, two of them changed."""
    if rule:
        with pytest.raises(Refused, match=rule):
            tiny_reader.sparse(1, planes, [8], 2)
    else:
        assert tiny_reader.sparse(1, planes, [8], 2).tobytes() == b"\0\5\6\0\0\0\0\0"


def test_dense_segments() -> None:
    """Three of eight words of one byte are dense, as 3 * 3 >= 8; the text's two sides of the bound."""
    assert tiny_reader.sparse(1, [b"\3\0\0\0", b"", b"", b"", b"\1\0\2\0\0\0\0\3"], [8], 3).tobytes()[2] == 2
    with pytest.raises(Refused, match="count of a segment"):
        tiny_reader.sparse(1, [b"\3\0\0\0", b"", b"", b"", b"\1\0\2\0\0\0\0\0"], [8], 3)


MASK = b"\7" * 64
ZSTD = zstandard.ZstdCompressor().compress(MASK)
BARE = zstandard.ZstdCompressor(write_content_size=False).compress(MASK)
WIDE = b"\x28\xb5\x2f\xfd\x80\x88\x40\0\0\0\x03\x02\0\x07"  # a run-length block under a window of 2^27 bytes
SNAPPY = bytes(cramjam.snappy.compress_raw(MASK))
LZ4 = b"\x1f\x07\x01\x00\x27\x50" + MASK[:5]


@pytest.mark.parametrize(
    ("codec", "table", "blocks", "rule"),
    [
        (2, u32s(2**31 + 64), MASK, ""),
        (2, u32s(2**31 + 63), MASK[1:], "length of a block"),
        (2, u32s(63), MASK[1:], "length of a block"),
        (2, u32s(2**31), b"", "length of a block"),
        (2, u32s(2**31 + 64), MASK + b"\0", "length of the blocks"),
        (2, u32s(2**31 + 64)[:3], MASK, "Zstd"),
        (2, u32s(2**31 + 64, 0), MASK, "length of a plane"),
        (3, u32s(len(ZSTD)), ZSTD, ""),
        (3, u32s(len(ZSTD)), ZSTD[:-1], "length of the blocks"),
        (3, u32s(len(ZSTD) - 1), ZSTD[:-1], "Zstd"),
        (3, u32s(len(ZSTD) + 1), ZSTD + b"\0", "Zstd"),
        (3, u32s(len(BARE)), BARE, "Zstd"),
        (3, u32s(len(WIDE)), WIDE, ""),
        (3, u32s(len(WIDE)), WIDE.replace(b"\x80\x88", b"\x80\x89"), "window of Zstd"),
        (3, u32s(len(WIDE)), WIDE.replace(b"\x80\x88", b"\x81\x88"), "Zstd"),
        (3, u32s(64), MASK, "length of a block"),
        (5, u32s(len(LZ4)), LZ4, ""),
        (5, u32s(len(LZ4) - 1), LZ4[:-1], "block"),
        (5, u32s(len(ZSTD)), ZSTD, "block"),
        (4, u32s(len(ZSTD)), ZSTD, "block"),
        (4, u32s(len(SNAPPY)), SNAPPY, ""),
        (4, u32s(len(SNAPPY)), b"\x41" + SNAPPY[1:], "length of a Snappy block"),
        (4, u32s(len(SNAPPY) - 1), SNAPPY[:-1], "block"),
        (6, u32s(len(SNAPPY)), SNAPPY, ""),
        (7, u32s(len(LZ4)), LZ4, ""),
        (7, u32s(len(LZ4)), LZ4[:-1], "Zstd"),
    ],
)
def test_dense_frames(codec: int, table: bytes, blocks: bytes, rule: str) -> None:
    """One tile of 64 words of one byte."""
    if rule:
        with pytest.raises(Refused, match=rule):
            tiny_reader.dense(codec, 1, [table, blocks], [64])
    else:
        assert tiny_reader.dense(codec, 1, [table, blocks], [64]).tobytes() == MASK


def snappy_is_strict(data: bytes, size: int) -> None:
    """Check the strict rules of section 8.3 on a Snappy block."""
    n = at = 0
    while True:
        n |= (data[at] & 0x7F) << 7 * at
        at += 1
        if not data[at - 1] & 0x80:
            break
    assert n == size
    assert at == 1 or data[at - 1], "shortest varint"
    done = 0
    while at < len(data):
        tag, kind = data[at], data[at] & 3
        at += 1
        if kind == 0:
            extra = max(0, (tag >> 2) - 59)
            length = 1 + (int.from_bytes(data[at : at + extra], "little") if extra else tag >> 2)
            at += extra + length
        else:
            extra = (0, 1, 2, 4)[kind]
            offset = int.from_bytes(data[at : at + extra], "little") | ((tag >> 5) << 8 if kind == 1 else 0)
            length = 4 + (tag >> 2 & 7) if kind == 1 else 1 + (tag >> 2)
            at += extra
            assert 1 <= offset <= done
        done += length
    assert (at, done) == (len(data), size)


def lz4_is_strict(data: bytes, size: int) -> None:
    """Check the strict rules of section 8.3 on an LZ4 block."""
    at = done = 0
    match = None

    def length(n: int) -> int:
        nonlocal at
        more = 255 if n == 15 else 0
        while more == 255:
            more = data[at]
            at += 1
            n += more
        return n

    while True:
        token = data[at]
        at += 1
        literals = length(token >> 4)
        at, done = at + literals, done + literals
        if at >= len(data):
            break
        offset = int.from_bytes(data[at : at + 2], "little")
        at += 2
        assert 1 <= offset <= done
        match = done
        done += 4 + length(token & 15)
    assert (at, done) == (len(data), size)
    assert match is None or (literals >= 5 and size - match >= 12)


def test_golden_blocks_are_strict(sink: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, int] = {}
    inner = tiny_reader.unblock

    def watch(codec: int, data: bytes, size: int) -> bytes:
        seen[codec] = seen.get(codec, 0) + 1
        if codec != 3:
            (lz4_is_strict if codec in (5, 7) else snappy_is_strict)(data, size)
        return inner(codec, data, size)

    monkeypatch.setattr(tiny_reader, "unblock", watch)
    read(sink, "golden-steps")
    assert sorted(seen) == [3, 4, 5, 6, 7]


def test_frames_are_disjoint(sink: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second frame that changes a word of the first one is refused before any digest is asked."""
    inner = tiny_reader.frame_table
    monkeypatch.setattr(tiny_reader, "pairwise", lambda frames: ())
    monkeypatch.setattr(tiny_reader, "frame_table", lambda body, tensors: [*inner(body, tensors)] * 2)
    forge(sink, "golden-steps", 1, lambda b: b.update(num_changed=2 * b["num_changed"]))
    with pytest.raises(Refused, match="disjoint"):
        read(sink, "golden-steps")
