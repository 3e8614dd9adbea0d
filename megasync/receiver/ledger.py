"""The ledger: which version an engine holds and the state digest of every tensor at it, moved only by proofs.

A manifest lists the new state digest of each touched tensor; the root binds them to all others. Before any write the
ledger says whether a publication starts from what is held, and whether the digest sums of the live words agree. Must
import nothing above sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.errors import BaseMismatchError, FormatError, LiveMismatchError
from megasync.manifest import Manifest, root_of
from megasync.receiver.sums import Sums
from megasync.schema import Schema, names_of


@dataclass(frozen=True, slots=True)
class Ledger:
    """A version and its table.

    Attributes:
        manifest: Of the version held.
        table: uint8 ``[num_tensors, 16]``, state digests in id order; its root is the manifest's.
    """

    manifest: Manifest
    table: np.ndarray

    @property
    def version(self) -> int:
        """The version held."""
        return self.manifest.version

    def after(self, manifest: Manifest) -> Ledger:
        """The ledger once a delta is applied.

        Raises:
            BaseMismatchError: The delta does not start from the version held; both in the message.
            FormatError: The new state digests do not have the manifest's root.
        """
        require_base(self.manifest, manifest)
        table = self.table.copy()
        table[manifest.touched_ids] = manifest.new_states
        if root_of(table) != manifest.root:
            raise FormatError(
                f"version {manifest.version}: its new state digests on top of version {self.version} have root "
                f"{root_of(table).hex()}, the manifest says {manifest.root.hex()}; nothing was touched"
            )
        return Ledger(manifest, table)


def require_base(held: Manifest, manifest: Manifest) -> None:
    """Refuse a delta that starts from another version than the one held.

    Raises:
        BaseMismatchError: With both versions, or both digests where the versions are equal.
    """
    if manifest.base_version != held.version:
        raise BaseMismatchError(
            f"delta to version {manifest.version} of run {manifest.run!r} starts from version {manifest.base_version}, this "
            f"engine holds version {held.version}; nothing was touched. Apply the versions between, or load an anchor"
        )
    if manifest.base_digest != held.digest:
        raise BaseMismatchError(
            f"delta to version {manifest.version} of run {manifest.run!r} starts from manifest "
            f"{manifest.base_digest.hex()} of version {manifest.base_version}, this engine holds {held.digest.hex()} of the "
            "same version: another history; nothing was touched. Load an anchor"
        )


def as_lanes(digests: np.ndarray) -> np.ndarray:
    """16-byte digests or digest sums (uint8 ``[K, 16]``) as uint64 ``[K, 2]``."""
    return np.ascontiguousarray(digests).view("<u8").astype(np.uint64, copy=False)


def proven_ids(manifest: Manifest, group_ids: np.ndarray) -> np.ndarray:
    """Touched tensors that the engine holds: those whose sums can and must agree."""
    return manifest.touched_ids[np.isin(manifest.touched_ids, group_ids)].astype(np.int64)


def check_before(
    schema: Schema, ledger: Ledger, manifest: Manifest, ids: np.ndarray, before: np.ndarray, after: np.ndarray
) -> None:
    """Compare the sums of live words, before any write, with what a delta says of them.

    Args:
        schema: The run's schema.
        ledger: What is held.
        manifest: The delta.
        ids: Tensors to prove, from ``proven_ids``.
        before: uint64 ``[K, 2]``, sums of the live words at the touched positions over the engine's ranks.
        after: The same once the delta is XORed in.

    Raises:
        LiveMismatchError: Naming the tensors whose live words are not the base. Nothing was touched.
        FormatError: The base is right and the delta leads elsewhere than its manifest says. Nothing was touched.
    """
    olds, news = (as_lanes(x[_rows(manifest, ids)]) for x in (manifest.touched_olds, manifest.new_states))
    if not np.array_equal(before, olds):
        wrong = (before != olds).any(axis=1)
        i = int(np.argmax(wrong))
        raise LiveMismatchError(
            f"version {manifest.version}: live words of {names_of(schema, ids[wrong])} are not those of version "
            f"{ledger.version} (first: digest sum {_hex(before[i])}, expected {_hex(olds[i])}"
            "); nothing was touched. Load the weights anew or an anchor, then join"
        )
    reached = as_lanes(ledger.table)[ids] + after - before
    if not np.array_equal(reached, news):
        wrong = (reached != news).any(axis=1)
        i = int(np.argmax(wrong))
        raise FormatError(
            f"version {manifest.version}: the delta of {names_of(schema, ids[wrong])} leads to state digest "
            f"{_hex(reached[i])}, the manifest says {_hex(news[i])}; nothing was touched. "
            "Report the publisher"
        )


def said_sums(ledger: Ledger, manifest: Manifest, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the touched words before and after a delta as its manifest and the ledger give them, for deltas whose words
    cannot be read before they are written.

    Args:
        ledger: What is held, tracked by proofs since the last audit.
        manifest: The delta.
        ids: Tensors, from ``proven_ids``.

    Returns:
        uint64 ``[K, 2]`` each. Live words that are not the base do not lead to the second.
    """
    at = _rows(manifest, ids)
    before = as_lanes(manifest.touched_olds[at])
    return before, before + as_lanes(manifest.new_states[at]) - as_lanes(ledger.table)[ids]


def _rows(manifest: Manifest, ids: np.ndarray) -> np.ndarray | slice:
    """Rows of touched tensors in a manifest's columns; usually an engine holds them all."""
    return slice(None) if len(ids) == len(manifest.touched_ids) else np.searchsorted(manifest.touched_ids, ids)


def check_live(schema: Schema, version: int, ids: np.ndarray, expected: np.ndarray, found: np.ndarray) -> None:
    """Compare the sums of live words, before a way back is written, with those of the version held.

    Raises:
        LiveMismatchError: Naming the tensors. Nothing was touched.
    """
    wrong = (expected != found).any(axis=1)
    if wrong.any():
        raise LiveMismatchError(
            f"live words of {names_of(schema, ids[wrong])} are not those of version {version}; nothing was touched. Load the "
            "weights anew or an anchor, then join"
        )


def check_after(schema: Schema, version: int, ids: np.ndarray, expected: np.ndarray, found: np.ndarray) -> None:
    """Compare the sums read back after the writes with those that were proven before.

    Raises:
        LiveMismatchError: Naming the tensors; the caller undoes.
    """
    wrong = (expected != found).any(axis=1)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LiveMismatchError(
            f"version {version}: {names_of(schema, ids[wrong])} read back after the write are not what was written (first: "
            f"digest sum {_hex(found[i])}, expected {_hex(expected[i])}): something else writes these weights"
        )


def check_own(schema: Schema, version: int, expected: Sums, found: Sums) -> None:
    """Compare what one rank read back with what it proved before, replicas included.

    A backend that has compared them where it summed them, on the device, gives back the very sums that were proven.

    Raises:
        BaseMismatchError: Naming the tensors; the caller undoes.
    """
    if found is expected:
        return
    if np.array_equal(expected.ids, found.ids) and np.array_equal(expected.lanes, found.lanes):
        return
    ids = np.union1d(expected.ids, found.ids)
    num = len(schema.tensors)
    wrong = (expected.over(ids) != found.over(ids)).any(axis=1)
    check_after(schema, version, ids[wrong] % num, expected.over(ids)[wrong], found.over(ids)[wrong])


def _hex(lanes: np.ndarray) -> str:
    return lanes.astype("<u8").tobytes().hex()
