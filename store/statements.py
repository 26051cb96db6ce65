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
    return named((files("store") / "sql" / f"{file}.sql").read_text(encoding="utf-8"))


def named(text: str) -> dict[str, str]:
    r"""The statements of a text, by their names.

    >>> named("-- What for.\n\n-- name: one\n-- The number.\nselect 1;")
    {'one': '-- The number.\nselect 1'}
    """
    _, *parts = _NAME.split(text)
    return {name: statement.strip().rstrip(";") for name, statement in zip(parts[::2], parts[1::2], strict=True)}
