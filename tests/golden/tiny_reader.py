"""A second reader of the format, made from ``FORMAT.md`` alone (section numbers are its): it imports nothing of the library.

Slow and short: it holds every version whole, looks at every word, and refuses with :class:`Refused`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import cramjam
import msgspec
import numpy as np
import xxhash
import zstandard

try:
    from blake3 import blake3
except ImportError:  # then a digest of algorithm 2 matches nothing, and what needs it is refused
    blake3 = None

DTYPES = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 F4 F6_E2M3 F6_E3M2"}
DTYPES |= {2: "U16 I16 F16 BF16", 4: "U32 I32 F32", 8: "U64 I64 F64 C64"}
WORD_NBYTES = {name: w for w, names in DTYPES.items() for name in names.split()}
RUN, EPOCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,99}"), re.compile(r"e[0-9]{6,}")
NAME, HASH = re.compile(r"[^\0]{1,512}"), re.compile(b"(?s:.{16})")
MAYBE, DIGEST = re.compile(b"(?s:.{16})?"), re.compile(b"(?s:.{16}|.{32})?")
SIZE, VERSION, COLUMNS = range(2**63), range(-1, 2**63), {"payload": "<u4", "offset": "<u8", "codec": "u1"}
COLUMNS |= {"word_nbytes": "u1", "num_changed": "<u4", "layer": "<i4", "num_planes": "u1", "num_runs": "<u4"}
COLUMNS |= {"plane_nbytes": "<u4", "digest": "u1", "tensor_id": "<u4", "first_tile": "<u4", "num_tiles": "<u4"}
COLUMNS |= {"bitmap": "u1"}
ROW = (NAME, set(WORD_NBYTES), [range(2**48 + 1)], range(-1, 2**31), range(2), [range(1, 2**20 + 1)])
MAX_SCHEMA, MAX_MANIFEST, MAX_HEAD = 2**28, 2**30, 65536
SCHEMA = {"kind": {"megasync.schema"}, "format": {1}, "run": RUN, "tensors": [(*ROW, bool, [NAME], str, str)]}
HEAD = {"kind": {"megasync.head"}, "format": {1}, "run": RUN, "version": VERSION, "epoch": SIZE, "digest": DIGEST}
HEAD |= {"fence": SIZE, "publisher": re.compile(b"(?s:.{8,})")}
WRAPPER = {"body": bytes, "signature": re.compile(b"(?s:.{32})?")}
BODY = {"kind": {"megasync.manifest"}, "format": {1}, "what": {"delta", "anchor", "checkpoint"}, "run": RUN}
BODY |= {"epoch": SIZE, "version": SIZE, "base_version": VERSION, "base_digest": DIGEST, "schema_digest": HASH}
BODY |= {"digest_algorithm": range(1, 4), "payload_nbytes": [SIZE], "frames": dict.fromkeys(COLUMNS, bytes)}
BODY |= {"touched_ids": bytes, "new_states": bytes, "touched_olds": bytes, "root": HASH, "state_table": MAYBE}
BODY |= {"num_changed": SIZE, "outer": str, "formulas": [str], "info": dict}


class Refused(Exception):
    """The bytes break a rule of the format, or are not there."""


def need(ok: object, rule: str) -> None:
    """Refuse unless ``ok``."""
    if not ok:
        raise Refused(rule)


def fits(v: Any, spec: Any) -> bool:
    """Whether a value is of a type, in a range, one of a set, matches a pattern, or is such a map, row or array."""
    if isinstance(spec, dict):
        return type(v) is dict and v.keys() == spec.keys() and all(fits(v[key], s) for key, s in spec.items())
    if isinstance(spec, list | tuple):
        specs = spec if isinstance(spec, tuple) else spec * len(v) if type(v) is list else ()
        return type(v) is list and len(v) == len(specs) and all(map(fits, v, specs))
    if isinstance(spec, re.Pattern):
        return type(v) is type(spec.pattern) and spec.fullmatch(v) is not None
    return type(v) is spec if isinstance(spec, type) else type(v) is type(next(iter(spec))) and v in spec


def document(data: bytes, spec: dict[str, Any], most: int) -> dict[str, Any]:
    """Decode one strict msgpack map of at most that many bytes (3)."""
    need(len(data) <= most, "size of a document")
    try:
        parts = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
        doc: dict[str, Any] = {
            key: document(bytes(part), spec[key], most)
            if isinstance(spec.get(key), dict)
            else msgspec.msgpack.decode(part)
            for key, part in parts.items()
        }
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as e:
        raise Refused(f"fields of a document, not msgpack: {e}") from e
    wide = {0xDE: 2, 0xDF: 4}.get(data[0], 0)
    need((int.from_bytes(data[1 : 1 + wide], "big") if wide else data[0] % 16) == len(doc), "fields there twice")
    need(fits(doc, spec), "fields of a document")
    return doc


def fetch(path: Path) -> bytes:
    """Bytes of an object that must be there."""
    need(path.is_file(), f"no object {path.name}")
    return path.read_bytes()


def content(algorithm: int, data: bytes | bytearray) -> bytes:
    """Content digest (9.1)."""
    if algorithm == 2:
        return blake3(data).digest() if blake3 else b""
    return xxhash.xxh3_128_digest(data) if algorithm == 1 else hashlib.sha256(data).digest()


def constant(text: str) -> int:
    """First 8 bytes of the SHA-256 of a text (9.2)."""
    return int.from_bytes(hashlib.sha256(f"megasync state digest {text}".encode()).digest()[:8], "little")


LANES = [(constant(f"S {i} 0"), [constant(f"C {i} {k}") | 1 for k in range(4)]) for i in (0, 1)]


def digest_sum(words: np.ndarray, plus: tuple[int, int] = (0, 0)) -> bytes:
    """Both lanes of the words of a whole tensor (9.2), plus a number each."""
    data, out = words.tobytes(), b""
    u = np.frombuffer(data + bytes(-len(data) % 16), "<u4").astype(np.uint64).reshape(-1, 4)
    for (s, c), more in zip(LANES, plus, strict=True):
        x = np.arange(len(u), dtype=np.uint64) + np.uint64(s) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        m = (x ^ (x >> np.uint64(31))) | np.uint64(1)
        lane = int((u * (m[:, None] * np.array(c, np.uint64))).sum(dtype=np.uint64))
        out += ((lane + more) % 2**64).to_bytes(8, "little")
    return out


class Tensor:
    """A row of the schema and its tile grid (6)."""

    def __init__(self, row: list[Any]) -> None:
        self.name, self.dtype, self.shape, self.layer, cut, block, self.frozen, self.aliases, _, _ = row
        e = self.extents = self.shape or [1]
        b, n, r, w = block or [1] * len(e), len(e), 0, WORD_NBYTES[self.dtype]
        need(n <= 8 and prod(e) <= 2**48 and len(b) == n and prod(b) <= 2**20, "shape and block")
        self.w, self.num_words, self.num_tiles, t, self.bands = w, prod(e), 0, list(e), [1] * n
        if not self.num_words:
            return
        while r < n - 2 and b[r] == 1 and prod(e[r + 1 :]) >= 65536:
            t[r], r = 1, r + 1
        c = n - 1 if cut else r
        for k in 8, 4, 2:
            if e[c] % (k * b[c]) == 0 and (not cut or e[c] // k * w >= 32) and prod(t) // k >= 65536:
                self.bands[c], t[c] = k, e[c] // k
                break
        while prod(t) > 2**20 and (axes := [i for i in range(r, n) if t[i] > b[i]]):
            t[axes[0]] = b[axes[0]] * -(-t[axes[0]] // (2 * b[axes[0]]))
        self.t, self.band = t, [x // k for x, k in zip(e, self.bands, strict=True)]
        self.pieces = [-(-x // y) for x, y in zip(self.band, t, strict=True)]
        self.num_tiles = prod(self.bands) * prod(self.pieces)

    def tile(self, index: int) -> tuple[slice, ...]:
        """Where a tile lies, one slice an axis."""
        out: list[slice] = []
        for k, p, band, t in reversed(list(zip(self.bands, self.pieces, self.band, self.t, strict=True))):
            index, q = divmod(index, k * p)
            start = q // p * band + q % p * t
            out.insert(0, slice(start, start + min(t, band - q % p * t)))
        return tuple(out)

    def state(self, words: np.ndarray) -> bytes:
        """State digest (9.3)."""
        x = xxhash.xxh3_128_digest(f"{self.name}\0{self.dtype}\0{','.join(map(str, self.shape))}".encode())
        plus = int.from_bytes(x[:8], "big"), int.from_bytes(x[8:], "big")
        return digest_sum(words, plus) if self.num_words else bytes(16)


def unzstd(data: bytes, size: int) -> bytes:
    """One Zstd frame that says and holds ``size`` bytes (8.1)."""
    try:
        head, inflate = zstandard.get_frame_parameters(data), zstandard.ZstdDecompressor().decompressobj()
        need(data[:4] == b"\x28\xb5\x2f\xfd" and head.content_size == size and not data[4] & 3, "header of Zstd")
        need(head.window_size <= 2**27, "window of Zstd")
        out = inflate.decompress(data)
    except zstandard.ZstdError as e:
        raise Refused(f"Zstd: {e}") from e
    need(inflate.eof and not inflate.unused_data and len(out) == size, "end of Zstd")
    return out


def unpack(stored: bytes, size: int) -> bytes:
    """A packed plane (8.1)."""
    need(len(stored) <= size, "length of a plane")
    return stored if len(stored) == size else unzstd(stored, size)


def unblock(codec: int, data: bytes, size: int) -> bytes:
    """An encoded block (8.3); its strict rules are left to decoders that are safe for any input."""
    if codec == 3:
        return unzstd(data, size)
    try:
        need(codec in (5, 7) or cramjam.snappy.decompress_raw_len(data) == size, "length of a Snappy block")
        lz4, snappy = cramjam.lz4.decompress_block, cramjam.snappy.decompress_raw
        out = bytes(lz4(data, output_len=size) if codec in (5, 7) else snappy(data))
    except cramjam.DecompressionError as e:
        raise Refused(f"block: {e}") from e
    need(len(out) == size, "length of a block")
    return out


def cuts(sizes: list[int], most: int) -> list[int]:
    """Each size in parts of ``most``, the last one shorter."""
    return [min(most, n - at) for n in sizes for at in range(0, n, most)]


def sparse(w: int, planes: list[bytes], sizes: list[int], num_changed: int) -> np.ndarray:
    """Masks of the tiles of a frame of codec 1 (8.2)."""
    need(len(planes) == 3 + 2 * w, "planes of a frame")
    words = np.array(cuts(sizes, 65536))
    count = np.frombuffer(unpack(planes[0], 4 * len(words)), np.uint8).reshape(4, -1).T.copy().view("<u4").ravel()
    count = count.astype(np.int64)
    need((count <= words).all() and count.sum() == num_changed, "counts of segments")
    dense = count * (2 + w) >= words * w
    n, d = int(count[~dense].sum()), int(words[dense].sum())
    lows, highs, *bytes_of = (np.frombuffer(unpack(p, n), np.uint8) for p in planes[: 3 + w][1:])
    values = np.array(bytes_of).T.copy().view(f"<u{w}").ravel()
    full = np.array([np.frombuffer(unpack(p, d), np.uint8) for p in planes[3 + w :]]).T.copy().view(f"<u{w}").ravel()
    need(values.all(), "a value of 0")
    steps, out, at = lows.astype(np.int64) + highs.astype(np.int64) * 256 + 1, np.zeros(sum(sizes), f"<u{w}"), 0
    for size, c, whole in zip(words.tolist(), count.tolist(), dense.tolist(), strict=True):
        if whole:
            out[at : at + size], full = full[:size], full[size:]
        elif c:
            index = np.cumsum(steps[:c]) - 1
            need(index[-1] < size, "index in a segment")
            out[at + index], values, steps = values[:c], values[c:], steps[c:]
        need(np.count_nonzero(out[at : at + size]) == c, "count of a segment")
        at += size
    return out


def dense(codec: int, w: int, planes: list[bytes], sizes: list[int]) -> np.ndarray:
    """Masks of the tiles of a frame of codecs 2 to 7 (8.3)."""
    need(len(planes) == 2, "planes of a frame")
    blocks, parts, at = cuts([n * w for n in sizes], 2**20), [], 0
    table: list[int] = np.frombuffer(unpack(planes[0], 4 * len(blocks)), "<u4").tolist()
    total = sum(entry % 2**31 for entry in table)
    for entry, size in zip(table, blocks, strict=True):
        fine = entry % 2**31 == size if entry >> 31 else codec != 2 and entry < size
        need(entry == 0 or fine, "length of a block")
    data = unpack(planes[1], total) if codec in (6, 7) else planes[1]
    need(len(data) == total, "length of the blocks")
    for entry, size in zip(table, blocks, strict=True):
        block = data[at : at + entry % 2**31]
        parts.append(bytes(size) if entry == 0 else block if entry >> 31 else unblock(codec, block, size))
        at += len(block)
    return np.frombuffer(b"".join(parts), f"<u{w}")


class Frame(NamedTuple):
    """One frame (7): where it lies, the stored lengths of its planes, its tiles by tensor and number, their words."""

    payload: int
    start: int
    stop: int
    codec: int
    w: int
    num_changed: int
    digest: bytes
    planes: list[int]
    tiles: list[tuple[int, int]]
    sizes: list[int]

    def decode(self, stored: bytes) -> list[np.ndarray]:
        """Masks of its tiles (8)."""
        ends = np.cumsum(self.planes).tolist()
        planes = [stored[end - n : end] for n, end in zip(self.planes, ends, strict=True)]
        if self.codec == 8:
            need(len(planes) == 1 and len(stored) == sum(self.sizes) * self.w, "length of an anchor's frame")
            words = np.frombuffer(stored, f"<u{self.w}")
        elif self.codec == 1:
            words = sparse(self.w, planes, self.sizes, self.num_changed)
        else:
            words = dense(self.codec, self.w, planes, self.sizes)
        masks = np.split(words, np.cumsum(self.sizes)[:-1])
        need(np.count_nonzero(words) == self.num_changed, "num_changed of a frame")
        need(self.codec == 8 or all(m.any() for m in masks), "a tile without changes")
        return masks


def frame_table(body: dict[str, Any], tensors: list[Tensor]) -> Iterator[Frame]:
    """Check and unpack the frame table of a manifest (7)."""
    raw, k = body["frames"], 16 if body["digest_algorithm"] == 1 else 32
    of_runs = "tensor_id", "first_tile", "num_tiles"
    need(all(len(raw[key]) % np.dtype(t).itemsize == 0 for key, t in COLUMNS.items()), "a column")
    col: dict[str, Any] = {key: np.frombuffer(raw[key], t).tolist() for key, t in COLUMNS.items() if key != "bitmap"}
    rows = dict.fromkeys(COLUMNS, len(col["payload"])) | dict.fromkeys(of_runs, sum(col["num_runs"]))
    rows |= {"plane_nbytes": sum(col["num_planes"]), "digest": k * rows["payload"]}
    need(rows["payload"] <= 2**24 and all(len(x) == rows[key] for key, x in col.items()), "rows of a column")
    need(len(raw["bitmap"]) == sum(-(-n // 8) for n in col["num_tiles"]), "rows of bitmap")
    need(sum(col["num_tiles"]) <= 2**30 and sum(map(int.bit_count, raw["bitmap"])) <= 2**26, "number of tiles")
    planes, bitmap, digests = iter(col["plane_nbytes"]), iter(raw["bitmap"]), iter(raw["digest"])
    runs = zip(*(col[key] for key in of_runs), strict=True)
    keys = "payload", "offset", "codec", "word_nbytes", "num_changed", "layer", "num_planes", "num_runs"
    for payload, start, codec, w, num_changed, layer, num_planes, num_runs in zip(*(col[x] for x in keys), strict=True):
        need(1 <= codec <= 8 and (codec == 8) == (body["what"] == "anchor"), "codec of a frame")
        need(num_runs >= 1 and (num_changed >= 1 or codec == 8), "a frame of nothing")
        last, tiles, sizes, lengths = -1, [], [], [next(planes) for _ in range(num_planes)]
        for tensor_id, first, n in (next(runs) for _ in range(num_runs)):
            need(last < tensor_id < len(tensors), "order of tensor ids")
            tensor, last = tensors[tensor_id], tensor_id
            need(not tensor.frozen and tensor.layer == layer and tensor.w == w, "tensor of a frame")
            need(n >= 1 and first + n <= tensor.num_tiles, "tiles of a run")
            bits = np.unpackbits(np.array([next(bitmap) for _ in range(-(-n // 8))], np.uint8), bitorder="little")
            need(bits[0] and bits[n - 1] and not bits[n:].any(), "bitmap of a run")
            tiles += [(tensor_id, first + j) for j in np.flatnonzero(bits).tolist()]
        sizes = [prod(s.stop - s.start for s in tensors[i].tile(j)) for i, j in tiles]
        nbytes, stored = sum(sizes) * w, sum(lengths)
        need(nbytes <= 2**26 and stored <= nbytes + 4 * len(cuts(sizes, 65536)), "size of a frame")
        need(payload < len(body["payload_nbytes"]) and start + stored <= body["payload_nbytes"][payload], "place")
        digest = bytes(next(digests) for _ in range(k))
        yield Frame(payload, start, start + stored, codec, w, num_changed, digest, lengths, tiles, sizes)


class Reader:
    """Follows the chain of a head (12)."""

    def __init__(self, sink: Path, run: str, key: bytes | None, base: dict[str, np.ndarray]) -> None:
        need(RUN.fullmatch(run), "name of a run")
        self.sink, self.run, self.key, self.base = sink, run, key, base

    def manifest(self, version: int, digest: bytes, epoch: int | None = None) -> tuple[Path, dict[str, Any]]:
        """Folder and body of the manifest of this digest; without an epoch it is looked for (10)."""
        folder = self.sink / self.run / f"v{version:012d}"
        for path in sorted(folder.glob("e*")) if epoch is None else [folder / f"e{epoch:06d}"]:
            if not EPOCH.fullmatch(path.name) or not (path / "manifest").is_file():
                continue
            data = fetch(path / "manifest")
            algorithms = [a for a in (1, 2, 3) if content(a, data) == digest]
            if not algorithms:
                continue
            wrapper = document(data, WRAPPER, MAX_MANIFEST)
            signature = wrapper["signature"]
            if self.key is not None:
                need(hmac.compare_digest(hmac.digest(self.key, wrapper["body"], "sha256"), signature), "signature")
            body = document(wrapper["body"], BODY, MAX_MANIFEST)
            if epoch is None and path.name != f"e{body['epoch']:06d}":
                continue
            delta, what = body["what"] == "delta", body["what"]
            need(body["digest_algorithm"] in algorithms and (algorithms != [1] or self.key is None), "digest_algorithm")
            need(len(body["payload_nbytes"]) <= 65536, "number of payloads")
            need(body["frames"]["codec"] or not delta or not body["payload_nbytes"], "payloads without frames")
            need(body["run"] == self.run and body["version"] == version, "run and version of the key")
            need(path.name == f"e{body['epoch']:06d}", "epoch of the key")
            need(0 <= body["base_version"] < version if delta else body["base_version"] == -1, "base_version")
            need(bool(body["base_digest"]) == delta and bool(body["state_table"]) != delta, "base and state_table")
            need(what != "checkpoint" or not (version or body["payload_nbytes"] or body["touched_ids"]), "checkpoint")
            need(what != "anchor" or not any(body["touched_olds"]), "touched_olds of an anchor")
            need(all(fits(k, str) and type(v) in (str, int, float) for k, v in body["info"].items()), "info")
            return path, body
        raise Refused("no such manifest")

    def apply(self, folder: Path, body: dict[str, Any], tensors: list[Tensor], words: list[np.ndarray]) -> None:
        """Lead the words to the manifest's version, if all its digests agree."""
        frames = sorted(frame_table(body, tensors))
        need(all(a.payload < b.payload or a.stop <= b.start for a, b in pairwise(frames)), "frames overlap")
        need(body["num_changed"] == sum(f.num_changed for f in frames), "num_changed")
        ids = sorted({i for f in frames for i, _ in f.tiles})
        need(body["touched_ids"] == np.array(ids, "<u4").tobytes(), "touched_ids")
        need(len(body["new_states"]) == len(body["touched_olds"]) == 16 * len(ids), "digests of touched tensors")
        masks = {i: np.zeros_like(words[i]) for i in ids}
        for f in frames:
            for _ in range(2):  # a difference is fetched once more
                stored = fetch(folder / f"payload-{f.payload:05d}")[f.start : f.stop]
                if good := content(body["digest_algorithm"], stored) == f.digest:
                    break
            need(good, "digest of a frame")
            for (i, j), mask in zip(f.tiles, f.decode(stored), strict=True):
                cell = masks[i].reshape(tensors[i].extents)[tensors[i].tile(j)]
                need(not ((cell != 0) & (mask.reshape(cell.shape) != 0)).any(), "frames are not disjoint")
                cell ^= mask.reshape(cell.shape)
        for k, i in enumerate(ids):
            at, old = slice(16 * k, 16 * k + 16), np.where(masks[i] != 0, words[i], np.zeros_like(words[i]))
            need(digest_sum(old) == body["touched_olds"][at], "touched-old digest")
            words[i] = words[i] ^ masks[i]
            need(tensors[i].state(words[i]) == body["new_states"][at], "state digest")

    def start(self, body: dict[str, Any], tensors: list[Tensor]) -> Iterator[np.ndarray]:
        """The words that an anchor or a checkpoint starts from: given ones, or zeros (4)."""
        for t in tensors:
            data = bytes(0 if t.frozen or body["what"] == "checkpoint" else t.num_words * t.w)
            if not data and t.num_words:
                need(t.name in self.base, "a tensor that no object holds")
                data = self.base[t.name].astype(self.base[t.name].dtype.newbyteorder("<")).tobytes()
            need(len(data) == t.num_words * t.w, "size of a given tensor")
            yield np.frombuffer(data, f"<u{t.w}")

    def named(self, folder: str, digest: bytes) -> bytes:
        """A schema or table of state digests, by its digest."""
        data = fetch(self.sink / self.run / folder / digest.hex())
        need(content(1, data) == digest, f"digest in {folder}")
        return data

    def schema(self, digest: bytes) -> list[Tensor]:
        """The tensors of the run (3.1)."""
        schema = document(self.named("schema", digest), SCHEMA, MAX_SCHEMA)
        tensors = [Tensor(row) for row in schema["tensors"]]
        need(len(tensors) <= 2**21 and sum(t.num_tiles for t in tensors) <= 2**26, "number of tensors and tiles")
        names = [name for t in tensors for name in (t.name, *t.aliases)]
        need(schema["run"] == self.run and len(names) == len(set(names)), "run and names of the schema")
        return tensors

    def read(self) -> dict[int, dict[str, bytes]]:
        """Every version of the chain."""
        out: dict[int, dict[str, bytes]] = {}
        path = self.sink / ".heads" / f"{self.run}.head"
        if not path.exists():
            return out
        head = document(fetch(path), HEAD, MAX_HEAD)
        need(head["run"] == self.run, "run of the head")
        need((head["version"] == -1) == (not head["digest"]), "digest of the head")
        if head["version"] == -1:
            return out
        chain = [self.manifest(head["version"], head["digest"], head["epoch"])]
        while (body := chain[-1][1])["what"] == "delta":
            chain.append(self.manifest(body["base_version"], body["base_digest"]))
        tensors = self.schema(body["schema_digest"])
        table, words = bytearray(self.named("state", body["state_table"])), list(self.start(body, tensors))
        need(body["root"] == body["state_table"] and len(table) == 16 * len(tensors), "table of state digests")
        for folder, body in reversed(chain):
            need(body["schema_digest"] == chain[-1][1]["schema_digest"], "one schema in a chain")
            self.apply(folder, body, tensors, words)
            for k, i in enumerate(np.frombuffer(body["touched_ids"], "<u4").tolist()):
                table[16 * i : 16 * i + 16] = body["new_states"][16 * k : 16 * k + 16]
            need(content(1, table) == body["root"], "root")
            if not out:
                need(b"".join(map(Tensor.state, tensors, words)) == table, "state digests of the start")
            out[body["version"]] = {t.name: x.tobytes() for t, x in zip(tensors, words, strict=True)}
        return out


def read_run(
    sink_dir: Path, run: str, key: bytes | None = None, base: dict[str, np.ndarray] | None = None
) -> dict[int, dict[str, bytes]]:
    """Read every version that the head of a run reaches.

    Args:
        sink_dir: Directory of the sink.
        run: Name of the run.
        key: Shared key; with it every manifest must be signed.
        base: Tensors that no object holds: all of a checkpoint, and frozen ones.

    Returns:
        Canonical bytes of every tensor by version and canonical name; empty while nothing is published.

    Raises:
        Refused: Something is missing or breaks a rule of the format.
    """
    return Reader(sink_dir, run, key, base or {}).read()
