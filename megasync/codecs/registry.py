"""Which codecs there are. Built-in ones are imported when first asked for; others come from entry points.

A third-party codec declares an entry point in the group ``megasync.codecs`` whose name is the codec's name. Two codecs
may never share an id or a name: the id is part of the wire format.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from megasync.codecs.base import Codec
from megasync.errors import FormatError
from megasync.frames import ANCHOR_CODEC

GROUP = "megasync.codecs"


@lru_cache(maxsize=1)
def codecs() -> dict[str, Codec]:
    """All codecs by name.

    Raises:
        ValueError: Two codecs share a name or an id.
    """
    from megasync.codecs.dense import DENSE_CODECS
    from megasync.codecs.sparse import SparseCodec

    found: dict[str, Codec] = {c.name: c for c in (SparseCodec(), *DENSE_CODECS)}
    for entry in entry_points(group=GROUP):
        codec = entry.load()()
        if codec.name in found or any(codec.id == c.id for c in found.values()):
            raise ValueError(f"codec {codec.name!r} (id {codec.id}) from {entry.value}: its name or id is taken")
        found[codec.name] = codec
    return found


@lru_cache(maxsize=1)
def _by_id() -> dict[int, Codec]:
    return {c.id: c for c in codecs().values()}


def delta_codecs() -> list[str]:
    """Names of the codecs that a delta may take: all but the one of anchors, whose frames are full bytes."""
    return [c.name for c in codecs().values() if c.id != ANCHOR_CODEC]


def codec_by_name(name: str) -> Codec:
    """The codec called ``name``, that of anchors included.

    Raises:
        ValueError: Listing the known names.
    """
    if name not in codecs():
        raise ValueError(f"codec {name!r} is unknown; known: {', '.join(codecs())}")
    return codecs()[name]


def codec_by_id(codec_id: int) -> Codec:
    """The codec with an id of the format.

    Raises:
        FormatError: Unknown id: the publication needs a newer megasync or a codec plug-in.
    """
    if codec_id not in _by_id():
        raise FormatError(f"codec id {codec_id} is unknown here; known: {sorted(_by_id())}; install its plug-in")
    return _by_id()[codec_id]
