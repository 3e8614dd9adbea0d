"""Refuses arguments of the wrong kind where an adapter is made, in words: what came, what is expected, what to do.

Before anything else in the adapters' constructors: later, the same mistakes end in an AttributeError deep inside, or pass
unseen (a text is a sequence of letters). Must import nothing of megasync.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

_KINDS = {"texts": str, "regular expressions": str | re.Pattern}


def kind_of(given: object) -> str:
    """What was given, for a message."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def require_module(who: str, given: object, what: str = "its module") -> None:
    """Refuse what is no live module.

    Raises:
        TypeError: With what to give instead.
    """
    if isinstance(given, torch.nn.Module):
        return
    instead = "the live model itself"
    if isinstance(given, Mapping):
        instead += ", not its state_dict()"
    elif isinstance(given, type):
        instead += ", not its class"
    elif isinstance(given, Sequence):
        instead += ", not a sequence or a name"
    raise TypeError(f"{who} got {kind_of(given)} for {what}, expected a torch.nn.Module: give {instead}")


def require_callable(who: str, argument: str, given: object) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: With the argument's name.
    """
    if not callable(given):
        raise TypeError(f"{who} got {kind_of(given)} for {argument}, expected a function: give one that can be called")


def listed(who: str, argument: str, given: Iterable[T], kind: str = "texts") -> tuple[T, ...]:
    """The items of an argument that is a list of texts or of functions.

    Args:
        who: The adapter.
        argument: Its name.
        given: What came; a text by itself is refused, for it would be taken letter by letter.
        kind: ``texts``, ``regular expressions`` (as texts or compiled) or ``functions``.

    Raises:
        TypeError: Something else, or an item of another kind.
    """
    if isinstance(given, str | bytes | re.Pattern) or not isinstance(given, Iterable):
        raise TypeError(f"{who} got {kind_of(given)} for {argument}, expected a list of {kind}: write {argument}=[...]")
    items = tuple(given)
    for item in items:
        if not (callable(item) if kind == "functions" else isinstance(item, _KINDS[kind])):
            raise TypeError(f"{who} got {kind_of(item)} among {argument}, expected a list of {kind}")
    return items


def pattern(who: str, argument: str, given: object) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        TypeError: No text.
        ValueError: A text that is none.
    """
    if isinstance(given, re.Pattern):
        return given
    if not isinstance(given, str):
        raise TypeError(f"{who} got {kind_of(given)} in {argument}, expected a regular expression as text")
    try:
        return re.compile(given)
    except re.error as e:
        raise ValueError(
            f"{who}: {given!r} in {argument} is no regular expression ({e}): put a backslash before characters that are meant "
            "as they are"
        ) from e
