"""The named queries of `replay/sql/`, with their parameters spelled for the database that runs them.

Knows the files and the spelling of parameters; does not know what a query means or who runs it.
Law: SQL lives in files, each statement under `-- name: NAME` and a sentence, and is never built from strings.

A file `X.sql` serves every database, `X.sqlite.sql` and `X.postgresql.sql` the one they name. Files write parameters as
`:tip`; DuckDB wants `$tip`, PostgreSQL's own protocol `$1`, and SQLite and SQLAlchemy take them as they are.

>>> "$max_depth" in query("chain")
True
>>> numbered("select :low, :high, :low").text
'select $1, $2, $1'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from replay.errors import UnknownQuery

Dialect = Literal["duckdb", "sqlalchemy", "sqlite", "postgresql"]

_NAME = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")  # not the second colon of a cast
_OWN = (".sqlite.sql", ".postgresql.sql")


def query(name: str, dialect: Dialect = "duckdb") -> str:
    """The text of one named query, ready for its database."""
    known = _known(dialect)
    if name not in known:
        raise UnknownQuery(name, known)
    return _PARAMETER.sub(r"$\1", known[name]) if dialect == "duckdb" else known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A query whose parameters are numbered, as PostgreSQL's protocol has them."""

    text: str
    names: tuple[str, ...]
    """Names of the parameters, the first one is `$1`."""


def numbered(text: str) -> Numbered:
    """Number the parameters in the order in which they first appear."""
    names = tuple(dict.fromkeys(_PARAMETER.findall(text)))
    return Numbered(text=_PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", text), names=names)


@cache
def _known(dialect: Dialect) -> dict[str, str]:
    known: dict[str, str] = {}
    for file in sorted(files("replay").joinpath("sql").iterdir(), key=lambda file: file.name):
        if file.name.endswith(f".{dialect}.sql") or (file.name.endswith(".sql") and not file.name.endswith(_OWN)):
            _, *named = _NAME.split(file.read_text(encoding="utf-8"))
            known.update(zip(named[::2], (text.strip() for text in named[1::2]), strict=True))
    return known
