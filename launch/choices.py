"""Settings whose fields are Enums, filled by Hydra with the text of a member: its value (``host``) or its name (``HOST``).

OmegaConf fills an Enum by name only, while Python, messages and documents speak of values. So Hydra is given a twin of the
settings class whose Enums are text, and what it composed is made the settings class itself. Between Hydra and the entry
points of launch/; must not import Megatron or transformers.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

T = TypeVar("T")


@cache
def schema_of(kind: type) -> type:
    """The twin of a settings class that Hydra's configuration store is given.

    Args:
        kind: A dataclass; fields may be dataclasses, and Enums alone, optional, or in lists, tuples and dicts.

    Returns:
        A dataclass of the same name, fields and defaults; it is not frozen, since OmegaConf lets nothing fill a frozen one.
    """
    hints = get_type_hints(kind)
    made: list[Any] = []
    for f in fields(kind):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if default is MISSING:
            made.append((f.name, _hint(hints[f.name])))
        else:
            made.append((f.name, _hint(hints[f.name]), field(default_factory=partial(_plain, default))))
    return make_dataclass(kind.__name__, made)


def typed(kind: type[T], config: Any) -> T:
    """The settings of what Hydra composed from their schema.

    Args:
        kind: The class that ``schema_of`` was given.
        config: A DictConfig of that schema.

    Raises:
        ValueError: A text that is no member, with all of them; or a value that a dataclass itself refuses.
    """
    faults: list[str] = []
    given = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(given, dict)
    read = _read(kind, given, "", faults)
    if faults:
        raise ValueError("; ".join(faults))
    return _made(kind, read)


def _hint(hint: Any) -> Any:
    """A field's type with text for Enums and twins for dataclasses."""
    if isinstance(hint, type) and not get_args(hint):
        return str if issubclass(hint, Enum) else schema_of(hint) if is_dataclass(hint) else hint
    arguments = tuple(_hint(a) for a in get_args(hint))
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return Union[arguments]  # noqa: UP007
    return origin[arguments] if arguments and origin is not None else hint


def _plain(value: Any) -> Any:
    """A default as the twin has it."""
    if isinstance(value, Enum):
        return str(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return schema_of(type(value))(**{f.name: _plain(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _read(hint: Any, given: Any, at: str, faults: list[str]) -> Any:
    """Plain values with the Enums in place; what no Enum has is added to the faults."""
    if given is None:
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint, str(given), at, faults)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return {f.name: _read(hints[f.name], given[f.name], f"{at}.{f.name}".lstrip("."), faults) for f in fields(hint)}
    inner = [a for a in get_args(hint) if a not in (type(None), ...)]
    if get_origin(hint) in (Union, types.UnionType) and len(inner) == 1:
        return _read(inner[0], given, at, faults)
    if isinstance(given, list) and inner:
        return [_read(inner[0], v, f"{at}[{i}]", faults) for i, v in enumerate(given)]
    if isinstance(given, dict) and len(inner) == 2:
        return {k: _read(inner[1], v, f"{at}.{k}", faults) for k, v in given.items()}
    return given


def _member(kind: type[Enum], text: str, at: str, faults: list[str]) -> Enum | None:
    members = [m for m in kind if text in (str(m.value), m.name)]
    if not members:
        faults.append(f"{at}={text}: expected one of {', '.join(str(m.value) for m in kind)}")
        return None
    # A text that is one member's value and another one's name means the value, which is what messages show.
    return next((m for m in members if text == str(m.value)), members[0])


def _made(kind: type[T], read: Mapping[str, Any]) -> T:
    """The dataclass, its own dataclasses first."""
    hints = get_type_hints(kind)
    return kind(
        **{
            name: _made(hints[name], value) if is_dataclass(hints[name]) and isinstance(value, dict) else value
            for name, value in read.items()
        }
    )
