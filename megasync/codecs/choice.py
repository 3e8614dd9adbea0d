"""``auto``: which codec a frame takes, from its measured density alone.

The rule, measured on masks A to D and on bf16 and packed 4-bit data: below ``DENSE_DENSITY`` changed words the
``sparse`` planes are both smaller and cheaper to apply. From there on segments are mostly dense, a mask in Zstd blocks is
as small, and its decoding needs no gaps; and where even that saves less than ``STORED_GAIN``, the mask is stored.
"""

from __future__ import annotations

from megasync.codecs.base import EncodedFrame
from megasync.codecs.registry import codec_by_name
from megasync.types import Entries

AUTO = "auto"
DENSE_DENSITY = 0.5
STORED_GAIN = 0.02


def encode_frame(name: str, entries: Entries) -> EncodedFrame:
    """Encode a frame with a codec by name, or by the rule above for ``auto``."""
    if name != AUTO:
        return codec_by_name(name).encode(entries)
    if entries.num_changed < DENSE_DENSITY * entries.num_words:
        return codec_by_name("sparse").encode(entries)
    frame = codec_by_name("zstd").encode(entries)
    if frame.nbytes > (1 - STORED_GAIN) * entries.num_words * entries.word_nbytes:
        return codec_by_name("stored").encode(entries)
    return frame


def check_codec(name: str) -> str:
    """A codec name for configuration, ``auto`` included; ValueError listing the known names otherwise."""
    return name if name == AUTO else codec_by_name(name).name
