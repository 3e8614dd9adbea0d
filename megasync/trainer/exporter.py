"""The Exporter port: what a trainer adapter must tell about the weights a rank holds.

First stop of the flow: exporter -> plan -> snapshot -> encode -> gather -> publish. An adapter (megasync.adapters)
implements it; nothing here knows a trainer. Must not import adapters or receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megasync.errors import PlanError
from megasync.types import Box, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one canonical tensor and the live memory that holds it on this rank.

    Attributes:
        name: Canonical name.
        box: Where the piece lies in the canonical tensor, in words.
        data: View of live memory, dtype of the canonical tensor (any torch dtype of the same word size is fine for
            packed ones), shape equal to ``box.extent``, any device, any strides. Never a copy.
        volatile: True where something other than the optimizer writes it (a router's expert bias): it is copied on
            the compute stream at step end, before later code can write it again.
        chunk: Index of the model chunk that holds it (virtual pipeline), for per-chunk start rules.
    """

    name: str
    box: Box
    data: torch.Tensor
    volatile: bool = False
    chunk: int = 0


class Exporter(ABC):
    """Turns the parameters a rank holds into canonical boxes over live memory, without communication.

    Attributes:
        settle_always: True where ``settle()`` makes the bytes (quantised export): it must then run before every read of
            the pieces, even when no parameter gather is pending.
    """

    settle_always: bool = False

    @property
    def sources(self) -> Exporter | None:
        """Exporter of the weights that this one makes bytes from on their owners alone: what replicas of them share.

        None where all bytes that replicas share are in ``pieces()``.
        """
        return None

    @abstractmethod
    def specs(self) -> list[TensorSpec]:
        """Specs of every tensor this rank holds a part of.

        Returns:
            One spec a canonical tensor; equal on every rank that holds a part of it.

        Raises:
            PlanError: Listing every local parameter that no table maps.
        """

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """The local boxes. Called once, at plan time: the views must stay valid while the trainer lives."""

    def own(self, boxes: Sequence[tuple[str, Box]], specs: Sequence[TensorSpec]) -> list[Piece]:
        """The pieces this rank will mask and encode. Called once, after the ownership plan.

        An exporter whose bytes are not in the trainer's memory (quantised export) allocates them here, for the owned
        boxes only; before that call the ``data`` of its pieces lies on the meta device.

        Args:
            boxes: Canonical name and box of everything this rank owns, each inside one of ``pieces()``.
            specs: Every tensor of the run (all ranks'), in schema order, the same on every rank.

        Returns:
            One piece a box, in the order of ``boxes``; ``data`` is valid after ``settle()``, while the trainer lives.

        Raises:
            PlanError: Listing the boxes that no local piece contains.
        """
        held: dict[str, list[Piece]] = {}
        for piece in self.pieces():
            held.setdefault(piece.name, []).append(piece)
        out: list[Piece] = []
        lost: list[str] = []
        for name, box in boxes:
            whole = next((p for p in held.get(name, ()) if p.box.intersect(box) == box), None)
            if whole is None:
                lost.append(f"{name} {box.start}+{box.extent}")
                continue
            at = tuple(slice(b - a, b - a + n) for a, b, n in zip(whole.box.start, box.start, box.extent, strict=True))
            out.append(replace(whole, box=box, data=whole.data[at]))
        if lost:
            raise PlanError(f"{len(lost)} owned boxes lie in no piece of this rank: " + "; ".join(lost[:20]))
        return out

    def settle(self) -> float:
        """Make live parameters current (a pending parameter all-gather, say) before they are read.

        *Collective*: every rank must call it at the same step end.

        Returns:
            Seconds that it took.
        """
        return 0.0

    def late_chunks(self) -> tuple[int, ...]:
        """Model chunks whose weights become current only during the first forward pass after a step.

        Returns:
            Chunk numbers, the same on every rank that holds replicas of them; empty where weights are current at step
            end, or where only ``settle`` makes them so.
        """
        return ()

    def num_open_gathers(self, chunk: int) -> int:
        """Parts of a late chunk that are not current yet, after its first forward pass since the step."""
        return 0

    def finish_chunk(self, chunk: int) -> None:  # noqa: B027
        """Make current what the first forward pass of a late chunk since the step left open.

        *Collective*: over the ranks that hold replicas of the chunk, at the end of that forward pass.
        *Stream*: the compute stream is current, and waits.
        """

    def settle_before_step(self) -> float:
        """``settle`` right before an optimizer step, which makes the weights old again: the trainer must not take them
        for current afterwards. *Collective*, and returns, as ``settle``.
        """
        return self.settle()

    def after_forward(self, chunk: int, call: Callable[[], None]) -> Callable[[], None]:
        """Have a function called at the end of every training forward pass of a late chunk.

        Args:
            chunk: One of ``late_chunks()``.
            call: The function; the compute stream is current.

        Returns:
            Takes it off again.
        """
        raise ValueError(f"chunk {chunk} is none of the late chunks {self.late_chunks()}")

    def check_alive(self) -> None:  # noqa: B027
        """Check that no view has moved since ``pieces()``.

        Raises:
            PlanError: Naming the tensors whose storage moved.
        """
