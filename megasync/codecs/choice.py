"""``auto``: which codec a frame takes, from its measured density alone.

The rule: ``sparse``, whose planes were the smallest on every mask measured, synthetic and real, at any density (BF16 with
half of its words changed: two thirds of Zstd blocks of the mask), and are the cheapest to apply. From ``DENSE_DENSITY``
changed words on, where even that saves less than ``STORED_GAIN`` of the mask, the mask is stored instead: it decodes at the
speed of a copy.
"""

from __future__ import annotations

from megasync.codecs.base import EncodedFrame
from megasync.codecs.registry import codec_by_name, delta_codecs
from megasync.types import Entries

AUTO = "auto"
DENSE_DENSITY = 0.5
STORED_GAIN = 0.02


def encode_frame(name: str, entries: Entries) -> EncodedFrame:
    """Encode a frame with a codec by name, or by the rule above for ``auto``."""
    if name != AUTO:
        return codec_by_name(name).encode(entries)
    frame = codec_by_name("sparse").encode(entries)
    if entries.num_changed < DENSE_DENSITY * entries.num_words:
        return frame
    if frame.nbytes > (1 - STORED_GAIN) * entries.num_words * entries.word_nbytes:
        return codec_by_name("stored").encode(entries)
    return frame


def codec_names() -> list[str]:
    """What may be chosen: the codecs of deltas, and ``auto``."""
    return [*delta_codecs(), AUTO]


def check_codec(name: str) -> str:
    """A codec name for configuration.

    Raises:
        ValueError: It is none of ``codec_names``, which the message lists.
    """
    if name not in codec_names():
        raise ValueError(f"codec {name!r} cannot be chosen; take one of {', '.join(codec_names())}")
    return name
