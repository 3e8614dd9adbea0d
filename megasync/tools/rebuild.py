"""``megasync apply``: rebuild a checkpoint of any version, streamed frame by frame.

The base's bytes are copied once; each frame's words are then read from the copy, XORed and written back, in pieces. Nothing
is mapped for writing: where a disk is full a map ends the process, a write says so. The result appears under its name only
when every digest was compared. Memory is bounded by one frame.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasync.digest import state_digest
from megasync.errors import BaseMismatchError, FormatError, NeedsAnchorError, RetryError, SchemaMismatchError
from megasync.manifest import Manifest
from megasync.schema import Schema, runs_of_equal
from megasync.sinks.base import Sink
from megasync.tools.copying import copy, listing_of, made_whole
from megasync.tools.diff import root_of_sums, state_sums
from megasync.types import WORD_DTYPES, Entries, Lanes
from megasync.versions.checkpoint import Checkpoint, StoredTensor, checkpoint_files, read_header
from megasync.versions.inventory import lost_head
from megasync.versions.publication import PublicationReader

_PIECE_NBYTES = 4 << 20
_GAP_NBYTES = 4096
"""Words that are further apart are read and written on their own: what lies between them may be a hole."""


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """What was rebuilt.

    Attributes:
        run: Run.
        version: Version of the new checkpoint.
        base_version: Version that the base was found to be; -1 where an anchor replaced it.
        num_applied: Publications applied.
        payload_nbytes: Bytes of their payloads.
        root: Root digest of the result, compared with the manifest.
    """

    run: str
    version: int
    base_version: int
    num_applied: int
    payload_nbytes: int
    root: str


def rebuild(
    base_dir: Path, sink: Sink, out_dir: Path, *, run: str = "run", version: int | None = None, key: bytes | None = None
) -> RebuildResult:
    """Rebuild the checkpoint of a version.

    Args:
        base_dir: A checkpoint of the wanted version or an earlier one; where the run starts with an anchor, any checkpoint of
            its tensors. Its other files (configuration, tokenizer) are copied along.
        sink: Where the run is.
        out_dir: New directory; must not exist.
        run: Name of the run.
        version: Wanted version; the head's by default.
        key: Shared key of signed manifests.

    Raises:
        BaseMismatchError: The base is no version of the run or a later one than is wanted, and there is no anchor.
        FormatError, RefetchError: The publications are damaged, or the base holds what cannot be copied; nothing appears
            under ``out_dir``.
        RetryError: An object of the run, or its head, is not in the sink, which may pass.
        FileExistsError: ``out_dir`` exists.
    """
    if out_dir.exists() or out_dir.is_symlink():
        raise FileExistsError(f"{out_dir} exists: give a new directory for --out")
    reader = PublicationReader(sink, run, key)
    manifests, later = _chain(reader, run, version)
    wanted = manifests[-1]
    schema = reader.schema(wanted.schema_digest)
    with Checkpoint(base_dir) as base:
        _require_tensors(schema, base)
        start, anchored = _start_of(schema, base, manifests, later)
    applied, listing = manifests[start:], listing_of(base_dir)
    with made_whole(out_dir) as partial:
        copy(listing, partial)
        if anchored:
            _zero(partial, schema)
        writer = _Writer(partial, schema)
        for manifest in applied:
            for _, entries in reader.entries(manifest):
                writer.xor(entries)
        with Checkpoint(partial) as made:
            _compare(schema, made, wanted)
    base_version = -1 if anchored else manifests[start - 1].version
    total = sum(m.payload_total_nbytes for m in applied)
    return RebuildResult(run, wanted.version, base_version, len(applied), total, wanted.root.hex())


def _chain(reader: PublicationReader, run: str, version: int | None) -> tuple[list[Manifest], list[Manifest]]:
    """Manifests up to the wanted version, oldest first, and those after it."""
    newest = reader.newest()
    if newest is None:
        if lost := lost_head(reader.sink, run):
            raise RetryError(f"{lost}. Nothing was written")
        raise NeedsAnchorError(f"run {run!r} has no publication in {reader.sink.describe()}; check --run and --sink")
    if version is not None and not 0 <= version <= newest.version:
        raise ValueError(f"version {version} of run {run!r} does not exist: its head is at {newest.version}")
    manifests = reader.chain(newest)
    if version is None:
        return manifests, []
    upto = [m for m in manifests if m.version <= version]
    if not upto or upto[-1].version != version:
        raise ValueError(
            f"version {version} of run {run!r} is no durable version; it has {[m.version for m in manifests]}"
        )
    return upto, manifests[len(upto) :]


def _require_tensors(schema: Schema, base: Checkpoint) -> None:
    wrong = [
        f"{t.name}: {t.dtype}{list(t.shape)} in the run, "
        + (
            f"{base.tensors[t.name].dtype}{list(base.tensors[t.name].shape)} here"
            if t.name in base.tensors
            else "missing here"
        )
        for t in schema.tensors
        if t.name not in base.tensors or (base.tensors[t.name].dtype, base.tensors[t.name].shape) != (t.dtype, t.shape)
    ]
    if wrong:
        raise SchemaMismatchError(
            f"{base.path} is not this run's model, {len(wrong)} tensors differ: " + "; ".join(wrong[:10])
        )


def _start_of(schema: Schema, base: Checkpoint, manifests: list[Manifest], later: list[Manifest]) -> tuple[int, bool]:
    """Index of the first manifest to apply, and whether an anchor replaces the base."""
    root = root_of_sums(schema, state_sums(schema, base))
    for i in range(len(manifests) - 1, -1, -1):
        if manifests[i].root == root:
            return i + 1, False
    if manifests[0].what == "anchor":
        return 0, True
    beyond = [m.version for m in later if m.root == root]
    if beyond:
        raise BaseMismatchError(
            f"{base.path} is version {beyond[0]} of run {schema.run!r}, version {manifests[-1].version} is wanted: apply moves "
            f"forward only; give a checkpoint of version {manifests[-1].version} or earlier. Nothing was written"
        )
    listed = ", ".join(f"{m.version}: {m.root.hex()}" for m in manifests[:8])
    raise BaseMismatchError(
        f"{base.path} has root {root.hex()}, which is no version of run {schema.run!r} ({listed}); nothing was written"
    )


def _zero(out: Path, schema: Schema) -> None:
    """Zero the run's tensors, the base of an anchor, 1 MiB at a time."""
    names = {t.name for t in schema.tensors}
    zeros = bytes(1 << 20)
    for file in checkpoint_files(out):
        tensors, _ = read_header(file)
        with file.open("r+b") as f:
            for t in tensors.values():
                f.seek(t.offset)
                for at in range(0, t.nbytes if t.name in names else 0, len(zeros)):
                    f.write(zeros[: min(len(zeros), t.nbytes - at)])


class _Writer:
    """XORs entries into safetensors files."""

    def __init__(self, out: Path, schema: Schema) -> None:
        self._schema = schema
        self._where: dict[str, StoredTensor] = {}
        for file in checkpoint_files(out):
            self._where.update(read_header(file)[0])

    def xor(self, entries: Entries) -> None:
        """XOR the entries of one frame."""
        stops = np.cumsum(entries.counts, dtype=np.int64)
        for a, b in runs_of_equal(entries.tensor_ids):
            tensor_id = int(entries.tensor_ids[a])
            span = slice(int(stops[a]) - int(entries.counts[a]), int(stops[b - 1]))
            tiles = np.repeat(entries.tiles[a:b], entries.counts[a:b])
            flat = self._schema.grids[tensor_id].flat_index(tiles, entries.positions[span])
            if not len(flat):
                continue
            t = self._where[self._schema.tensors[tensor_id].name]
            with t.file.open("r+b", buffering=0) as f:
                for at, values in _pieces(flat, entries.values[span]):
                    _xor_piece(f.fileno(), t.offset, at, values)


def _pieces(flat: np.ndarray, values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions and values in groups that lie close together, each to be read and written as one."""
    size = values.itemsize
    if (int(flat.max()) - int(flat.min())) * size <= max(_PIECE_NBYTES, 2 * values.nbytes):
        yield flat, values
        return
    order = np.argsort(flat, kind="stable")
    flat, values = flat[order], values[order]
    place = flat * size
    cuts = np.flatnonzero((np.diff(place) > _GAP_NBYTES) | (np.diff(place // _PIECE_NBYTES) != 0)) + 1
    yield from zip(np.split(flat, cuts), np.split(values, cuts), strict=True)


def _xor_piece(descriptor: int, offset: int, flat: np.ndarray, values: np.ndarray) -> None:
    """XOR words of a tensor that begins at ``offset`` of a file."""
    first = int(flat.min())
    words = np.empty(int(flat.max()) - first + 1, WORD_DTYPES[values.itemsize])
    view, start = words.view(np.uint8).data, offset + first * values.itemsize
    _whole(os.preadv, descriptor, view, start)
    words[flat - first] ^= values
    _whole(os.pwritev, descriptor, view, start)


def _whole(move: Callable[[int, list[memoryview], int], int], descriptor: int, view: memoryview, start: int) -> None:
    """Read or write all of a view, in as many calls as the system takes."""
    done = 0
    while done < len(view):
        moved = move(descriptor, [view[done:]], start + done)
        if not moved:
            raise FormatError(
                f"a file of the new checkpoint ends at byte {start + done}: it was cut meanwhile; nothing was kept"
            )
        done += moved


def _compare(schema: Schema, made: Checkpoint, wanted: Manifest) -> None:
    sums = state_sums(schema, made)
    if root_of_sums(schema, sums) == wanted.root:
        return
    wrong = []
    for tensor_id, state in zip(wanted.touched_ids.tolist(), wanted.new_states, strict=True):
        spec = schema.tensors[tensor_id]
        if state_digest(spec, Lanes(int(sums[tensor_id][0]), int(sums[tensor_id][1]))) != state.tobytes():
            wrong.append(spec.name)
    raise FormatError(
        f"rebuilt version {wanted.version} of run {schema.run!r} does not have the manifest's root; tensors that differ: "
        f"{wrong[:10] or 'untouched ones'}; nothing was kept"
    )
