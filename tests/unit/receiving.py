"""A plain engine for tests of the receiver: live tensors and layouts given as they are, hooks recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megasync.layout.compose import arrange
from megasync.layout.modes import Layout
from megasync.receiver.engine import Derivation, Engine
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

    def quarantine(self, reason: str) -> None:
        self.events.append("quarantine")

    def observe(self) -> bytes | None:
        return self.output()


def plain_engine(words: Mapping[str, np.ndarray], **more: object) -> PlainEngine:
    """An engine whose live tensors are the canonical ones."""
    return PlainEngine({n: live(w) for n, w in words.items()}, **more)  # type: ignore[arg-type]
