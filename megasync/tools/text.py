"""What the commands print for people: nested facts as indented lines. Must import nothing of megasync."""

from __future__ import annotations

from typing import Any

_SENTENCES = ("faults",)
"""Lists of sentences, which stand on a line each."""


def text_of(value: Any, indent: int = 0) -> str:
    """Nested dicts and lists as indented lines; long lists of short items are cut.

    Args:
        value: As it would be written as JSON.
        indent: Spaces before each line.
    """
    pad = " " * indent
    if isinstance(value, dict):
        lines = []
        for k, v in value.items():
            if k in _SENTENCES and isinstance(v, list) and v:
                lines.append(f"{pad}{k}:" + "".join(f"\n{pad}  - {sentence}" for sentence in v))
            elif (isinstance(v, dict) and v) or (isinstance(v, list) and v and isinstance(v[0], dict)):
                lines.append(f"{pad}{k}:\n{text_of(v, indent + 2)}")
            else:
                lines.append(f"{pad}{k}: {_flat(v)}")
        return "\n".join(lines)
    if isinstance(value, list):
        return f"\n{pad}--\n".join(text_of(v, indent) for v in value)
    return f"{pad}{_flat(value)}"


def _flat(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(str, value[:20])) + (f" ... ({len(value)} in all)" if len(value) > 20 else "") or "none"
    return str(value)
