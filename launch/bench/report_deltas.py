"""Real deltas in the report: medians by training phase, a table, and a picture.

Before it: bench_deltas, through report_rows. After it: report_figures and report_tables. Imports matplotlib only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.report_rows import Results, stat
from launch.bench.rows import Row

FILE = "deltas-cpu"
_MODEL = "wide"
_CODECS = ("sparse", "zstd", "snappy", "lz4", "snappy+zstd", "lz4+zstd", "auto")
_SHOWN = ("sparse", "zstd", "lz4+zstd", "auto")
_COLOURS = {"bf16": "#1f5fa8", "nvfp4": "#c2571a"}

_MOVES = (
    ("codes_ratio", "codes", "#c2571a"),
    ("scales_ratio", "block scales", "C2"),
    ("globals_ratio", "global scales", "C4"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """All rows of one kind of delta.

    Attributes:
        rows: By codec.
    """

    rows: dict[str, list[Row]]

    @property
    def first(self) -> Row:
        """A row, for what all have in common."""
        return self.rows["sparse"][0]

    def of(self, column: str, codec: str = "sparse") -> float:
        """Median of a column."""
        return stat(self.rows[codec], column).p50

    def over_weights(self, column: str, codec: str = "sparse") -> float:
        """Median of bytes over the bytes of all weights."""
        return stat(self.rows[codec], lambda r: r[column] / r["nbytes_in"]).p50


def phases(results: Results, **wanted: Any) -> list[Phase]:
    """Kinds of delta that have these values (``model``, ``export``, ``lr``, ``span``), in the order they were taken."""
    found: dict[str, dict[str, list[Row]]] = {}
    for r in results.files.get(FILE, []):
        if all(r.get(k) == v for k, v in wanted.items()):
            found.setdefault(r["case"], {}).setdefault(r["codec"], []).append(r)
    return [Phase(by_codec) for by_codec in found.values() if "sparse" in by_codec]


TITLE = (
    "Deltas of a real training run: the demo's policy gradient in phases of falling learning rate, BF16 and NVFP4 exports of"
    " the same weights, medians. **The model is small** (`wide` 6 MB of BF16, `moe` 2 MB), so a manifest, the fixed bytes of"
    " a frame and the touched blocks weigh far more than in a large one; payload over bound is without the manifest, fetched"
    " bytes with it. Shares of changed words carry over better, but depend on the learning rate: Adam moves a weight by about"
    " the rate, whatever the number of weights, and a BF16 weight w shows it once that adds up to its rounding step, |w| / 256"
    " to |w| / 128; an NVFP4 code only where a weight crosses the middle between two codes, which lie 8 to 33 % of the block's"
    " largest weight apart. So density grows with rate and with steps between syncs, and is higher where weights are small:"
)

HEADER = (
    "delta",
    "words",
    "bytes",
    "words a segment",
    "1 MiB blocks",
    "4 KiB pages",
    "block scales",
    "global scales",
    "bound, % of weights",
    "fetched, % of weights",
    *(f"{c} / bound" for c in _SHOWN),
)


def lines(results: Results) -> list[list[str]]:
    """Lines of the table: every rate at the shortest span, every span at the lowest rate, and the MoE there."""
    found = phases(results)
    if not found:
        return []
    lowest, shortest = (min(p.first[column] for p in found) for column in ("lr", "span"))
    out = []
    for p in found:
        low, short = p.first["lr"] == lowest, p.first["span"] == shortest
        if (low or short) if p.first["model"] == _MODEL else (low and short):
            out.append(_line(p))
    return out


def _line(p: Phase) -> list[str]:
    has_scales = "scales_ratio" in p.first
    return [
        p.first["case"],
        f"{p.of('words_ratio'):.3%}",
        f"{p.of('density'):.3%}",
        f"{p.of('segment_p50'):.0f}",
        f"{p.of('blocks_ratio'):.0%}",
        f"{p.of('pages_ratio'):.0%}",
        f"{p.of('scales_ratio'):.3%}" if has_scales else "",
        f"{p.of('globals_ratio'):.1%}" if has_scales else "",
        f"{100 * p.over_weights('bound_nbytes'):.3f}",
        f"{100 * p.over_weights('nbytes_out'):.3f}",
        *(_ratio(p, codec) for codec in _SHOWN),
    ]


def _ratio(p: Phase, codec: str) -> str:
    return f"{p.of('payload_over_bound_ratio', codec):.3f}" if codec in p.rows else ""


def series(results: Results) -> list[Phase]:
    """What the picture shows; empty where the rows are not there."""
    return phases(results, model=_MODEL)


def draw(page: Any, data: Sequence[Phase], results: Results) -> None:
    """Draw the picture: words, scales and bytes over the learning rate, payload over bound over the words changed."""
    (words, scales), (wire, codecs) = page.subplots(2, 2)
    spans = sorted({p.first["span"] for p in data})
    for export, colour in _COLOURS.items():
        for span, style in zip(spans, ("-", "--", ":", "-."), strict=False):
            mine = sorted((p for p in data if _is(p, export, span)), key=lambda p: p.first["lr"])
            rates = [p.first["lr"] for p in mine]
            label = f"{export.upper()}, every {span}"
            words.plot(rates, [100 * p.of("words_ratio") for p in mine], style, marker=".", color=colour, label=label)
            wire.plot(rates, [100 * p.over_weights("nbytes_out") for p in mine], style, marker=".", color=colour)
            bound = [100 * p.over_weights("bound_nbytes") for p in mine]
            wire.plot(rates, bound, "_", color="black", ms=7)
            if export == "nvfp4" and span in (spans[0], spans[-1]):
                for column, name, tint in _MOVES:
                    shares = [100 * p.of(column) for p in mine]
                    scales.plot(rates, shares, style, marker=".", color=tint, label=f"{name}, every {span}")
    for i, codec in enumerate(_CODECS):
        for export, marker in (("bf16", "o"), ("nvfp4", "^")):
            mine = [p for p in data if p.first["export"] == export and codec in p.rows]
            x = [100 * p.of("words_ratio", codec) for p in mine]
            y = [p.of("payload_over_bound_ratio", codec) for p in mine]
            strong = codec == "sparse"
            look: Any = {"color": _COLOURS["bf16"], "zorder": 3} if strong else {"color": f"C{i % 9 + 1}"}
            codecs.plot(x, y, marker, ms=4 if strong else 5, label=codec if export == "bf16" else None, **look)
    codecs.axhline(1, color="black", ls="--", lw=1)
    words.set(title="changed words", ylabel="% of all words", xlabel="learning rate")
    scales.set(title="what moves in NVFP4", ylabel="% of its kind", xlabel="learning rate")
    scales.set_yscale("symlog", linthresh=0.01)
    wire.set(title="fetched bytes, sparse (black: bound)", ylabel="% of the weights", xlabel="learning rate")
    codecs.set(title="payload by codec (o BF16, ^ NVFP4)", ylabel="payload / order-0 bound", xlabel="changed words, %")
    for axis in (words, wire, codecs):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    for axis in (words, scales, wire, codecs):
        axis.set_xscale("log")
    codecs.xaxis.set_major_formatter("{x:g}")
    for axis in (words, scales, codecs):
        axis.legend(frameon=False, fontsize=7)


def _is(p: Phase, export: str, span: int) -> bool:
    return bool(p.first["export"] == export and p.first["span"] == span)
