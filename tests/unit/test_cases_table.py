"""The table of cases names tests that exist, and knows every number that a test is named after."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def rows() -> dict[str, set[tuple[str, str]]]:
    """File and name of the tests of each case."""
    found: dict[str, set[tuple[str, str]]] = {}
    for line in (TESTS / "cases.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 3 and "::" in cells[2]:
            found[cells[0]] = set(re.findall(r"([\w/]+\.py)::(\w+)", cells[2]))
    return found


def functions(file: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE))


def test_every_test_of_the_table_exists() -> None:
    table = rows()
    assert len(table) > 70
    by_file = {file: functions(TESTS / file) for tests in table.values() for file, _ in tests}
    lost = [
        f"{case}: {file}::{name}" for case, tests in table.items() for file, name in tests if name not in by_file[file]
    ]
    assert not lost
    assert not [case for case, tests in table.items() if not tests]


def test_every_number_in_a_name_is_a_case_of_the_table() -> None:
    known = rows().keys()
    unknown = []
    for file in TESTS.glob("*/test_*.py"):
        for name in functions(file):
            numbers = re.match(r"test_case_((?:\d+_(?:and_)?)+)", name)
            for number in re.findall(r"\d+", numbers[1]) if numbers else ():
                if str(int(number)) not in known:
                    unknown.append(f"{int(number)}: {file.relative_to(TESTS)}::{name}")
    assert not unknown
