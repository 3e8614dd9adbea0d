"""Writes the golden files of format 1 and the example of ``FORMAT.md``. Deterministic.

``python -m tests.golden.make_format1`` writes ``format1_sink.tar`` (the files of a local sink), ``format1_expected.json``
(what every version must be) and the example anew. Released golden files are never rewritten: they must decode for ever.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from megasync.codecs.planes import LIBRARY
from megasync.sinks.base import Sink
from megasync.sinks.memory import MemorySink
from tests.golden import format1_inputs as inputs
from tests.golden.format1_example import DOCUMENT, with_example
from tests.golden.format1_writer import Run

HERE = Path(__file__).parent
SINK, EXPECTED = HERE / "format1_sink.tar", HERE / "format1_expected.json"
LIBRARIES = {"zstd": LIBRARY, "cramjam": version("cramjam")}


def write_steps(sink: Sink) -> Iterator[Run]:
    """``golden-steps``: a checkpoint, every codec, an empty delta, split tiles, a lost version and three epochs."""
    run = Run.begin(sink, "golden-steps", inputs.STEPS_ROWS)
    run.checkpoint()
    yield run
    for number, (codec, what) in enumerate(inputs.STEPS, start=1):
        run.delta(number, inputs.change(run.words, number, what), [codec])
        yield run
    run.restart(b"golden-2")
    mixed = ["sparse", "zstd", "auto"]
    run.delta(9, inputs.change(run.words, 9, inputs.SPLIT_STEP), mixed, (0, 0, 1))
    yield run
    run.delta(10, inputs.change(run.words, 10, inputs.SPLIT_STEP), mixed, (0, 1, 1), lost=True)
    run.delta(11, inputs.change(run.words, 11, inputs.SPLIT_STEP), ["sparse"] * 3, (1, 0, 1))
    yield run


def write_anchored(sink: Sink, name: str, key: bytes | None = None) -> Iterator[Run]:
    """An anchor of three owners whose cuts cross tiles, a delta, an anchor of one owner, a delta."""
    run = Run.begin(sink, name, inputs.ANCHOR_ROWS, key=key)
    run.anchor(0, run.words, (0, 0, 1))
    yield run
    for number in (1, 2, 3):
        new = inputs.change(run.words, number, inputs.ANCHOR_STEP)
        if number == 2:
            run.anchor(2, new, (0,))
        else:
            run.delta(number, new, ["sparse"])
        yield run


def write_signed_steps(sink: Sink) -> Iterator[Run]:
    """A signed checkpoint and a delta."""
    run = Run.begin(sink, "golden-signed-steps", inputs.ANCHOR_ROWS, key=inputs.SIGN_KEY)
    run.checkpoint()
    yield run
    run.delta(1, inputs.change(run.words, 1, inputs.ANCHOR_STEP), ["sparse"])
    yield run


RUNS: dict[str, Callable[[Sink], Iterator[Run]]] = {
    "golden-steps": write_steps,
    "golden-anchor": partial(write_anchored, name="golden-anchor"),
    "golden-signed": partial(write_anchored, name="golden-signed", key=inputs.SIGN_KEY),
    "golden-signed-steps": write_signed_steps,
}


def write_all(sink: Sink) -> dict[str, list[dict[str, object]]]:
    """Write every golden run; returns the facts of every durable version."""
    out: dict[str, list[dict[str, object]]] = {}
    for name, write in RUNS.items():
        out[name] = [facts_of(run) for run in write(sink)]
    return out


def facts_of(run: Run) -> dict[str, object]:
    """What a reader must find of a run's newest version."""
    sha = {name: sha256(words.tobytes()).hexdigest() for name, words in run.words.items()}
    head = run.lineage.head
    return {"version": head.version, "epoch": head.epoch, "manifest": head.digest.hex(), "sha256": sha}


def files_of(sink: MemorySink) -> dict[str, bytes]:
    """Everything in a sink as the files of a local one, by path."""
    keys = list(sink.keys(""))
    heads = {f".heads/{run}.head": sink.read_head(run) or b"" for run in sorted({k.split("/")[0] for k in keys})}
    return {**heads, **{key: sink.read(key) for key in keys}}


def tar_of(files: dict[str, bytes]) -> bytes:
    """A plain tar archive, the same for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read_tar(data: bytes) -> dict[str, bytes]:
    """The files of an archive, by path."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


def main() -> None:
    """Write the golden files and the example."""
    sink = MemorySink()
    runs = write_all(sink)
    SINK.write_bytes(tar_of(files_of(sink)))
    expected = {"libraries": LIBRARIES, "key": inputs.SIGN_KEY.hex(), "runs": runs}
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
    DOCUMENT.write_text(with_example(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
