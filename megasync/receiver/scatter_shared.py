"""What the engine's process and its staging processes hand to one another: objects in shared memory, and messages with files.

Large arrays are written once into a file without a name and mapped by every process; messages stay a few hundred bytes, so that
a thread of the engine's process that sends them hardly ever holds its interpreter. Used by ``scatter_worker`` and
``scatter_workers``. Linux only. Must not import torch.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ALIGN = 64  # of the arrays that are mapped
_MAX_FILES = 16
_HEAD_NBYTES = 8


@dataclass(frozen=True, slots=True)
class SharedObject:
    """An object whose arrays lie in shared memory.

    Attributes:
        file: Descriptor of the memory; the maker closes it.
        places: First byte and length of each part: the pickle, then its buffers.
    """

    file: int
    places: tuple[tuple[int, int], ...]


def share(thing: object) -> SharedObject:
    """Write an object where other processes can map it.

    Raises:
        OSError: The host has no memory for it.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(b.raw() for b in buffers)]
    stops = np.cumsum([-(-len(p) // _ALIGN) * _ALIGN for p in parts]).tolist()
    places = tuple((a, len(p)) for a, p in zip([0, *stops[:-1]], parts, strict=True))
    file = os.memfd_create("megasync object")
    try:
        os.ftruncate(file, stops[-1])
        for (begin, _), part in zip(places, parts, strict=True):
            _write_all(file, part, begin)
    except OSError:
        os.close(file)
        raise
    return SharedObject(file, places)


def unshare(file: int, places: Sequence[tuple[int, int]]) -> object:
    """The object that ``share`` wrote; its arrays are read-only and map the file, which may be closed afterwards."""
    held = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    parts = [held[a : a + n] for a, n in places]
    return pickle.loads(parts[0], buffers=parts[1:])


def send(to: socket.socket, message: object, files: Sequence[int] = ()) -> None:
    """Send a message, and open files along with it; the receiver gets descriptors of its own.

    Raises:
        OSError: The other side is gone.
    """
    data = pickle.dumps(message, protocol=5)
    whole = memoryview(len(data).to_bytes(_HEAD_NBYTES, "little") + data)
    sent = socket.send_fds(to, [whole], files)
    if sent < len(whole):
        to.sendall(whole[sent:])


def receive(source: socket.socket) -> tuple[object, list[int]]:
    """The next message and the files that came with it, which the caller closes.

    Raises:
        EOFError: The other side is gone.
    """
    head, files, _, _ = socket.recv_fds(source, _HEAD_NBYTES, _MAX_FILES)
    while len(head) < _HEAD_NBYTES:
        more = source.recv(_HEAD_NBYTES - len(head)) if head else b""
        if not more:
            raise EOFError("the other side closed")
        head += more
    data = bytearray(int.from_bytes(head, "little"))
    view = memoryview(data)
    while len(view):
        got = source.recv_into(view)
        if not got:
            raise EOFError("the other side closed")
        view = view[got:]
    return pickle.loads(data), files


def _write_all(file: int, data: memoryview, begin: int) -> None:
    while len(data):
        written = os.pwrite(file, data, begin)
        data, begin = data[written:], begin + written
