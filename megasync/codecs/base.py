"""The codec contract and registry.

A codec turns the changed words of some tiles (``Entries``) into a frame's planes and back. Comes after mask, before
gather on the trainer; after fetch, before apply on the receiver. Only megasync.codecs imports compression libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megasync.types import Entries


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """The stored bytes of one frame.

    Attributes:
        codec: Id of the codec of format 1.
        planes: Stored planes in the codec's order; a frame's bytes are the planes one after the other.
    """

    codec: int
    planes: tuple[bytes, ...]

    @property
    def plane_nbytes(self) -> tuple[int, ...]:
        """Stored length of each plane."""
        return tuple(len(p) for p in self.planes)

    @property
    def nbytes(self) -> int:
        """Stored bytes of the frame."""
        return sum(self.plane_nbytes)


@dataclass(frozen=True, slots=True)
class FrameShape:
    """What a decoder knows of a frame before it reads it, from the manifest and the grid; never from the frame.

    Attributes:
        word_nbytes: Bytes of a word of every tile of the frame.
        tensor_ids: u32 ``[T]``, touched tiles.
        tiles: u32 ``[T]``.
        tile_words: u32 ``[T]``, from the grid.
        num_changed: Changed words that the frame must hold.
    """

    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray
    num_changed: int


class Codec(ABC):
    """One codec of format 1. Stateless and thread-safe; equal entries give equal bytes."""

    id: int
    name: str

    @abstractmethod
    def encode(self, entries: Entries) -> EncodedFrame:
        """Encode the changed words of a frame.

        Args:
            entries: At least one changed word in each tile.
        """

    @abstractmethod
    def decode(self, shape: FrameShape, stored: memoryview, plane_nbytes: Sequence[int]) -> Entries:
        """Decode a frame.

        Args:
            shape: What the frame must hold.
            stored: The frame's stored bytes.
            plane_nbytes: Stored length of each plane, from the frame record.

        Returns:
            The entries; every rule of the format checked.

        Raises:
            FormatError: When the bytes break a rule; nothing beyond the returned arrays was touched.
        """
