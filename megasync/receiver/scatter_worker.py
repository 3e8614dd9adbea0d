"""A worker process of staging: decodes ranges of frames for the scatter, beside the engine's process and its interpreter.

Started by ``scatter_workers`` as ``python -m megasync.receiver.scatter_worker``. Stored bytes come in, and planes go out,
through memory that both processes map; requests and table rows go through a socket. It ends when the socket closes. Must not
import torch, and nothing that does.
"""

from __future__ import annotations

import mmap
import pickle
import sys
from multiprocessing.connection import Connection

import numpy as np

from megasync.receiver.scatter_range import IN_NBYTES, OUT_NBYTES, Made, Request, work
from megasync.receiver.scatter_view import StageView


def serve(connection: Connection, memory: int, view_memory: int) -> None:
    """Answer requests until the other side closes.

    Args:
        connection: First where the pickled view's parts are, then requests.
        memory: File descriptor of ``IN_NBYTES + OUT_NBYTES`` of shared memory.
        view_memory: File descriptor of the pickled view: its bytes, then its buffers.
    """
    shared = mmap.mmap(memory, IN_NBYTES + OUT_NBYTES)
    places: list[tuple[int, int]] = connection.recv()
    held = memoryview(mmap.mmap(view_memory, 0, prot=mmap.PROT_READ))
    parts = [held[a : a + n] for a, n in places]
    view: StageView = pickle.loads(parts[0], buffers=parts[1:])
    whole = memoryview(shared)
    room = np.frombuffer(whole, np.uint8)[IN_NBYTES:]
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        try:
            answer: list[Made] | str = work(view, request, whole[:IN_NBYTES], room)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
