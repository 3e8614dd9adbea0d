"""Strict msgpack: one way to read every map of the format.

Schema, manifest and head are read through it. Maps have exactly their keys, each once, and nothing is parsed that is
larger than the format allows. Must import nothing above errors.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeVar

import msgspec

from megasync.errors import FormatError

RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,99}\Z")
"""Names of runs; they are parts of keys."""

T = TypeVar("T", bound=msgspec.Struct)


class Stamp(NamedTuple):
    """What a document says it is.

    Attributes:
        kind: Which document.
        format: Version of the format.
    """

    kind: str
    format: int

    def check(self, kind: str, format: int, what: str) -> None:
        """Refuse a document of another kind or format than this one.

        Raises:
            FormatError: With both; a newer format says to upgrade.
        """
        if kind == self.kind and format > self.format:
            raise FormatError(
                f"{what} is of format {format}, this megasync reads format {self.format}: a newer one wrote it; upgrade "
                "megasync here"
            )
        if (kind, format) != self:
            raise FormatError(f"{what} has kind {kind!r:.60} format {format}, expected {self.kind} {self.format}")


class _Stamped(msgspec.Struct, frozen=True):
    """Any map that may have a stamp, whatever else it has: a newer format has other keys."""

    kind: str = ""
    format: int = 0


def decode_map(
    data: bytes | memoryview | msgspec.Raw, kind: type[T], what: str, max_nbytes: int, stamp: Stamp | None = None
) -> T:
    """Read a map of the format.

    Args:
        data: Its msgpack.
        kind: Its fields: a struct that is a map, with all fields required and unknown ones forbidden.
        what: Name of the document for messages.
        max_nbytes: Most bytes that it may have.
        stamp: What it ought to be: where it is no such map because its format is newer, the message says so.

    Raises:
        FormatError: It has more bytes, is no such map, or has a key twice.
    """
    nbytes = memoryview(data).nbytes
    if nbytes > max_nbytes:
        raise FormatError(f"{what} refused: {nbytes} bytes, at most {max_nbytes}")
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as e:
        if stamp is not None:
            _refuse_newer(data, what, stamp)
        raise FormatError(f"{what} refused: {e}") from e
    # No key is missing and none is unknown, so the number of entries tells whether one is there twice.
    head = bytes(memoryview(data)[:5])
    wide = {0xDE: 2, 0xDF: 4}.get(head[0], 0)
    entries = int.from_bytes(head[1 : 1 + wide], "big") if wide else head[0] & 0x0F
    if entries != len(kind.__struct_fields__):
        raise FormatError(
            f"{what} refused: {entries} entries for {len(kind.__struct_fields__)} keys, one is there twice"
        )
    return found


def _refuse_newer(data: bytes | memoryview | msgspec.Raw, what: str, stamp: Stamp) -> None:
    try:
        found = msgspec.msgpack.decode(data, type=_Stamped)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return
    if found.kind == stamp.kind and found.format > stamp.format:
        stamp.check(found.kind, found.format, what)
