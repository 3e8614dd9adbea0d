"""Sketches: stand-ins for tensors that remember where each canonical word would go, instead of holding words.

A loader that stacks, concatenates, transposes, splits or reshapes checkpoint tensors can be run on sketches: every
torch call becomes a step of the layout algebra, and what comes out is the layout of each canonical tensor in the live
one. What is not such a step (a cast, an addition) is refused by name. Comes before binding, in adapters whose engine
keeps weights in other shapes than the checkpoint's. Must not import an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from megasync.errors import PlanError
from megasync.layout.compose import Arrangement, arrange
from megasync.layout.modes import Layout

Step = Callable[[Arrangement], Arrangement]


@dataclass(frozen=True, slots=True)
class Part:
    """One canonical tensor, or a box of it, inside a sketch.

    Attributes:
        name: Canonical name.
        shape: Canonical extents in words, at least one axis.
        word_nbytes: Canonical word size.
        start: Start of the box.
        stop: End of the box.
        steps: What was done to the box so far.
    """

    name: str
    shape: tuple[int, ...]
    word_nbytes: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def layout(self, live: str, base: int, strides: Sequence[int]) -> Layout:
        """Run the steps and end in a live tensor.

        Args:
            live: Its name.
            base: Its storage offset in words.
            strides: Its strides in words.
        """
        out = arrange(self.shape, word_nbytes=self.word_nbytes, start=self.start, stop=self.stop)
        for step in self.steps:
            out = step(out)
        return out.to(live, base=base, strides=strides)


class Sketch:
    """A tensor without words.

    Args:
        parts: What it holds, and how it got there.
        shape: Its extents in words.
    """

    def __init__(self, parts: Sequence[Part], shape: Sequence[int]) -> None:
        self.parts = tuple(parts)
        self.shape = torch.Size(shape)

    @classmethod
    def of(cls, name: str, shape: Sequence[int], word_nbytes: int) -> Sketch:
        """The sketch of a canonical tensor as it lies in the checkpoint."""
        full = tuple(shape) or (1,)
        return cls([Part(name, full, word_nbytes, (0,) * len(full), full)], shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def _axis(self, dim: int) -> int:
        return dim % max(self.ndim, 1)

    def _then(self, step: Step, shape: Sequence[int]) -> Sketch:
        return Sketch([replace(p, steps=(*p.steps, step)) for p in self.parts], shape)

    def size(self, dim: int | None = None) -> Any:
        """Extents, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    def contiguous(self) -> Sketch:
        """Itself: words have no order in memory before they reach the live tensor."""
        return self

    def clone(self) -> Sketch:
        """Itself."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Sketch:
        """As ``torch.transpose``."""
        order = list(range(self.ndim))
        a, b = self._axis(dim0), self._axis(dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def t(self) -> Sketch:
        """As ``torch.t``."""
        return self.transpose(0, 1) if self.ndim == 2 else self

    def permute(self, *order: Any) -> Sketch:
        """As ``torch.permute``."""
        axes = [self._axis(a) for a in (order[0] if len(order) == 1 and not isinstance(order[0], int) else order)]
        return self._then(lambda x: x.permute(axes), [self.shape[a] for a in axes])

    def squeeze(self, dim: int) -> Sketch:
        """As ``torch.squeeze`` of one axis."""
        axis = self._axis(dim)
        if self.shape[axis] != 1:
            return self
        return self.reshape([n for i, n in enumerate(self.shape) if i != axis])

    def unsqueeze(self, dim: int) -> Sketch:
        """As ``torch.unsqueeze``."""
        axis = dim % (self.ndim + 1)
        return stack([self], axis)

    def reshape(self, *shape: Any) -> Sketch:
        """As ``torch.reshape``; axes may be split and joined."""
        wanted = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if -1 in wanted:
            wanted[wanted.index(-1)] = prod(self.shape) // max(-prod(wanted), 1)
        if prod(wanted) != prod(self.shape):
            raise PlanError(f"{self.names()}: {tuple(self.shape)} cannot be reshaped to {tuple(wanted)}")
        return self._then(lambda x: _reshaped(x, wanted), wanted)

    view = reshape

    def flatten(self) -> Sketch:
        """As ``torch.flatten`` of all axes."""
        return self.reshape(prod(self.shape))

    def narrow(self, dim: int, start: int, length: int) -> Sketch:
        """As ``torch.narrow``, of tensors that were not moved about yet."""
        axis = self._axis(dim)
        if len(self.parts) != 1 or self.parts[0].steps:
            raise PlanError(f"{self.names()}: a part is cut out of it after it was re-laid; write a rule for it")
        part = self.parts[0]
        low, high = list(part.start), list(part.stop)
        low[axis], high[axis] = part.start[axis] + start, part.start[axis] + start + length
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return Sketch([replace(part, start=tuple(low), stop=tuple(high))], shape)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Sketch, ...]:
        """As ``torch.chunk``."""
        extent = self.shape[self._axis(dim)]
        return self.split(-(-extent // chunks), dim)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Sketch, ...]:
        """As ``torch.split``."""
        extent = self.shape[self._axis(dim)]
        if isinstance(sizes, int):
            sizes = [min(sizes, extent - at) for at in range(0, extent, sizes)]
        if len(sizes) == 1:
            return (self,)
        if sum(sizes) != extent:
            raise PlanError(f"{self.names()}: sizes {list(sizes)} do not add up to {extent} along axis {dim}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(dim, at, n) for at, n in zip(starts, sizes, strict=True))

    def names(self) -> str:
        """Canonical names inside, for messages."""
        found = [p.name for p in self.parts]
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PlanError(
            f"{self.names()}: the loader calls Tensor.{name}, which is no step of a layout: give these tensors a rule, or "
            "exclude them"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch functions that are steps of a layout; everything else is refused."""
        kwargs = kwargs or {}
        if func in (torch.stack, torch.cat, torch.concat):
            tensors, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return stack(tensors, dim) if func is torch.stack else cat(tensors, dim)
        method = _METHODS.get(func)
        if method is None:
            named = ", ".join(a.names() for a in args if isinstance(a, Sketch))
            raise PlanError(
                f"{named}: the loader calls torch.{getattr(func, '__name__', func)}, which is no step of a layout: give "
                "these tensors a rule, or exclude them"
            )
        renamed = {
            {"dim0": "dim0", "dim1": "dim1", "split_size_or_sections": "sizes"}.get(k, k): v for k, v in kwargs.items()
        }
        return getattr(args[0] if args else renamed.pop("input"), method)(*args[1:], **renamed)


_METHODS: dict[Any, str] = {
    torch.transpose: "transpose",
    torch.permute: "permute",
    torch.reshape: "reshape",
    torch.chunk: "chunk",
    torch.split: "split",
    torch.narrow: "narrow",
    torch.squeeze: "squeeze",
    torch.unsqueeze: "unsqueeze",
    torch.flatten: "flatten",
    torch.t: "t",
}


def stack(sketches: Sequence[Sketch], dim: int = 0) -> Sketch:
    """As ``torch.stack``."""
    first = _alike(sketches)
    axis, count = dim % (len(first) + 1), len(sketches)
    parts = [
        p
        for i, s in enumerate(sketches)
        for p in s._then(lambda x, i=i: x.stack(i, count, axis), s.shape).parts  # type: ignore[misc]
    ]
    return Sketch(parts, [*first[:axis], count, *first[axis:]])


def cat(sketches: Sequence[Sketch], dim: int = 0) -> Sketch:
    """As ``torch.cat``."""
    axis = sketches[0]._axis(dim)
    rest = {(*s.shape[:axis], *s.shape[axis + 1 :]) for s in sketches}
    if len(rest) != 1:
        raise PlanError(
            f"{sketches[0].names()}: shapes {[tuple(s.shape) for s in sketches]} cannot be joined at {axis}"
        )
    total, at = sum(s.shape[axis] for s in sketches), 0
    parts: list[Part] = []
    for s in sketches:
        parts += s._then(lambda x, at=at: x.concat(axis, offset=at, total=total), s.shape).parts  # type: ignore[misc]
        at += s.shape[axis]
    return Sketch(parts, [*sketches[0].shape[:axis], total, *sketches[0].shape[axis + 1 :]])


def _alike(sketches: Sequence[Sketch]) -> tuple[int, ...]:
    shapes = {tuple(s.shape) for s in sketches}
    if len(shapes) != 1:
        raise PlanError(f"{sketches[0].names()}: tensors of shapes {sorted(shapes)} are stacked; expected equal ones")
    return shapes.pop()


def _reshaped(x: Arrangement, wanted: Sequence[int]) -> Arrangement:
    """Reshape by joining and splitting axes; the extents of both sides meet at common products."""
    axis = 0
    for extent in [*wanted]:
        if axis == len(x.extents):  # a trailing axis of extent 1
            x = x.stack(0, 1, axis)
        while x.extents[axis] < extent or (x.extents[axis] % extent if extent else False):
            x = x.merge(axis)
        if x.extents[axis] != extent:
            x = x.split(axis, x.extents[axis] // extent)
        axis += 1
    while axis < len(x.extents):  # axes of extent 1 that are left over
        x = x.merge(axis - 1) if axis else x.merge(0)
    return x
