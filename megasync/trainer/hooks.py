"""When a deferred pass reads and when it must be done: hooks on the optimizer's step and on late chunks' forward passes.

Beside the callback, around the mask stage. Every rank takes the same decisions, from the program alone: ``settle`` is
collective. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megasync.telemetry import Telemetry
from megasync.trainer.exporter import Exporter
from megasync.trainer.masker import Masker

log = logging.getLogger(__name__)


def call_before_step(optimizer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have a function called before every step of an optimizer.

    Args:
        optimizer: A torch optimizer, or anything with a ``step`` method that its owner looks up at every call
            (Megatron's optimizers).
        call: The function.

    Returns:
        Takes it off again.

    Raises:
        TypeError: There is no ``step``.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.register_step_pre_hook(lambda *_: call()).remove
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise TypeError(f"{type(optimizer).__name__} has no step(): call before_optimizer_step() yourself")

    def fenced(*args: Any, **kwargs: Any) -> Any:
        call()
        return step(*args, **kwargs)

    optimizer.step = fenced

    def remove() -> None:
        if vars(optimizer).get("step") is fenced:
            del optimizer.step

    return remove


class StepHooks:
    """The fence before optimizer steps, and late chunks.

    A program that gives no optimizer and does not call ``before_step`` either is safe too: each pass is then fenced at the
    step end that began it.

    Args:
        exporter: The trainer's weights.
        masker: The mask stage.
        telemetry: Where times go: ``settle`` (forced gathers), ``fence`` (host time before optimizer steps).
        optimizers: Whose steps write the weights.
    """

    def __init__(self, exporter: Exporter, masker: Masker, telemetry: Telemetry, optimizers: Sequence[Any]) -> None:
        self._exporter, self._masker, self._telemetry = exporter, masker, telemetry
        self._armed: set[int] = set()
        self._late: tuple[int, ...] = ()
        self._undo: list[Callable[[], None]] = []
        self._automatic = self._seen = self._hooked = self._warned = False
        if not masker.can_defer:
            return
        try:
            for optimizer in optimizers:
                self._undo.append(call_before_step(optimizer, self.before_step))
                self._automatic = True
            self._late = exporter.late_chunks()
            for chunk in self._late:
                self._undo.append(exporter.after_forward(chunk, partial(self._forwarded, chunk)))
        except BaseException:
            self.close()
            raise

    def step_ended(self) -> None:
        """A step is over: note whether its optimizer was fenced, so that the next one can be relied on."""
        self._hooked = self._automatic or self._seen
        self._seen = False

    def before_step(self) -> None:
        """The optimizer is about to write: nothing that a pass still reads may be reached by it.

        *Collective*: every rank, like the optimizer's step. *Stream*: the compute stream is current; it waits, the host
        does only until the last read is queued.
        """
        self._seen = True
        self._begin_rest(self._exporter.settle_before_step)
        if self._masker.can_defer:
            with self._telemetry.span("fence"):
                self._masker.fence()

    def deferrable(self) -> tuple[int, ...]:
        """Chunks that a pass begun now may read later."""
        return self._late if self._hooked else ()

    def begun(self, late: Sequence[int]) -> None:
        """A pass has begun with these chunks to come."""
        self._armed = set(late)
        if self._hooked or not self._masker.can_defer:
            return
        if not self._warned:
            self._warned = True
            log.warning(
                "megasync: nothing announces optimizer steps, so each pass holds the compute stream at step end: give "
                "the callback the optimizer, or call before_optimizer_step() before every optimizer.step()"
            )
        with self._telemetry.span("fence"):
            self._masker.fence()

    def force(self) -> None:
        """Make late chunks that have not run forward since the step current, and begin them.

        *Collective*: every rank at the same point, between two steps; decided by which chunks ran forward, the same on
        all replicas.
        """
        self._begin_rest(self._exporter.settle)

    def _begin_rest(self, settle: Callable[[], float]) -> None:
        if not self._armed:
            return
        with self._telemetry.span("settle"):
            settle()
        self._masker.start_rest()
        self._armed.clear()  # last: what an interrupt kept from beginning is begun next time

    def close(self) -> None:
        """Take all hooks off. Idempotent."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _forwarded(self, chunk: int) -> None:
        """A chunk ran forward: what it used is current on the compute stream, and the rest of it is made so here.

        Not later: between the gradients' reduction and the optimizer's step a trainer counts its gathers anew.
        """
        if chunk not in self._armed:
            return
        if self._exporter.num_open_gathers(chunk):
            with self._telemetry.span("settle"):
                self._exporter.finish_chunk(chunk)
        self._masker.start_chunk(chunk)
        self._armed.discard(chunk)
