"""Three roles of PostgreSQL with only what each needs: worker, trainer, auditor.

Knows who may do what, in `sql/roles.sql`; does not know who logs in. Law: nobody but the owner can change the schema,
and nobody at all an event. A role is one that others are members of: `grant turnlog_worker to LOGIN` makes one.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, text

from store.errors import SharedRole, UnknownRole
from store.statements import statements

_NAME = re.compile(r"(?!pg_)(?!public$)[A-Za-z_][A-Za-z0-9_-]{0,62}")
_OWNERS = text(
    "select distinct rolname from pg_class join pg_roles on pg_roles.oid = relowner"
    " where relnamespace = current_schema()::regnamespace and relname = 'model_call'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What each role is called; None for one that is not wanted."""

    worker: str | None = None
    trainer: str | None = None
    auditor: str | None = None


ALL = Roles(worker="turnlog_worker", trainer="turnlog_trainer", auditor="turnlog_auditor")
"""The roles and names when nobody chooses."""


def grant(connection: Connection, roles: Roles) -> None:
    """Make these roles, or bring them to what they may do in this release. The caller commits.

    Raises UnknownRole and SharedRole.
    """
    for words in _statements(connection, roles):
        connection.exec_driver_sql(words, execution_options={"no_parameters": True})


def as_sql(connection: Connection, roles: Roles) -> str:
    """The same as SQL, for whoever runs it by hand; raises UnknownRole, SharedRole."""
    return "".join(f"{words};\n" for words in _statements(connection, roles))


def show_new_views(connection: Connection) -> None:
    """Let whoever reads the views read those that an upgrade has made; the caller commits."""
    connection.exec_driver_sql(statements("roles")["new_views"], execution_options={"no_parameters": True})


def _statements(connection: Connection, roles: Roles) -> list[str]:
    named = {kind: name for kind, name in asdict(roles).items() if name is not None}
    for name in named.values():
        if len(kinds := [kind for kind, other in named.items() if other == name]) > 1:
            raise SharedRole(name, kinds)
    owners = set(connection.scalars(_OWNERS))
    preparer = connection.dialect.identifier_preparer
    where = preparer.quote(connection.scalar(text("select current_schema()")))
    found: list[str] = []
    for kind, name in named.items():
        if not _NAME.fullmatch(name) or name in owners:
            raise UnknownRole(name)
        names = {"{role}": preparer.quote_identifier(name), "{same}": f"'{name}'", "{schema}": where}
        for part in ("role", kind):
            words = statements("roles")[part]
            for hole, put in names.items():
                words = words.replace(hole, put)
            found.append(words)
    return found
