"""A sink that fails on purpose, around any other: for tests and drills of what a bad night brings.

A plan names the calls that go wrong and how: not done, done but the answer lost, held until told to go on, or done late
after later calls. No fault needs a sleep: holding waits for an event, and lateness ends when ``release_late`` is
called. Must not import trainer or receiver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from megasync.errors import RetryError
from megasync.sinks.base import DEFAULT_TIMEOUT_S, Buffer, Deadline, Sink, byte_views
from megasync.sinks.forward import ForwardingSink

T = TypeVar("T")
When = Literal["before", "after", "late"]
OPERATIONS = ("create", "read", "read_into", "size", "keys", "delete", "read_head", "swap_head")
_LATE = ("create", "delete", "swap_head")


def _no_answer(operation: str, key: str) -> Exception:
    return RetryError(f"{operation} {key!r}: no answer (planned fault); whether it took effect is unknown")


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """One thing that goes wrong.

    Attributes:
        operation: Name of a sink method.
        nth: Which of the matching calls, from 1.
        times: How many matching calls in a row, from ``nth`` on.
        key: Only calls whose key (or run) contains this.
        when: ``before``: the call had no effect. ``after``: it had its effect, then this happens. ``late``: the caller
            gets the error at once and the effect comes with ``FaultySink.release_late``.
        delay_s: Seconds to let pass first, on the sink's clock.
        gate: Event to wait for, for as long as the call's own timeout, then RetryError.
        action: Called then; a drill that kills its process does it here.
        error: Makes the error that the caller gets, from operation and key; None for a call that goes on unharmed.
    """

    operation: str
    nth: int = 1
    times: int = 1
    key: str = ""
    when: When = "before"
    delay_s: float = 0.0
    gate: threading.Event | None = None
    action: Callable[[], None] | None = None
    error: Callable[[str, str], Exception] | None = _no_answer

    def __post_init__(self) -> None:
        """Refuse what could never happen."""
        if self.operation not in OPERATIONS:
            raise ValueError(f"no sink operation {self.operation!r}; known: {', '.join(OPERATIONS)}")
        if self.nth < 1 or self.times < 1:
            raise ValueError(f"fault of {self.operation}: nth {self.nth} and times {self.times} must be 1 or more")
        if self.when == "late" and (self.operation not in _LATE or self.error is None):
            raise ValueError(f"only {', '.join(_LATE)} can be late, with an error for the caller")


class FaultySink(ForwardingSink):
    """Another sink, with a plan of faults.

    Attributes:
        inner: The sink that does the work.
        calls: Every call so far as (operation, key or run), in order.
    """

    def __init__(self, inner: Sink, plan: Iterable[Fault] = (), *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wrap a sink.

        Args:
            inner: The sink; this one closes it.
            plan: Faults; when several match a call, the first one happens.
            sleep: How ``delay_s`` passes; tests give one that only counts.
        """
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self._sleep = sleep
        self._lock = threading.Lock()
        self._plan: list[Fault] = list(plan)
        self._seen: dict[int, int] = {}
        self._late: list[tuple[str, str, Callable[[], object]]] = []

    def add(self, fault: Fault) -> None:
        """Plan one more fault; it counts calls from now on."""
        with self._lock:
            self._plan.append(fault)

    def heal(self) -> None:
        """Drop all planned faults; late effects stay pending."""
        with self._lock:
            self._plan.clear()
            self._seen.clear()

    def release_late(self) -> list[Exception | None]:
        """Let the late effects happen now, in the order of their calls.

        Returns:
            For each, None where it took effect, or the error it met.
        """
        with self._lock:
            late, self._late = self._late, []
        outcomes: list[Exception | None] = []
        for _, _, effect in late:
            try:
                effect()
                outcomes.append(None)
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def _fault_of(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            self.calls.append((operation, key))
            hit: Fault | None = None
            for fault in self._plan:
                if fault.operation != operation or fault.key not in key:
                    continue
                seen = self._seen[id(fault)] = self._seen.get(id(fault), 0) + 1
                if hit is None and fault.nth <= seen < fault.nth + fault.times:
                    hit = fault
            return hit

    def _run(self, operation: str, key: str, timeout_s: float, effect: Callable[[], T]) -> T:
        fault = self._fault_of(operation, key)
        if fault is None:
            return effect()
        if fault.when == "late":
            with self._lock:
                self._late.append((operation, key, effect))
            raise self._happen(fault, operation, key, timeout_s) or _no_answer(operation, key)
        if fault.when == "after":
            result = effect()
            error = self._happen(fault, operation, key, timeout_s)
        else:
            error = self._happen(fault, operation, key, timeout_s)
            if error is None:
                return effect()
        if error is not None:
            raise error
        return result

    def _happen(self, fault: Fault, operation: str, key: str, timeout_s: float) -> Exception | None:
        deadline = Deadline(timeout_s)
        if fault.delay_s:
            self._sleep(fault.delay_s)
        if fault.gate is not None and not fault.gate.wait(deadline.left_s()):
            return deadline.passed(f"{operation} {key!r} in {self.describe()}")
        if fault.action is not None:
            fault.action()
        return fault.error(operation, key) if fault.error is not None else None

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``. The parts of a creation that may come late are copied at the call."""
        with self._lock:
            late = any(f.operation == "create" and f.when == "late" and f.key in key for f in self._plan)
        kept = [view.tobytes() for view in byte_views(parts)] if late else parts
        return super().create(key, kept, timeout_s=timeout_s)

    def describe(self) -> str:
        """What and where."""
        return f"faulty {self.inner.describe()}"
