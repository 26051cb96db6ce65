"""The named queries of `replay/sql/`, with their parameters spelled for the database that runs them.

Knows the files and the spelling of parameters; does not know what a query means or who runs it.
Law: SQL lives in files, each statement under `-- name: NAME` and a sentence, and is never built from strings.

Files write parameters as `:tip`; DuckDB wants `$tip`, PostgreSQL's own protocol `$1`, and SQLite and SQLAlchemy take
them as they are. They open a parameter that is a JSON array as `json_each(:only)`, a table of `value`, as SQLite does.

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
from store.statements import named

Dialect = Literal["duckdb", "sqlalchemy", "sqlite", "postgresql"]

_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")  # not the second colon of a cast
_ARRAY = re.compile(r"json_each\((:\w+)\)")


def query(name: str, dialect: Dialect = "duckdb") -> str:
    """The text of one named query, ready for its database."""
    known = _known()
    if name not in known:
        raise UnknownQuery(name, known)
    if dialect == "postgresql":
        return _ARRAY.sub(r"json_array_elements_text(cast(\1 as json)) as listed(value)", known[name])
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
def _known() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(files("replay").joinpath("sql").iterdir(), key=lambda file: file.name):
        found |= named(file.read_text(encoding="utf-8"))
    return found
