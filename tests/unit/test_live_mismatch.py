"""Which errors say that an engine's live words are no version."""

from __future__ import annotations

import pytest

from megasync.errors import (
    BaseMismatchError,
    LiveMismatchError,
    RankFailedError,
    ReplicaDriftError,
    UndoneError,
    is_live_mismatch,
)


def undone(cause: Exception) -> UndoneError:
    error = UndoneError("undone")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LiveMismatchError("w"), True),
        (ReplicaDriftError("w"), True),
        (undone(ReplicaDriftError("w")), True),
        (RankFailedError("write", {0: "OSError: disk", 1: "ReplicaDriftError: w"}), True),
        (BaseMismatchError("another version"), False),
        (None, False),
        (undone(LiveMismatchError("w")), True),
        (undone(OSError("disk")), False),
        (RankFailedError("write", {0: "OSError: disk", 1: "LiveMismatchError: w"}), True),
        (RankFailedError("write", {0: "OSError: disk", 1: "BaseMismatchError: LiveMismatchError: no"}), False),
        (undone(RankFailedError("write", {1: "LiveMismatchError: w", 2: "MemoryError: m"})), True),
    ],
)
def test_live_words_of_any_rank_and_behind_an_undo_count(error: BaseException | None, expected: bool) -> None:
    assert is_live_mismatch(error) is expected
