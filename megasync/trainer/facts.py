"""A user's facts about a publication, as the manifest can carry them. Beside the callback. Must import nothing of megasync."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

log = logging.getLogger("megasync.trainer.callback")


def facts_of(facts: Callable[[], Mapping[str, object]]) -> dict[str, str | int | float]:
    """The facts, as far as there are any: the pass has begun, so that an error here would lose its changes.

    Args:
        facts: Gives them; numbers of another library become Python's own, anything else text.
    """
    try:
        return {str(k): v if type(v) in (str, int, float) else _plain(v) for k, v in facts().items()}  # type: ignore[misc]
    except Exception as e:
        log.warning("megasync: facts() failed (%s: %s); the version is published without", type(e).__name__, e)
        return {}


def _plain(value: object) -> str | int | float:
    number = value.item() if hasattr(value, "item") else value
    return number if type(number) in (int, float) else str(value)  # type: ignore[return-value]
