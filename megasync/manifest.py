"""The manifest and head documents: what a publication is, and which one is newest.

Strict msgpack through msgspec. Written by the publisher after the payloads are durable; read first by every receiver.
Keys are derived from run, version, epoch and index, never taken from the wire, so no document can name a path.
Must import nothing above schema and frames.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from megasync.digest import BLAKE3, SHA256, XXH3_128, content_digest
from megasync.documents import RUN_NAME as _RUN
from megasync.documents import Stamp, decode_map
from megasync.errors import FormatError, MissingPackageError, RefetchError, SchemaMismatchError
from megasync.frames import ANCHOR_CODEC, FrameColumns, FrameTable, make_table, read_table
from megasync.schema import FORMAT, Schema

KIND = "megasync.manifest"
HEAD_KIND = "megasync.head"
_STAMP, _HEAD_STAMP = Stamp(KIND, FORMAT), Stamp(HEAD_KIND, FORMAT)
Kind = Literal["delta", "anchor", "checkpoint"]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
DIGEST_NBYTES = {XXH3_128: 16, BLAKE3: 32, SHA256: 32}
SIGNATURE_NBYTES = 32
MAX_MANIFEST_NBYTES = 1 << 30
"""Some 10^7 frames; a model of 445 GB, each of its tiles in a frame of its own, takes about a tenth of it."""
MAX_PAYLOADS = 1 << 16
MAX_HEAD_NBYTES = 1 << 16
"""As in ``sinks.base``, which refuses to store more: heads are polled."""
MIN_PUBLISHER_NBYTES = 8


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    format: int
    what: Kind
    run: str
    epoch: _U63
    version: _U63
    base_version: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
    base_digest: bytes
    schema_digest: bytes
    digest_algorithm: int
    payload_nbytes: Annotated[list[_U63], msgspec.Meta(max_length=MAX_PAYLOADS)]
    frames: msgspec.Raw  # FrameColumns, read by itself so that its keys are counted too
    touched_ids: memoryview  # columns are megabytes: looked at where they came in, not copied
    new_states: memoryview
    touched_olds: memoryview
    root: bytes
    state_table: bytes
    num_changed: _U63
    outer: str
    formulas: list[str]
    info: dict[str, str | int | float]


class _Signed(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    body: memoryview
    signature: bytes


@dataclass(frozen=True)
class Manifest:
    """What describes a publication.

    Attributes:
        what: ``delta`` (needs its base), ``anchor`` (full bytes, needs none) or ``checkpoint`` (no payloads: names an
            existing checkpoint by its state digests; version 0 only).
        run: Name of the run.
        epoch: Fencing epoch of the publisher that wrote it.
        version: Version that it leads to.
        base_version: Version that it starts from, -1 for anchors and checkpoints.
        base_digest: Manifest digest of the base, empty for anchors and checkpoints.
        schema_digest: Schema that its ids mean.
        payload_nbytes: Size of each payload.
        frames: The frame table.
        touched_ids: u32 ``[K]``, tensors with changed words, ascending.
        new_states: uint8 ``[K, 16]``, their state digest at ``version``.
        touched_olds: uint8 ``[K, 16]``, digest sums of their old values at the changed words (zero in anchors).
        root: xxh3-128 over the table of state digests at ``version``.
        state_table: Digest of the published table of state digests; empty in deltas.
        num_changed: Changed words over all frames; 0 is explicit.
        outer: Library, version and level of the outer codec.
        formulas: Quantisation formula ids in use.
        info: Facts for people and metrics (density, seconds, step); nothing is decided by them.
        digest_algorithm: Of frames and of this manifest.
    """

    what: Kind
    run: str
    epoch: int
    version: int
    base_version: int
    base_digest: bytes
    schema_digest: bytes
    payload_nbytes: tuple[int, ...]
    frames: FrameTable
    touched_ids: np.ndarray
    new_states: np.ndarray
    touched_olds: np.ndarray
    root: bytes
    num_changed: int
    state_table: bytes = b""
    outer: str = ""
    formulas: tuple[str, ...] = ()
    info: dict[str, str | int | float] = field(default_factory=dict)
    digest_algorithm: int = XXH3_128
    key: bytes | None = field(default=None, repr=False, compare=False)

    @cached_property
    def encoded(self) -> bytes:
        """The document's bytes; signed with HMAC-SHA256 where a key was given.

        Raises:
            FormatError: More bytes than any reader takes.
        """
        body = msgspec.msgpack.encode(
            _Document(
                KIND,
                FORMAT,
                self.what,
                self.run,
                self.epoch,
                self.version,
                self.base_version,
                self.base_digest,
                self.schema_digest,
                self.digest_algorithm,
                list(self.payload_nbytes),
                msgspec.Raw(msgspec.msgpack.encode(self.frames.to_columns())),
                memoryview(self.touched_ids.astype("<u4").tobytes()),
                memoryview(self.new_states.tobytes()),
                memoryview(self.touched_olds.tobytes()),
                self.root,
                self.state_table,
                self.num_changed,
                self.outer,
                list(self.formulas),
                self.info,
            )
        )
        signature = hmac.digest(self.key, body, "sha256") if self.key else b""
        data = msgspec.msgpack.encode(_Signed(memoryview(body), signature))
        if len(data) > MAX_MANIFEST_NBYTES:
            raise FormatError(
                f"manifest of version {self.version} has {len(data)} bytes for {len(self.frames)} frames, at most "
                f"{MAX_MANIFEST_NBYTES}: publish fewer, longer frames (a dense codec, or an anchor)"
            )
        return data

    @cached_property
    def digest(self) -> bytes:
        """Digest of the encoded document, by which heads and later manifests name it."""
        return content_digest(self.encoded, self.digest_algorithm)

    @property
    def is_signed(self) -> bool:
        """Whether its document carries a signature, known to be right or not."""
        return bool(msgspec.msgpack.decode(self.encoded, type=_Signed).signature)

    @property
    def payload_total_nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self.payload_nbytes)

    def payload_key(self, index: int) -> str:
        """Sink key of a payload."""
        return payload_key(self.run, self.version, self.epoch, index)


def check_run(run: str) -> str:
    """Refuse run names that could not be part of a key.

    Raises:
        ValueError: With the rule.
    """
    if not _RUN.match(run):
        raise ValueError(f"run name {run!r}: letters, digits and ._=- only, not starting with . = or -, 100 at most")
    return run


def payload_key(run: str, version: int, epoch: int, index: int) -> str:
    """Sink key of payload ``index`` of a publication."""
    return f"{run}/v{version:012d}/e{epoch:06d}/payload-{index:05d}"


def manifest_key(run: str, version: int, epoch: int) -> str:
    """Sink key of a manifest: (version, epoch)."""
    return f"{run}/v{version:012d}/e{epoch:06d}/manifest"


def state_table_key(run: str, digest: bytes) -> str:
    """Sink key of a table of state digests."""
    return f"{run}/state/{digest.hex()}"


def root_of(states: np.ndarray) -> bytes:
    """Root of a table of state digests (uint8 ``[num_tensors, 16]``, id order)."""
    return content_digest(np.ascontiguousarray(states).reshape(-1).view(np.uint8).data, XXH3_128)


def decode_manifest(
    data: bytes | memoryview,
    schema: Schema,
    *,
    digest: bytes | None = None,
    key: bytes | None = None,
    peek: Peek | None = None,
) -> Manifest:
    """Read and check a manifest.

    Args:
        data: The stored bytes.
        schema: The schema it must speak of.
        digest: What its digest must be (from the head or a later manifest).
        key: Shared key; where given, an unsigned or wrongly signed manifest is refused.
        peek: What ``peek_manifest`` gave for the same bytes and key, so that they are not taken apart a second time.

    Raises:
        RefetchError: Other digest. FormatError: rules broken. SchemaMismatchError: another schema or run.
    """
    document, signed = peek.opened if peek is not None else _open(data, key)
    if digest is not None:
        what = f"manifest of version {document.version}"
        require_algorithm(named_by(data, digest, what), document.digest_algorithm, what)
    if document.schema_digest != schema.digest or document.run != schema.run:
        raise SchemaMismatchError(
            f"manifest of version {document.version} is of run {document.run!r} schema {document.schema_digest.hex()}, "
            f"here run {schema.run!r} schema {schema.digest.hex()}: not this model; nothing was touched"
        )
    columns = decode_map(document.frames, FrameColumns, "frame table", MAX_MANIFEST_NBYTES)
    frames = read_table(columns, schema, document.payload_nbytes, DIGEST_NBYTES[document.digest_algorithm])
    ids = np.frombuffer(document.touched_ids, "<u4") if len(document.touched_ids) % 4 == 0 else np.empty(0, "<u4")
    if len(document.touched_ids) % 4 or not len(document.new_states) == len(document.touched_olds) == 16 * len(ids):
        raise FormatError(f"manifest of version {document.version}: columns of touched tensors differ in length")
    if len(ids) and ((ids[1:] <= ids[:-1]).any() or int(ids[-1]) >= len(schema.tensors)):
        raise FormatError(f"manifest of version {document.version}: touched tensor ids must ascend inside the schema")
    manifest = Manifest(
        document.what,
        document.run,
        document.epoch,
        document.version,
        document.base_version,
        document.base_digest,
        document.schema_digest,
        tuple(document.payload_nbytes),
        frames,
        ids,
        np.frombuffer(document.new_states, np.uint8).reshape(-1, 16),
        np.frombuffer(document.touched_olds, np.uint8).reshape(-1, 16),
        document.root,
        document.num_changed,
        document.state_table,
        document.outer,
        tuple(document.formulas),
        document.info,
        document.digest_algorithm,
        key if signed else None,
    )
    _check(manifest)
    # The stored bytes are the document, whoever wrote them: encoded again, a signature made with a key that is not known
    # here would be lost, and with it the digest by which heads and deltas name this manifest.
    manifest.__dict__["encoded"] = bytes(data)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Refuse to write what a reader would refuse: by the reader's own rules, all but those that need the schema.

    Raises:
        FormatError: With the rule.
    """
    _open(manifest.encoded, manifest.key or None)
    _check(manifest)


class Peek(NamedTuple):
    """What is needed of a manifest before it can be checked.

    Attributes:
        schema_digest: To fetch the schema by.
        digest_algorithm: What its own digest must be of.
        epoch: What its key must say.
        opened: The whole, as it came.
    """

    schema_digest: bytes
    digest_algorithm: int
    epoch: int
    opened: tuple[_Document, bool]


def peek_manifest(data: bytes | memoryview, key: bytes | None = None) -> Peek:
    """Look into a manifest that is not checked yet.

    Args:
        data: The stored bytes.
        key: Shared key; where given, the signature is checked first.

    Raises:
        FormatError: It is no manifest, or not signed with the key.
    """
    document, signed = _open(data, key)
    return Peek(document.schema_digest, document.digest_algorithm, document.epoch, (document, signed))


def algorithm_of(data: bytes | memoryview, digest: bytes) -> int:
    """The algorithm by which stored bytes have a manifest's digest, 0 where by none.

    The length tells xxh3-128 from the others; BLAKE3 is tried where SHA-256 gives another one.

    Raises:
        MissingPackageError: It may be BLAKE3, the manifest says that it is, and the package is not installed.
    """
    if len(digest) == DIGEST_NBYTES[XXH3_128]:
        return XXH3_128 if content_digest(data) == digest else 0
    if len(digest) != DIGEST_NBYTES[SHA256]:
        return 0
    if content_digest(data, SHA256) == digest:
        return SHA256
    try:
        return BLAKE3 if content_digest(data, BLAKE3) == digest else 0
    except MissingPackageError:
        # Only bytes that ask for the package are worth the message; all others have another digest.
        try:
            asked = peek_manifest(data).digest_algorithm == BLAKE3
        except FormatError:
            asked = False
        if asked:
            raise
        return 0


def named_by(data: bytes | memoryview, digest: bytes, what: str) -> int:
    """The algorithm by which a manifest's bytes have their digest.

    Args:
        data: The stored bytes; nothing of them is believed.
        digest: What their digest must be.
        what: The manifest, for the message.

    Raises:
        RefetchError: They have another digest.
        MissingPackageError: See ``algorithm_of``.
    """
    found = algorithm_of(data, digest)
    if not found:
        raise RefetchError(
            f"{what}: digest {content_digest(data).hex()} (xxh3-128), expected {digest.hex()}; fetch it again, and put the right one back from "
            "a copy of the sink where it stays so"
        )
    return found


def require_algorithm(found: int, named: int, what: str) -> None:
    """Refuse a manifest whose digest is right, but by another algorithm than its body names.

    Raises:
        FormatError: With both.
    """
    if found != named:
        raise FormatError(f"{what} has its digest by algorithm {found} and names algorithm {named}: it is not read")


def _open(data: bytes | memoryview, key: bytes | None) -> tuple[_Document, bool]:
    signed = decode_map(data, _Signed, "manifest", MAX_MANIFEST_NBYTES, _STAMP)
    if key is not None and not hmac.compare_digest(hmac.digest(key, signed.body, "sha256"), signed.signature):
        raise FormatError("manifest signature is missing or wrong: not from this run's publisher; it is not read")
    if len(signed.signature) not in (0, SIGNATURE_NBYTES):
        raise FormatError(f"manifest has a signature of {len(signed.signature)} bytes, expected {SIGNATURE_NBYTES}")
    document = decode_map(signed.body, _Document, "manifest", MAX_MANIFEST_NBYTES, _STAMP)
    _STAMP.check(document.kind, document.format, "manifest")
    if key is not None and document.digest_algorithm == XXH3_128:
        raise FormatError("a signed manifest names its frames by xxh3-128, which anybody can match: it is not read")
    if len(document.schema_digest) != 16:
        raise FormatError(f"manifest names its schema by {len(document.schema_digest)} bytes, expected 16")
    if document.digest_algorithm not in DIGEST_NBYTES:
        raise FormatError(f"manifest has digest algorithm {document.digest_algorithm}, known: {sorted(DIGEST_NBYTES)}")
    return document, bool(signed.signature)


def _check(m: Manifest) -> None:
    """Rules that tie the fields together."""
    where = f"manifest of version {m.version}"
    if m.what == "delta" and not (0 <= m.base_version < m.version and m.base_digest):
        raise FormatError(f"{where}: a delta with base version {m.base_version}")
    if m.what == "delta" and len(m.base_digest) not in DIGEST_NBYTES.values():
        raise FormatError(f"{where}: its base is named by {len(m.base_digest)} bytes, expected 16 or 32")
    if m.what == "delta" and m.payload_nbytes and not len(m.frames):
        raise FormatError(f"{where}: a delta without frames lists {len(m.payload_nbytes)} payloads: metadata was lost")
    if m.what == "delta" and m.state_table:
        raise FormatError(f"{where}: a delta has no table of state digests")
    if m.what != "delta" and (m.base_version != -1 or m.base_digest or not m.state_table):
        raise FormatError(f"{where}: an {m.what} has no base and must name a table of state digests")
    if m.what == "checkpoint" and (m.payload_nbytes or len(m.frames) or len(m.touched_ids)):
        raise FormatError(f"{where}: a checkpoint has no payloads")
    if m.what == "checkpoint" and m.version:
        raise FormatError(f"{where}: only version 0 may be a checkpoint; later versions start from something published")
    if m.what == "anchor" and m.touched_olds.any():
        raise FormatError(f"{where}: an anchor has touched-old digests; it changes nothing old, all of them must be 0")
    full = m.frames.columns["codec"] == ANCHOR_CODEC
    if full.any() if m.what == "delta" else not full.all():
        raise FormatError(f"{where}: an anchor has full bytes in every frame, a delta in none")
    if m.state_table and len(m.state_table) != 16:
        raise FormatError(f"{where}: the table of state digests is named by {len(m.state_table)} bytes, expected 16")
    if len(m.root) != 16:
        raise FormatError(f"{where}: root has {len(m.root)} bytes, expected 16")
    if m.num_changed != int(m.frames.columns["num_changed"].sum(dtype=np.int64)):
        raise FormatError(f"{where}: {m.num_changed} changed words, its frames hold another number: metadata was lost")
    if not np.array_equal(_distinct(m.frames.runs["tensor_id"]), m.touched_ids):
        raise FormatError(f"{where}: touched tensors and frames disagree: metadata was lost")


def _distinct(ids: np.ndarray) -> np.ndarray:
    """Ids that occur, ascending: what ``np.unique`` gives, by marks instead of sorting, a manifest's length of time."""
    seen = np.zeros(int(ids.max()) + 1 if len(ids) else 0, dtype=bool)
    seen[ids] = True
    return np.flatnonzero(seen)


class _Head(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    format: int
    run: str
    version: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
    epoch: _U63
    digest: bytes
    fence: _U63
    publisher: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The pointer to the newest complete publication of a run.

    Attributes:
        run: Name of the run.
        version: Newest version, -1 while nothing was published.
        epoch: Epoch of that version's manifest.
        digest: Digest of that manifest, empty while nothing was published.
        fence: Epoch of the publisher that may move the head now.
        publisher: Random token of that publisher, so that it knows its own writes after a lost answer.
    """

    run: str
    version: int
    epoch: int
    digest: bytes
    fence: int
    publisher: bytes = b""

    def encode(self) -> bytes:
        """The document's bytes."""
        return msgspec.msgpack.encode(
            _Head(HEAD_KIND, FORMAT, self.run, self.version, self.epoch, self.digest, self.fence, self.publisher)
        )


def decode_head(data: bytes, run: str) -> Head:
    """Read a head.

    Raises:
        FormatError: Unparsable, truncated or of another run: keep the current version, report it, never fall back.
    """
    try:
        what = f"head of run {run!r} ({len(data)} bytes)"
        h = decode_map(data, _Head, what, MAX_HEAD_NBYTES, _HEAD_STAMP)
        _HEAD_STAMP.check(h.kind, h.format, what)
    except FormatError as e:
        raise FormatError(
            f"{e}; the version held is kept. A head that stays so is damaged: put it back from a copy of the sink"
        ) from e
    if h.run != run:
        raise FormatError(f"head of run {run!r} is of run {h.run!r:.120}; the version held is kept")
    if (h.version >= 0) != bool(h.digest):
        raise FormatError(f"head of run {run!r}: version {h.version} with a digest of {len(h.digest)} bytes")
    if h.digest and len(h.digest) not in DIGEST_NBYTES.values():
        raise FormatError(f"head of run {run!r}: a digest of {len(h.digest)} bytes, expected 16 or 32")
    if len(h.publisher) < MIN_PUBLISHER_NBYTES:
        raise FormatError(f"head of run {run!r}: a publisher token of {len(h.publisher)} bytes, at least 8")
    return Head(h.run, h.version, h.epoch, h.digest, h.fence, h.publisher)


def empty_table() -> FrameTable:
    """A frame table without frames."""
    return make_table([])


def rows_of(digests: Sequence[bytes]) -> np.ndarray:
    """16-byte digests as uint8 ``[K, 16]``."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
