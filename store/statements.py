"""The named statements of `store/sql/`.

Knows the files; does not know what a statement means or who runs it. Law: SQL lives in files, each statement under
`-- name: NAME` and a sentence, and is never built from strings.

>>> sorted(statements("lineage"))
['find_by_summary', 'opened_at', 'recent_requests']
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)


@cache
def statements(file: str) -> dict[str, str]:
    """The statements of one file, by their names."""
    _, *named = _NAME.split((files("store") / "sql" / f"{file}.sql").read_text(encoding="utf-8"))
    return {name: text.strip().rstrip(";") for name, text in zip(named[::2], named[1::2], strict=True)}
