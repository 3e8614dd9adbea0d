"""Typed configuration of both ends: plain dataclasses, checked when made. Hydra lives in launch/, never here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megasync.types import DTYPE_NBYTES


class SnapshotPlace(Enum):
    """Where an owner keeps the newest version's bytes."""

    HOST = "host"
    DEVICE = "device"


class GatherKind(Enum):
    """How payloads reach the writers."""

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
    """What a trainer that starts elsewhere than version 0 does."""

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
        timeout_s: Longest wait for a rank or a sink operation.
        give_up_s: How long an unreachable sink is retried before the publication fails.
        check_replicas_every: Compare replicas every so many publications; 0 only at plan time.
        first_difference: What to do where the trainer's weights are not version 0.
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
        faults = [
            f"{name} is {getattr(self, name)}, expected at least {least}"
            for name, least in (
                ("every", 1),
                ("num_writers", 1),
                ("in_flight_limit", 1),
                ("max_failures", 0),
                ("check_replicas_every", 0),
            )
            if getattr(self, name) < least
        ]
        if not 0 < self.max_first_density <= 1:
            faults.append(f"max_first_density is {self.max_first_density}, expected a share in (0, 1]")
        if self.timeout_s <= 0 or self.give_up_s < 0:
            faults.append("timeout_s must be positive and give_up_s not negative")
        if self.gather is GatherKind.DIRECT and self.num_writers != 1:
            faults.append("num_writers means nothing with gather=direct, where every owner writes: leave it at 1")
        if faults:
            raise ValueError("PublishConfig: " + "; ".join(faults))


@dataclass(frozen=True, slots=True)
class ApplyConfig:
    """Receiver side.

    Attributes:
        run: Name of the run in the sink.
        workers: Threads that fetch and decode.
        staged_limit_nbytes: Host bytes that staged publications may take.
        timeout_s: Longest wait for a sink operation.
        poll_s: Seconds between looks at the head.
        shadow_limit_nbytes: Host bytes that canonical shadows may take.
        self_test: Flip, observe and flip back before the first apply.
        sign_key: Shared key; where given, unsigned manifests are refused.
    """

    run: str = "run"
    workers: int = 4
    staged_limit_nbytes: int = 8 << 30
    timeout_s: float = 60.0
    poll_s: float = 0.05
    shadow_limit_nbytes: int = 1 << 30
    self_test: bool = False
    sign_key: bytes = b""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.timeout_s <= 0 or self.poll_s <= 0:
            raise ValueError("ApplyConfig: workers must be at least 1, timeout_s and poll_s positive")


def check_dtype(name: str) -> str:
    """A dtype name that the format knows, or ValueError listing them."""
    if name not in DTYPE_NBYTES:
        raise ValueError(f"dtype {name!r} is unknown; known: {', '.join(DTYPE_NBYTES)}")
    return name
