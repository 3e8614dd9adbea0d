"""Opens a sink by its URL; other packages add schemes through the entry-point group ``megasync.sinks``.

A sink's code, and the library it needs, is imported when the first sink of its scheme is opened. Must not import
trainer or receiver.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from megasync.sinks.base import Sink

ENTRY_POINTS = "megasync.sinks"
Factory = Callable[..., Sink]


def open_sink(place: str | os.PathLike[str] | Mapping[str, Any] | Any, **options: Any) -> Sink:
    """Open a sink.

    Args:
        place: A URL, a path, or a mapping or dataclass with ``url`` and options beside it (None: not given). Known:
            ``/path`` or ``file:///path`` (a directory), ``memory://name`` (this process), ``s3://bucket/prefix``,
            ``gs://bucket/prefix``, ``az://...``, ``pg://`` (every rank of the torch.distributed world must call) and
            ``pg://host:port`` (from outside that world, with option ``secret`` in hexadecimal).
        **options: Arguments of the sink (see its class); they win over the URL's query, which gives them as text.

    Returns:
        The sink; the caller closes it.

    Raises:
        ValueError: An unknown scheme or option; the message lists the known ones.
        MissingPackageError: The sink needs a package that is not installed.
    """
    url, given = _split_place(place)
    given.update(options)
    if "://" not in url:
        return _open_file(_path_of(url), **given)
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "secret" in query or any("secret" in name or "password" in name for name in query):
        raise ValueError(f"a secret in the URL of a {parts.scheme} sink would end up in logs: give it as an option")
    factory = _factory(parts.scheme)
    bare = urlunsplit(parts._replace(query="", fragment=""))
    try:
        return factory(bare, **{**query, **given})
    except TypeError as error:
        raise ValueError(f"sink {bare!r} with options {sorted({**query, **given})}: {error}") from error


def known_schemes() -> dict[str, str]:
    """Every scheme and where its factory is, entry points of installed packages included.

    Raises:
        ValueError: Two packages claim one scheme.
    """
    known = {scheme: f"{__name__}:{factory.__name__}" for scheme, factory in _BUILT_IN.items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if known.setdefault(entry.name, entry.value) != entry.value:
            raise ValueError(
                f"sink scheme {entry.name!r} is claimed by {known[entry.name]} and by {entry.value}: uninstall one"
            )
    return known


def _factory(scheme: str) -> Factory:
    known = known_schemes()
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
        loaded: Factory = entry.load()
        return loaded
    raise ValueError(f"no sink for scheme {scheme!r}; known: a path, {', '.join(s + '://' for s in sorted(known))}")


def _split_place(place: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(place, str | os.PathLike):
        return str(os.fspath(place)), {}
    if dataclasses.is_dataclass(place) and not isinstance(place, type):
        place = {field.name: getattr(place, field.name) for field in dataclasses.fields(place)}
    if not isinstance(place, Mapping) or not isinstance(place.get("url"), str):
        raise ValueError(f"a sink is a URL, a path, or a mapping or dataclass with 'url', not {place!r:.200}")
    given = {name: value for name, value in place.items() if name != "url" and value is not None}
    return place["url"], given


def _path_of(place: str) -> str:
    """A path, or ``file:/path``; what begins like a URL is refused rather than made a folder of that name."""
    scheme, colon, rest = place.partition(":")
    if not colon or scheme.lower() not in known_schemes():
        return place
    if scheme.lower() == "file" and rest.startswith("/"):
        return unquote(rest)
    raise ValueError(
        f"sink {place!r} is neither a URL nor a plain path: write {scheme}://... with two slashes as text (a Path drops one), "
        f"file:///absolute/path, or ./{place} for a folder of that name"
    )


def _int(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sink option {name} must be a whole number, not {value!r}") from error


def _ints(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Options that a query gives as text, as numbers."""
    return {name: _int(name, value) if name in names else value for name, value in options.items()}


def _open_file(path: str, **options: Any) -> Sink:
    from megasync.sinks.local import LocalSink

    if not path:
        raise ValueError("a sink needs a path or a URL, not an empty text")
    return LocalSink(path, **options)


def _open_file_url(url: str, **options: Any) -> Sink:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(
            f"sink {url!r}: write file:///absolute/path (three slashes), or a plain path for a relative one"
        )
    return _open_file(unquote(parts.path), **options)


def _open_memory(url: str, **options: Any) -> Sink:
    from megasync.sinks.memory import MemorySink

    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise ValueError(f"sink {url!r}: write memory://name, without a path")
    return MemorySink.named(parts.netloc, **_ints(options, "max_nbytes", "num_versions"))


def _open_object_store(url: str, **options: Any) -> Sink:
    from megasync.sinks.object_store import ObjectStoreSink

    return ObjectStoreSink.from_url(url, **_ints(options, "max_object_nbytes"))


def _open_process_group(url: str, **options: Any) -> Sink:
    parts = urlsplit(url)
    if not parts.netloc:
        from megasync.sinks.process_group import ProcessGroupSink

        numbers = ("host_rank", "port", "max_nbytes", "num_versions")
        return ProcessGroupSink(**_ints(options, *numbers))
    from megasync.sinks.remote import RemoteSink

    if set(options) != {"secret"} or not parts.hostname or not parts.port:
        raise ValueError(f"sink {url!r}: pg://host:port takes the option 'secret' (hexadecimal) and nothing else")
    try:
        secret = bytes.fromhex(options["secret"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"sink {url!r}: the secret is not hexadecimal text") from error
    return RemoteSink([(parts.hostname, parts.port)], secret)


_BUILT_IN: Mapping[str, Factory] = {
    "file": _open_file_url,
    "memory": _open_memory,
    "s3": _open_object_store,
    "gs": _open_object_store,
    "az": _open_object_store,
    "pg": _open_process_group,
}
