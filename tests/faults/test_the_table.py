"""The page on faults names tests, and each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_line_of_the_table_names_a_test_that_exists() -> None:
    lines = [line for line in (TESTS.parent / "docs/faults.md").read_text().splitlines() if line.startswith("| ")]
    named = [re.search(r"`(?:tests/([\w/.]+?))?(?:::)?(test_\w+)?` \|$", line) for line in lines[1:]]
    assert len(named) >= 20
    for line, found in zip(lines[1:], named, strict=True):
        assert found is not None, f"names no test: {line}"
        files = [TESTS / found[1]] if found[1] else sorted((TESTS / "faults").glob("test_*.py"))
        assert all(file.is_file() for file in files), line
        if found[2]:
            assert any(f"def {found[2]}(" in file.read_text() for file in files), line
