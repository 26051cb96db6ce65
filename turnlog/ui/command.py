"""`turnlog ui`: the page over a log, until it is interrupted.

Knows arguments and the server that runs the page; does not know pages. Law: the page is not reachable from other
machines without a token, and neither the token nor what is looked at is written to any log.
"""

from __future__ import annotations

import socket
import sys
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from turnlog.console import Db, opened
from turnlog.ui.errors import CannotListen, MissingParts

NEEDED = ("fastapi", "uvicorn", "jinja2")


def ui(
    url: Db = None,
    host: Annotated[str, typer.Option(help="Where to listen; another than this machine's own takes a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 7080,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TURNLOG_UI_TOKEN", help="What readers must show; what is typed here, others here can see."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Of the served model, to see texts in place of token ids.")
    ] = None,
) -> None:
    """Look at the log in a browser: rollouts as lanes, calls token by token, training steps, boundaries. Reads only."""
    from store.database import shown_url
    from turnlog.ui.door import expect_guarded

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise MissingParts(missing)
    import uvicorn

    from turnlog.tokenizer import open_tokenizer
    from turnlog.ui.app import build

    expect_guarded(host, token)
    with opened(url) as database:
        detokenizer = None if tokenizer is None else open_tokenizer(tokenizer)
        page = build(database, shown_log=shown_url(database.url), token=token, tokenizer=detokenizer)
        config = uvicorn.Config(page, log_level="warning", access_log=False, server_header=False)
        with _listening(host, port) as listens:
            place, at = listens.getsockname()[:2]
            named = f"[{place}]" if ":" in place else place
            said = f"turnlog ui: [bold]http://{named}:{at}/[/] shows {escape(shown_url(database.url))}"
            Console(soft_wrap=True, highlight=False).print(said + ("; it asks for the token" if token else ""))
            sys.stdout.flush()
            uvicorn.Server(config).run(sockets=[listens])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises CannotListen."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise CannotListen(host, port, error.strerror or str(error)) from error
