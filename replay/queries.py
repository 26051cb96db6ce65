"""The named queries of `replay/sql/`, with their parameters spelled for the database that runs them.

Knows the files and the spelling of parameters; does not know what a query means or who runs it.
Law: SQL lives in files, each statement under `-- name: NAME` and a sentence, and is never built from strings.

Files write parameters as `:tip`; DuckDB wants `$tip`, ADBC `$1`, and SQLite and SQLAlchemy take them as they
are. They look into a parameter that is a JSON array as SQLite does: `in (select value from json_each(:only))`.

>>> "$max_depth" in query("chain")
True
>>> numbered("select :low, :high, :low").text
'select $1, $2, $1'
>>> spelled("select :low, :name", {"low": 1, "name": "it's"})
"select 1, E'it''s'"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from replay.errors import UnknownQuery
from store.statements import named

Dialect = Literal["duckdb", "sqlalchemy", "sqlite", "postgresql"]

_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")  # not the second colon of a cast
_ARRAY = re.compile(r"\bin \(select (.+?) from json_each\((:\w+)\)\)")
_AS_ARRAY = r"= any(array(select \1 from json_array_elements_text(cast(\2 as json)) as listed(value)))"
"""One walk along an index for the whole list; as a join PostgreSQL probes once a value, in any order, and sorts."""


def query(name: str, dialect: Dialect = "duckdb") -> str:
    """The text of one named query, ready for its database."""
    known = _known()
    if name not in known:
        raise UnknownQuery(name, known)
    if dialect == "postgresql":
        return _ARRAY.sub(_AS_ARRAY, known[name])
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


def spelled(text: str, values: Mapping[str, int | str]) -> str:
    """The query with its values in place, for PostgreSQL, which streams (by COPY) what has no parameters.

    A backslash or a quote in a value is one, whatever the server takes plain strings for.
    """
    return _PARAMETER.sub(lambda found: _literal(values[found[1]]), text)


def _literal(value: int | str) -> str:
    if isinstance(value, int):
        return str(value)
    return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


@cache
def _known() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(files("replay").joinpath("sql").iterdir(), key=lambda file: file.name):
        found |= named(file.read_text(encoding="utf-8"))
    return found
