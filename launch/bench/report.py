"""Makes the README's measured part, the pictures and ``summary.json`` from the raw rows of the benchmarks.

    python -m launch.bench.report            # write all three
    python -m launch.bench.report --check    # write nothing; status 1 where README or summary is not what the rows give

Every figure comes from the rows; none is typed. Targets without rows are listed as not measured, with the reason. A
broken row file, or a folder without any, ends it with status 2 and nothing is written. Before it: the benchmarks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import Parser
from launch.bench.places import folder_fault
from launch.bench.report_figures import draw_all
from launch.bench.report_rows import BrokenRowsError, Results
from launch.bench.report_tables import block
from launch.bench.report_targets import summarize
from launch.bench.rows import RESULTS

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def make_texts(results: Results, readme: Path) -> dict[Path, str]:
    """What the files should hold, by path: summary and README.

    Args:
        results: The rows.
        readme: The README with both markers; read, not written.

    Raises:
        ValueError: The markers are not there once, in order.
    """
    text = readme.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in head + tail:
        raise ValueError(f"{readme}: expected {BEGIN} and then {END}, once each, each on a line of its own")
    folder = os.path.relpath(results.folder, readme.parent)
    return {
        results.folder / "summary.json": json.dumps(summarize(results), indent=1, allow_nan=False) + "\n",
        readme: f"{head}{BEGIN}\n{block(results, folder)}{END}{tail}",
    }


def stale(texts: Mapping[Path, str]) -> list[Path]:
    """Files that do not hold what the rows give."""
    return [path for path, text in texts.items() if not path.exists() or path.read_text() != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = Parser(__doc__, results=False)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--readme", type=Path, default=README)
    asked = parser.parse_args(arguments)
    try:
        results = Results(asked.results)
        if not results.files:
            why = "holds no *.jsonl" if asked.results.is_dir() else "is no folder"
            raise ValueError(
                f"{asked.results} {why}: take samples with bash launch/bench.sh, or name a folder with --results"
            )
        texts = make_texts(results, asked.readme)
        written = {"--results ": asked.results, "--readme ": asked.readme.parent}
        if not asked.check and (faults := [x for n, f in written.items() if (x := folder_fault(n, str(f)))]):
            raise ValueError("; ".join(faults))
    except (BrokenRowsError, ValueError, OSError) as e:
        print(f"report: {e}; nothing was written", file=sys.stderr)
        return 2
    for line in results.missing():
        print(f"report: {line}", file=sys.stderr)
    for name in results.unread():
        print(f"report: {name}.jsonl is read by no table or target", file=sys.stderr)
    if asked.check:
        differ = stale(texts)
        for path in differ:
            print(f"report: {path} is not what the rows give; bash launch/bench.sh --report", file=sys.stderr)
        return 1 if differ else 0
    drawn = draw_all(results, asked.results)
    for path, text in texts.items():
        path.write_text(text)
    summary = json.loads(texts[asked.results / "summary.json"])
    for name, entry in summary.items():
        print(f"{name:>4} {'met ' if entry['met'] else 'open'} {entry['value']} {entry['unit']}")
    print(f"wrote {', '.join(str(p) for p in (*texts, *drawn))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
