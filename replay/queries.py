"""The named queries of `replay/sql/`, with their parameters spelled for the database that runs them.

Knows the files and the spelling of parameters; does not know what a query means or who runs it.
Law: SQL lives in files, each statement under `-- name: NAME` and a sentence, and is never built from strings.

Files write parameters as `:tip`; DuckDB wants `$tip`, SQLAlchemy's `text` takes them as they are.

>>> "$max_depth" in query("chain")
True
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Literal

from replay.errors import UnknownQuery

Dialect = Literal["duckdb", "sqlalchemy"]

_NAME = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")  # not the second colon of a cast


def query(name: str, dialect: Dialect = "duckdb") -> str:
    """The text of one named query, ready for its database."""
    known: dict[str, str] = {}
    for file in sorted(files("replay").joinpath("sql").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql"):
            _, *named = _NAME.split(file.read_text(encoding="utf-8"))
            known.update(zip(named[::2], named[1::2], strict=True))
    if name not in known:
        raise UnknownQuery(name, known)
    text = known[name].strip()
    return _PARAMETER.sub(r"$\1", text) if dialect == "duckdb" else text
