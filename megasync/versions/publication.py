"""Reading publications: head, manifest, schema, frames, each checked before it is believed.

Used by the receiver's fetch, by fold and by the tools. Writing is in ``versions.head`` and ``trainer.publish``. Must not
import trainer or receiver.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.registry import codec_by_id
from megasync.digest import SHA256, XXH3_128, content_digest
from megasync.errors import FormatError, NeedsAnchorError, RefetchError
from megasync.frames import FrameRecord
from megasync.manifest import (
    DIGEST_NBYTES,
    Head,
    Manifest,
    decode_head,
    decode_manifest,
    manifest_key,
    peek_digest_algorithm,
    peek_schema_digest,
    root_of,
    state_table_key,
)
from megasync.schema import Schema, decode_schema, schema_key
from megasync.sinks.base import DEFAULT_TIMEOUT_S, Sink
from megasync.types import Entries

_MANIFESTS_KEPT = 64


@dataclass
class PublicationReader:
    """Reads one run of a sink; remembers its schema and newest manifests. Thread-safe.

    Attributes:
        sink: Where.
        run: Which run.
        key: Shared key of signed manifests; None accepts unsigned ones.
        timeout_s: Longest wait for each sink operation.
    """

    sink: Sink
    run: str
    key: bytes | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    _schemas: dict[bytes, Schema] = field(default_factory=dict, repr=False)
    _manifests: OrderedDict[bytes, Manifest] = field(default_factory=OrderedDict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def head(self) -> Head | None:
        """The run's head, None where nobody ever published.

        Raises:
            FormatError: Unparsable; the caller keeps the version it has.
        """
        data = self.sink.read_head(self.run, timeout_s=self.timeout_s)
        return None if data is None else decode_head(data, self.run)

    def schema(self, digest: bytes) -> Schema:
        """A schema of the run by digest."""
        with self._lock:
            if digest in self._schemas:
                return self._schemas[digest]
        data = self._read(schema_key(self.run, digest), "schema")
        schema = decode_schema(data, digest=digest)
        with self._lock:
            self._schemas[digest] = schema
        return schema

    def manifest(self, version: int, epoch: int, digest: bytes | None) -> Manifest:
        """A checked manifest.

        Args:
            version: Its version.
            epoch: Its epoch.
            digest: What its digest must be; None trusts the key alone (tools that look at garbage).
        """
        with self._lock:
            if digest is not None and digest in self._manifests:
                return self._manifests[digest]
        data = self._read(manifest_key(self.run, version, epoch), f"manifest of version {version}")
        if digest is not None and not _names(digest, data):
            raise RefetchError(
                f"manifest of version {version} epoch {epoch}: digest {content_digest(data).hex()}, "
                f"expected {digest.hex()}; fetch it again"
            )
        manifest = decode_manifest(data, self.schema(peek_schema_digest(data)), digest=digest, key=self.key)
        if (manifest.run, manifest.version, manifest.epoch) != (self.run, version, epoch):
            raise FormatError(
                f"manifest under key of run {self.run!r} version {version} epoch {epoch} says run {manifest.run!r} version "
                f"{manifest.version} epoch {manifest.epoch}: misplaced; nothing was touched"
            )
        with self._lock:
            self._manifests[manifest.digest] = manifest
            while len(self._manifests) > _MANIFESTS_KEPT:
                self._manifests.popitem(last=False)
        return manifest

    def newest(self) -> Manifest | None:
        """The manifest that the head names, None while nothing was published."""
        head = self.head()
        return None if head is None or head.version < 0 else self.manifest(head.version, head.epoch, head.digest)

    def base_of(self, manifest: Manifest) -> Manifest:
        """The manifest that a delta starts from.

        Its epoch is not in the delta: the newest epochs are tried first, and the digest decides.

        Raises:
            NeedsAnchorError: It is gone (pruned): no chain leads further back.
        """
        with self._lock:
            if manifest.base_digest in self._manifests:
                return self._manifests[manifest.base_digest]
        prefix = f"{self.run}/v{manifest.base_version:012d}"
        for key in sorted(self.sink.keys(prefix, timeout_s=self.timeout_s), reverse=True):
            parts = key.split("/")
            if parts[-1] != "manifest":
                continue
            data = self._read(key, f"manifest of version {manifest.base_version}")
            if _names(manifest.base_digest, data):
                return self.manifest(manifest.base_version, int(parts[-2][1:]), manifest.base_digest)
        raise NeedsAnchorError(
            f"version {manifest.version} of run {self.run!r} starts from version {manifest.base_version} "
            f"(manifest {manifest.base_digest.hex()}), which is no longer in {self.sink.describe()}: load an anchor"
        )

    def chain(self, newest: Manifest, base_version: int = -1) -> list[Manifest]:
        """Manifests from the one after ``base_version`` (or from the last anchor) to ``newest``, oldest first.

        Raises:
            NeedsAnchorError: The chain is broken before it reaches ``base_version`` or an anchor.
        """
        out = [newest]
        while out[-1].what == "delta" and out[-1].base_version > base_version:
            out.append(self.base_of(out[-1]))
        return out[::-1]

    def state_table(self, manifest: Manifest) -> np.ndarray:
        """Table of state digests (uint8 ``[num_tensors, 16]``) that an anchor or checkpoint publishes.

        Raises:
            RefetchError, FormatError: Other bytes, or a table that does not have the manifest's root.
        """
        data = self._read(state_table_key(self.run, manifest.state_table), "table of state digests")
        if content_digest(data, XXH3_128) != manifest.state_table:
            raise RefetchError(f"table of state digests of version {manifest.version} has other bytes; fetch it again")
        table = np.frombuffer(data, np.uint8)
        if table.size != 16 * len(self.schema(manifest.schema_digest).tensors):
            raise FormatError(f"table of state digests of version {manifest.version} has {table.size} bytes")
        table = table.reshape(-1, 16)
        if root_of(table) != manifest.root:
            raise FormatError(f"table of state digests of version {manifest.version} does not have the manifest's root")
        return table

    def frame_bytes(self, manifest: Manifest, record: FrameRecord) -> memoryview:
        """Stored bytes of a frame, digest checked."""
        key = manifest.payload_key(record.payload)
        out = memoryview(bytearray(record.nbytes))
        self.sink.read_into(key, record.offset, out, timeout_s=self.timeout_s)
        check_frame(manifest, record, out)
        return out

    def entries(self, manifest: Manifest) -> Iterator[tuple[FrameRecord, Entries]]:
        """Every frame of a publication, fetched, checked and decoded one after the other."""
        schema = self.schema(manifest.schema_digest)
        for i in range(len(manifest.frames)):
            record = manifest.frames.record(i)
            yield record, decode_frame(schema, manifest, record, self.frame_bytes(manifest, record))

    def _read(self, key: str, what: str) -> bytes:
        try:
            return self.sink.read(key, timeout_s=self.timeout_s)
        except KeyError as e:
            raise NeedsAnchorError(
                f"{what} of run {self.run!r} is not in {self.sink.describe()} (key {key}): pruned or never written"
            ) from e


def _names(digest: bytes, data: bytes) -> bool:
    """Whether a digest is that of a manifest's bytes, by the algorithm that the manifest names.

    Of another length than xxh3-128's it is SHA-256 or what the manifest says; bytes that say nothing have another digest.
    """
    if len(digest) == DIGEST_NBYTES[XXH3_128]:
        return content_digest(data) == digest
    if content_digest(data, SHA256) == digest:
        return True
    try:
        algorithm = peek_digest_algorithm(data)
    except FormatError:
        return False
    return algorithm != SHA256 and content_digest(data, algorithm) == digest


def check_frame(manifest: Manifest, record: FrameRecord, stored: memoryview) -> None:
    """Compare a frame's bytes with its digest.

    Raises:
        RefetchError: Naming version, payload and offset.
    """
    found = content_digest(stored, manifest.digest_algorithm)
    if found != record.digest:
        raise RefetchError(
            f"frame at {record.offset} of {manifest.payload_key(record.payload)} (version {manifest.version}): digest "
            f"{found.hex()}, expected {record.digest.hex()}; drop the cached copy and fetch it again"
        )


def decode_frame(schema: Schema, manifest: Manifest, record: FrameRecord, stored: memoryview) -> Entries:
    """Entries of a frame whose digest was checked.

    Raises:
        FormatError: With version, payload and offset before the codec's own words.
    """
    shape = FrameShape(
        record.word_nbytes,
        record.tensor_ids,
        record.tiles,
        schema.tile_words(record.tensor_ids, record.tiles),
        record.num_changed,
    )
    try:
        return codec_by_id(record.codec).decode(shape, stored, record.plane_nbytes)
    except FormatError as e:
        raise FormatError(
            f"version {manifest.version}, frame at {record.offset} of {manifest.payload_key(record.payload)}: {e}"
        ) from e
