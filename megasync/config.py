"""Typed configuration of both ends: plain dataclasses, checked when made. Hydra lives in launch/, never here.

Every field is checked for its type and its range, all faults are told at once. A choice may be given as the text that is
its value (``snapshot="host"``). Names of codecs and runs are checked where they are used, by ``codecs.choice`` and
``manifest``. Must import nothing above types.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

MAX_WAIT_S = 20 * 86_400.0
"""Longest wait that may be configured: sockets and polls count milliseconds in 31 bits, which is 24 days."""

_MAX_COUNT = (1 << 31) - 1
_MAX_NBYTES = (1 << 63) - 1
_Check = Callable[[Any], Any]
_Config = TypeVar("_Config")


class SnapshotPlace(Enum):
    """Where an owner keeps the newest version's bytes.

    ``device`` publishes soonest. ``host`` spares device memory: pinned, and read across PCIe by every mask pass, beside the next
    step; where all CUDA streams share one hardware queue the weights come down whole instead (``trainer/copied_masker``).
    """

    HOST = "host"
    DEVICE = "device"


class GatherKind(Enum):
    """How payloads reach the writers.

    ``gloo`` takes them over TCP and touches no GPU. ``nccl`` is for hosts whose TCP is slow: messages go beside the trainer's own
    NCCL work, on streams that it never waits for, but NVIDIA promises nothing for communicators used side by side
    (``trainer/carrier``). With ``direct`` every owner writes its own and nothing moves.
    """

    GLOO = "gloo"
    NCCL = "nccl"
    DIRECT = "direct"


class WhenFull(Enum):
    """What a step end does while the in-flight limit is reached."""

    WAIT = "wait"
    SKIP = "skip"


class OnError(Enum):
    """What a failed publication does to the trainer."""

    RAISE = "raise"
    RETRY = "retry"


class FirstDifference(Enum):
    """What a trainer does that starts elsewhere than the run's newest version, or than the checkpoint of a fresh run.

    ``publish`` makes the difference its first delta, ``refuse`` ends the start.
    """

    PUBLISH = "publish"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """Trainer side.

    Attributes:
        run: Name of the run in the sink.
        every: Publish every so many steps.
        codec: Codec name, or ``auto`` (per frame, from measured density).
        snapshot: Where the snapshot lives.
        gather: How payloads reach the writers.
        num_writers: Ranks that write payloads (``direct``: every owner does).
        in_flight_limit: Publications that may be unfinished at once.
        when_full: What to do at the limit.
        on_error: Raise a failed publication on every rank, or withdraw it and let the next version carry it.
        max_failures: Failed publications in a row that ``retry`` endures.
        timeout_s: Longest wait for a sink operation, and for a rank; five times as long for one that may be inside the sink.
        give_up_s: How long an unreachable sink is retried before the publication fails.
        check_replicas_every: Compare replicas every so many publications; 0 only at plan time.
        first_difference: What to do where the trainer's weights are not the version it starts from.
        max_first_density: A first delta denser than this is refused: it is another model, not a step.
        sign_key: Shared key that manifests are signed with; empty for unsigned.
        check_memory: Refuse a start whose memory plan does not fit; off, it is only logged (hosts that grow memory on
            demand tell too little).
    """

    run: str = "run"
    every: int = 1
    codec: str = "sparse"
    snapshot: SnapshotPlace = SnapshotPlace.HOST
    gather: GatherKind = GatherKind.GLOO
    num_writers: int = 1
    in_flight_limit: int = 2
    when_full: WhenFull = WhenFull.WAIT
    on_error: OnError = OnError.RAISE
    max_failures: int = 3
    timeout_s: float = 300.0
    give_up_s: float = 3600.0
    check_replicas_every: int = 0
    first_difference: FirstDifference = FirstDifference.PUBLISH
    max_first_density: float = 0.05
    sign_key: bytes = b""
    check_memory: bool = True

    def __post_init__(self) -> None:
        faults = _settle(self, _PUBLISH)
        if not faults and self.gather is GatherKind.DIRECT and self.num_writers != 1:
            faults.append("num_writers means nothing with gather=direct, where every owner writes: leave it at 1")
        if faults:
            raise ValueError("PublishConfig: " + "; ".join(faults))


class Staging(Enum):
    """How a receiver makes a version ready while its engine decodes, on a GPU."""

    QUIET = "quiet"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class ApplyConfig:
    """Receiver side.

    Attributes:
        run: Name of the run in the sink.
        workers: Ranges of frames that are fetched and decoded at once, each by a thread, or by a process of the backend.
        staging: ``quiet`` is for an engine that serves: processes decode on cores that nobody else wants, and live words are
            read in short launches with pauses between them, so that tokens come as they do without it; it takes longer.
            ``fast`` takes what there is: for an engine that does not serve, or a version that cannot wait.
        staged_limit_nbytes: Host bytes that staged publications may take.
        timeout_s: Longest wait for a sink operation.
        poll_s: Seconds between looks at the head.
        shadow_limit_nbytes: Host bytes that canonical shadows may take.
        self_test: Flip, observe and flip back before the first apply.
        sign_key: Shared key; where given, unsigned manifests are refused.
    """

    run: str = "run"
    workers: int = 4
    staging: Staging = Staging.QUIET
    staged_limit_nbytes: int = 8 << 30
    timeout_s: float = 60.0
    poll_s: float = 0.05
    shadow_limit_nbytes: int = 1 << 30
    self_test: bool = False
    sign_key: bytes = b""

    def __post_init__(self) -> None:
        if faults := _settle(self, _APPLY):
            raise ValueError("ApplyConfig: " + "; ".join(faults))


def config_of(kind: type[_Config], given: object) -> _Config:
    """The configuration that an end was given, the defaults where it was given none.

    Args:
        kind: ``PublishConfig`` or ``ApplyConfig``.
        given: What the caller gave; None for the defaults.

    Raises:
        TypeError: It is something else, such as a dict or the other end's configuration.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise TypeError(f"config is {_shown(given)}, expected {kind.__name__}: write {kind.__name__}(run=...)")
    return given


def _settle(config: object, checks: Mapping[str, _Check]) -> list[str]:
    """Check every field and put the value that its check gives in its place; returns what is wrong."""
    faults: list[str] = []
    for name, check in checks.items():
        given = getattr(config, name)
        try:
            # A frozen dataclass can only be completed while it is made, and only so.
            object.__setattr__(config, name, check(given))
        except (TypeError, ValueError) as e:
            faults.append(f"{name} is {_shown(given)}, expected {e}")
    return faults


def _shown(value: object) -> str:
    """A value in a message; of keys, which are secret, the type only."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    return value.__name__ if isinstance(value, type) else f"{value!r:.60}"


def _whole(least: int, most: int) -> _Check:
    def check(value: Any) -> int:
        expected = f"a whole number, at least {least} and at most {most}"
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(expected) from None
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError(expected)
        return number

    return check


def _number(expected: str, fits: Callable[[float], bool]) -> _Check:
    def check(value: Any) -> float:
        if isinstance(value, bool | str | bytes) or not hasattr(type(value), "__float__"):
            raise TypeError(expected)
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(expected) from None
        if not math.isfinite(number) or not fits(number):
            raise ValueError(expected)
        return number

    return check


def _choice(kind: type[Enum]) -> _Check:
    def check(value: Any) -> Enum:
        try:
            return kind(value)
        except ValueError:
            raise ValueError("one of " + ", ".join(str(member.value) for member in kind)) from None

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


def _text(expected: str) -> _Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise TypeError(expected)
        return value

    return check


def _secret(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes (text has no bytes until it is encoded: write it as b'...')")
    return bytes(value)


_SECONDS = _number(
    f"seconds, above 0 and at most {MAX_WAIT_S:g} ({MAX_WAIT_S / 86_400:g} days)", lambda x: 0 < x <= MAX_WAIT_S
)
_RUN = _text("a run name, as text that is not empty")
_PUBLISH: Mapping[str, _Check] = {
    "run": _RUN,
    "every": _whole(1, _MAX_COUNT),
    "codec": _text("the name of a codec, or auto"),
    "snapshot": _choice(SnapshotPlace),
    "gather": _choice(GatherKind),
    "num_writers": _whole(1, 1 << 16),
    "in_flight_limit": _whole(1, 1 << 16),
    "when_full": _choice(WhenFull),
    "on_error": _choice(OnError),
    "max_failures": _whole(0, _MAX_COUNT),
    "timeout_s": _SECONDS,
    "give_up_s": _SECONDS,
    "check_replicas_every": _whole(0, _MAX_COUNT),
    "first_difference": _choice(FirstDifference),
    "max_first_density": _number("a share in (0, 1]", lambda x: 0 < x <= 1),
    "sign_key": _secret,
    "check_memory": _flag,
}
_APPLY: Mapping[str, _Check] = {
    "run": _RUN,
    "workers": _whole(1, 1024),
    "staging": _choice(Staging),
    "staged_limit_nbytes": _whole(0, _MAX_NBYTES),
    "timeout_s": _SECONDS,
    "poll_s": _SECONDS,
    "shadow_limit_nbytes": _whole(0, _MAX_NBYTES),
    "self_test": _flag,
    "sign_key": _secret,
}
