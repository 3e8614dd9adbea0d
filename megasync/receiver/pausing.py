"""Pausing: the engine stopped and let go on, and what its status says meanwhile.

Votes stand between the steps, so that all ranks of an engine stop and go on together. Used by apply and by anchors that are
written as they come. Must import nothing above bind.
"""

from __future__ import annotations

from collections.abc import Callable

from megasync.errors import RetryError
from megasync.receiver.bind import Binding
from megasync.receiver.status import Status, StatusFile
from megasync.receiver.votes import vote


def pause(binding: Binding, status: StatusFile, was: Status, version: int, base_version: int | None) -> None:
    """Stop the engine on every rank, or let it go on. *Collective*.

    Args:
        binding: This rank.
        status: Put back to ``was`` where the engine goes on.
        was: The status before the update.
        version: What it is stopped for.
        base_version: Version of the live weights; None where they are of none.

    Raises:
        RetryError: It did not come to rest.
    """
    try:
        with vote(binding.engine, f"pausing for version {version}"):
            try:
                binding.engine.pause()
            except TimeoutError as e:
                raise RetryError(
                    f"{binding.engine.name} did not pause for version {version} ({e}): nothing was touched, update again"
                ) from e
    except BaseException:
        go_on(binding, status, was, base_version)
        raise


def let_go_on(binding: Binding, status: StatusFile, was: Status, base_version: int | None) -> None:
    """After a failure around the pause, before the first write: nothing to do where ``pause`` has let the engine go on.

    An interrupt just outside of it finds the engine still stopped. Of an engine of several ranks only this one knows of it:
    it must not go on alone, so that its status stays ``updating``.
    """
    if status.now.state == "updating" and binding.engine.num_ranks == 1:
        go_on(binding, status, was, base_version)


def go_on(binding: Binding, status: StatusFile, was: Status, base_version: int | None) -> BaseException | None:
    """Let the engine go on at its old version, then say so: interrupted in between it is not ready, rather than ready and
    stopped. *Collective*. Gives what ``resume`` raised."""
    stands = None if base_version is None else wake(binding, status, base_version)
    if stands is None:
        back_to(status, was)
    return stands


def resume(binding: Binding, version: int) -> BaseException | None:
    """Let this rank go on at a proven version; what that raises is no reason to doubt the weights."""
    try:
        binding.engine.resume(version)
    except BaseException as error:
        return error
    return None


def wake(
    binding: Binding, status: StatusFile, version: int, run: Callable[[], BaseException | None] | None = None
) -> BaseException | None:
    """Let the engine go on at a proven version, or record that it does not. *Collective*.

    Args:
        binding: This rank.
        status: Becomes ``behind``, with the reason, and ``asleep`` where a rank's ``resume`` fails.
        version: Version of the live weights.
        run: Gives what this rank's ``resume`` raised; calls it by default.

    Returns:
        The error, the same kind on every rank; None where all go on.
    """
    try:
        with vote(binding.engine, f"resuming at version {version}"):
            error = resume(binding, version) if run is None else run()
            if error is not None:
                raise error
    except BaseException as e:
        status.asleep = version
        now = status.now
        reason = f"version {version} is live and proven, but resume() failed ({e}): the engine may stand still"
        status.set(durable=False, state="behind", version=now.version, manifest=now.manifest, reason=reason)
        return e
    status.asleep = None
    return None


def taint(binding: Binding, status: StatusFile, reason: str) -> None:
    """Record, durably and before anything else, that the weights are in an unknown state; then quarantine the engine."""
    # The file says `updating` where it cannot be written: never served either.
    status.set(durable=False, state="tainted", reason=reason)
    binding.engine.quarantine(reason)


def back_to(status: StatusFile, was: Status) -> None:
    """Nothing was touched, or all was put back: the status is what it was."""
    # Where the disk refuses, it still has `updating` or what was: a restart is then careful without need, never
    # careless.
    status.set(durable=False, state=was.state, version=was.version, manifest=was.manifest, reason=was.reason)
