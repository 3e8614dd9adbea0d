"""A plain engine for tests of the receiver: live tensors and layouts given as they are, hooks recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from megasync.kernels.records import storage_bytes
from megasync.layout.compose import arrange
from megasync.layout.evaluate import xor_
from megasync.layout.modes import Layout
from megasync.receiver.backend import Placed
from megasync.receiver.bind import Binding
from megasync.receiver.cpu import CpuBackend
from megasync.receiver.engine import Derivation, Engine
from megasync.receiver.sums import Sums
from megasync.schema import Schema
from megasync.types import Box, TensorSpec

TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def live(words: np.ndarray) -> torch.Tensor:
    """A live tensor that holds canonical words as they are (own memory)."""
    return torch.from_numpy(words.copy().view(f"i{words.dtype.itemsize}" if words.dtype.itemsize > 1 else np.uint8))


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a live tensor, as words of its element size."""
    array = tensor.detach().contiguous().view(TORCH[tensor.element_size()]).numpy()
    return array.view(f"<u{tensor.element_size()}")


def identity(spec: TensorSpec, storage: str | None = None) -> Layout:
    """The layout of a tensor that lies as it is."""
    return arrange(spec.shape or (1,), word_nbytes=spec.word_nbytes).to(storage or spec.name)


Storages = dict[str, torch.Tensor]


def load(places: Mapping[str, Layout], storages: Storages, words: Mapping[str, np.ndarray]) -> Storages:
    """Cold load: zeroed storages filled through the layouts, padding left zero."""
    out = {n: torch.zeros_like(t) for n, t in storages.items()}
    raw = {n: storage_bytes(t) for n, t in out.items()}
    for name, layout in places.items():
        inside = tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))
        part = np.ascontiguousarray(words[name][inside]).reshape(-1).view(np.uint8)
        xor_(layout, raw, torch.from_numpy(part.copy()))
    return out


@dataclass
class PlainEngine(Engine):
    """Everything is given; what was called is written down.

    Attributes:
        live: Live tensors by name.
        places: Layouts by canonical name; identity by default.
        events: Names of the hooks called, with the version on resume.
    """

    live: dict[str, torch.Tensor]
    places: Mapping[str, Layout] | None = None
    groups: Sequence[Derivation] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, np.ndarray] = field(default_factory=dict)
    events: list[object] = field(default_factory=list)
    on_pause: Callable[[], None] = lambda: None
    on_resume: Callable[[int], None] = lambda v: None
    on_ready: Callable[[], None] = lambda: None
    output: Callable[[], bytes | None] = lambda: None

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        if self.places is not None:
            return self.places
        shadowed = {n for d in self.groups for n in d.inputs}
        return {
            t.name: identity(t)
            for t in schema.tensors
            if t.num_words and t.name not in self.left_out and t.name not in shadowed
        }

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live

    def derivations(self, schema: Schema) -> Sequence[Derivation]:
        return self.groups

    def excluded(self, schema: Schema) -> Mapping[str, str]:
        return self.left_out

    def seed(self, name: str, box: Box) -> torch.Tensor | None:
        if name not in self.seeds:
            return None
        part = self.seeds[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))]
        return live(part)

    def check_ready(self) -> None:
        self.on_ready()

    def pause(self) -> None:
        self.events.append("pause")
        self.on_pause()

    def resume(self, version: int) -> None:
        self.events.append(("resume", version))
        self.on_resume(version)

    def holds(self, version: int) -> None:
        if self.events:  # the join is not of interest
            self.events.append(("holds", version))

    def quarantine(self, reason: str) -> None:
        self.events.append("quarantine")

    def observe(self) -> bytes | None:
        return self.output()


def plain_engine(words: Mapping[str, np.ndarray], **more: object) -> PlainEngine:
    """An engine whose live tensors are the canonical ones."""
    return PlainEngine({n: live(w) for n, w in words.items()}, **more)  # type: ignore[arg-type]


class Mailbox:
    """All-gather of the ranks of one engine, each on its own thread."""

    def __init__(self, num_ranks: int, timeout_s: float = 30.0) -> None:
        self.slots: list[bytes] = [b""] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=timeout_s)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        """Every rank's bytes; a rank that never comes breaks the barrier for all."""
        self.slots[rank] = data
        self.barrier.wait()
        out = list(self.slots)
        self.barrier.wait()
        return out


class RankEngine(PlainEngine):
    """One rank of an engine of several."""

    def __init__(self, mailbox: Mailbox, rank: int, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self.mailbox, self.rank, self.num_ranks = mailbox, rank, len(mailbox.slots)

    def gather(self, data: bytes) -> list[bytes]:
        return self.mailbox.gather(self.rank, data)


def on_ranks(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Run one call a rank, each on its own thread; errors are results."""

    def caught(call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as e:
            return e

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


class BrokenBackend(CpuBackend):
    """Writes what it is told to, then fails; or lets undo fail."""

    def __init__(self, binding: Binding, write_fails_after: int | None = None, undo_fails: bool = False) -> None:
        super().__init__(binding)
        self.write_fails_after, self.undo_fails = write_fails_after, undo_fails

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        if self.write_fails_after is None:
            return super().write_(placed, pool)
        for p in placed[: self.write_fails_after]:
            p.xor_()
        raise OSError("the machine check that ended the write")

    def undo_(self, placed: Sequence[Placed]) -> list[Sums]:
        if self.undo_fails:
            raise OSError("the machine check that ended the undo")
        return super().undo_(placed)
