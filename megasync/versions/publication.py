"""Reading publications: head, manifest, schema, frames, each checked before it is believed.

Used by the receiver's fetch, by a trainer's start and by the tools. Writing is in ``versions.head`` and ``trainer.publish_head``. Must not
import trainer or receiver.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.registry import codec_by_id
from megasync.digest import XXH3_128, content_digest
from megasync.errors import (
    FormatError,
    MegasyncError,
    MissingPackageError,
    NeedsAnchorError,
    RefetchError,
    RetryError,
    SchemaMismatchError,
)
from megasync.frames import FrameRecord
from megasync.manifest import (
    Head,
    Manifest,
    algorithm_of,
    decode_head,
    decode_manifest,
    manifest_key,
    named_by,
    peek_manifest,
    require_algorithm,
    root_of,
    state_table_key,
)
from megasync.schema import MAX_SCHEMA_NBYTES, Schema, decode_schema, schema_key
from megasync.sinks.base import DEFAULT_TIMEOUT_S, Sink
from megasync.types import Entries

_MANIFESTS_KEPT = 64
_EPOCH = re.compile(r"/e([0-9]{6,19})/manifest\Z")


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
    _seen: int = field(default=-1, repr=False)
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
        key = schema_key(self.run, digest)
        try:
            data = self._read(key, "schema", MAX_SCHEMA_NBYTES)
        except KeyError as e:
            raise RetryError(
                f"schema {digest.hex()} of run {self.run!r}, which a manifest names, is not in {self.sink.describe()} (key "
                f"{key}): nothing was touched. Put it back, then retry"
            ) from e
        try:
            schema = decode_schema(data, digest=digest)
        except (FormatError, RefetchError, SchemaMismatchError) as e:
            raise type(e)(f"schema of run {self.run!r} ({key}): {e}") from e
        with self._lock:
            self._schemas[digest] = schema
        return schema

    def manifest(self, version: int, epoch: int, digest: bytes | None) -> Manifest:
        """A checked manifest.

        Args:
            version: Its version.
            epoch: Its epoch.
            digest: What its digest must be; None trusts the key alone (tools that look at garbage).

        Raises:
            NeedsAnchorError: It is not in the sink.
            RefetchError, FormatError, SchemaMismatchError: It is refused.
        """
        with self._lock:
            known = self._manifests.get(digest) if digest is not None else None
        if known is not None and (known.version, known.epoch) == (version, epoch):
            return known
        key = manifest_key(self.run, version, epoch)
        what = f"manifest of version {version} epoch {epoch}"
        data = self._read_manifest(key, what)
        found = named_by(data, digest, f"{what} ({key})") if digest is not None else None
        peek = peek_manifest(data, self.key)
        if found is not None:
            require_algorithm(found, peek.digest_algorithm, what)
        manifest = decode_manifest(data, self.schema(peek.schema_digest), key=self.key, peek=peek)
        if (manifest.run, manifest.version, manifest.epoch) != (self.run, version, epoch):
            raise FormatError(
                f"manifest under key of run {self.run!r} version {version} epoch {epoch} says run {manifest.run!r} version "
                f"{manifest.version} epoch {manifest.epoch}: misplaced; nothing was touched"
            )
        for codec in np.unique(manifest.frames.columns["codec"]).tolist():
            try:
                codec_by_id(codec)
            except FormatError as e:
                raise FormatError(f"{what} refused: {e}") from e
        with self._lock:
            self._manifests[manifest.digest] = manifest
            while len(self._manifests) > _MANIFESTS_KEPT:
                self._manifests.popitem(last=False)
        return manifest

    def newest(self) -> Manifest | None:
        """The manifest that the head names, None while nothing was published.

        Raises:
            RetryError: The manifest is not in the sink (a head moves on before old versions are pruned, so the next look
                finds another), or the sink, where this reader saw a version before, has none: it was deleted, unmounted or
                begun anew.
        """
        head = self.head()
        if head is None or head.version < 0:
            if self._seen >= 0:
                raise RetryError(
                    f"run {self.run!r} was at version {self._seen} and now has {'no head' if head is None else 'no version'} "
                    f"in {self.sink.describe()}: it was deleted, unmounted, or begun anew. Bring it back, then retry; where the "
                    "run was begun anew, start this end anew too"
                )
            return None
        try:
            found = self.manifest(head.version, head.epoch, head.digest)
        except NeedsAnchorError as e:
            raise RetryError(
                f"{e}, though the head names it: the head may have moved meanwhile. Nothing was touched; retry, and put it "
                "back where it stays away"
            ) from e
        self._seen = head.version
        return found

    def base_of(self, manifest: Manifest) -> Manifest:
        """The manifest that a delta starts from.

        Its epoch is not in the delta: the newest epochs are tried first, and the digest decides. What lies there under
        another digest, or under another epoch's key than its body names, is garbage and passed over.

        Raises:
            NeedsAnchorError: It is gone (pruned): no chain leads further back.
            FormatError: It is refused itself, or of another schema than the delta.
        """
        with self._lock:
            known = self._manifests.get(manifest.base_digest)
        base = known if known is not None and known.version == manifest.base_version else self._find_base(manifest)
        if base.schema_digest != manifest.schema_digest:
            raise FormatError(
                f"version {manifest.version} of run {self.run!r} speaks of schema {manifest.schema_digest.hex()}, its base "
                f"{base.version} of {base.schema_digest.hex()}: a delta keeps its base's schema; nothing was touched"
            )
        return base

    def _find_base(self, manifest: Manifest) -> Manifest:
        lacking: MissingPackageError | None = None
        others: dict[str, str] = {}
        prefix = f"{self.run}/v{manifest.base_version:012d}"
        for key in sorted(self.sink.keys(prefix, timeout_s=self.timeout_s), reverse=True):
            found = _EPOCH.search(key)
            if found is None or key != manifest_key(self.run, manifest.base_version, int(found[1])):
                continue
            data = self._read_manifest(key, f"manifest of version {manifest.base_version}")
            try:
                if not algorithm_of(data, manifest.base_digest):
                    others[key] = content_digest(data).hex()
                    continue
            except MissingPackageError as e:
                lacking = e  # the base may still lie under another epoch
                continue
            if peek_manifest(data, self.key).epoch == int(found[1]):
                return self.manifest(manifest.base_version, int(found[1]), manifest.base_digest)
        if lacking is not None:
            raise lacking
        raise NeedsAnchorError(
            f"version {manifest.version} of run {self.run!r} starts from version {manifest.base_version} "
            f"(manifest {manifest.base_digest.hex()}), which is no longer in {self.sink.describe()}"
            + (
                f" (what lies at {', '.join(others)} has another digest, {', '.join(others.values())} (xxh3-128): another "
                "epoch's, or damaged)"
                if others
                else ""
            )
            + f": put it back from a copy of the sink, to a key that begins with {prefix}/, or load an anchor where the run has a "
            "later one; a publisher can go on under another run name"
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
            RefetchError, FormatError: Other bytes, a table that does not have the manifest's root, or rows that are not
                the new state digests of an anchor.
            RetryError, NeedsAnchorError: It is not in the sink; see ``missing``.
        """
        key = state_table_key(self.run, manifest.state_table)
        try:
            data = self._read(key, "table of state digests")
        except KeyError as e:
            raise self.missing(manifest, key, "table of state digests") from e
        if content_digest(data, XXH3_128) != manifest.state_table:
            raise RefetchError(
                f"table of state digests of version {manifest.version} has other bytes ({key}); fetch it again, and put the right one back where it stays so"
            )
        table = np.frombuffer(data, np.uint8)
        if table.size != 16 * len(self.schema(manifest.schema_digest).tensors):
            raise FormatError(f"table of state digests of version {manifest.version} has {table.size} bytes")
        table = table.reshape(-1, 16)
        if root_of(table) != manifest.root:
            raise FormatError(f"table of state digests of version {manifest.version} does not have the manifest's root")
        if not np.array_equal(table[manifest.touched_ids], manifest.new_states):
            raise FormatError(
                f"version {manifest.version}: new state digests are not the rows of its table of state digests; nothing "
                "was touched. Report the publisher, use another anchor"
            )
        return table

    def frame_bytes(self, manifest: Manifest, record: FrameRecord) -> memoryview:
        """Stored bytes of a frame, digest checked.

        Raises:
            RefetchError: Other bytes, or fewer.
            RetryError, NeedsAnchorError: The payload is not in the sink; see ``missing``.
        """
        key = manifest.payload_key(record.payload)
        out = memoryview(bytearray(record.nbytes))
        try:
            self.sink.read_into(key, record.offset, out, timeout_s=self.timeout_s)
        except KeyError as e:
            raise self.missing(manifest, key, "payload") from e
        check_frame(manifest, record, out)
        return out

    def missing(self, manifest: Manifest, key: str, what: str) -> MegasyncError:
        """The error for an object of a publication that is not in the sink; the caller raises it.

        While the publication's manifest is there, a head or a later version still leads to it and the object may come
        back: that is a RetryError. Without its manifest it was pruned: that is a NeedsAnchorError.

        Args:
            manifest: Of the publication.
            key: The object.
            what: What it is, for the message.

        Raises:
            RetryError: The sink does not answer.
        """
        where = f"{what} of version {manifest.version} of run {self.run!r} is not in {self.sink.describe()} (key {key})"
        try:
            self.sink.size(manifest_key(self.run, manifest.version, manifest.epoch), timeout_s=self.timeout_s)
        except KeyError:
            return NeedsAnchorError(f"{where}: the version was pruned; nothing was touched. Load an anchor")
        return RetryError(
            f"{where}, though its manifest is: the publication is incomplete, nothing was touched. Put it back, then retry"
        )

    def entries(self, manifest: Manifest) -> Iterator[tuple[FrameRecord, Entries]]:
        """Every frame of a publication, fetched, checked and decoded one after the other."""
        schema = self.schema(manifest.schema_digest)
        for i in range(len(manifest.frames)):
            record = manifest.frames.record(i)
            yield record, decode_frame(schema, manifest, record, self.frame_bytes(manifest, record))

    def _read_manifest(self, key: str, what: str) -> bytes:
        try:
            return self._read(key, what)
        except KeyError as e:
            raise NeedsAnchorError(
                f"{what} of run {self.run!r} is not in {self.sink.describe()} (key {key}): pruned or never written"
            ) from e

    def _read(self, key: str, what: str, max_nbytes: int | None = None) -> bytes:
        """An object; where a limit is given, its size is asked first, so that nothing larger comes into memory.

        A schema is read once a run. Manifests are read for every version, and have their limit checked once they are
        here: to ask first would cost every update a round trip.

        Raises:
            KeyError: No such object.
        """
        if max_nbytes is not None and (nbytes := self.sink.size(key, timeout_s=self.timeout_s)) > max_nbytes:
            raise FormatError(f"{what} of run {self.run!r} has {nbytes} bytes (key {key}), at most {max_nbytes}")
        return self.sink.read(key, timeout_s=self.timeout_s)


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
