"""The web page: which address shows what.

Knows addresses, templates and which reading answers which page; holds no rule of its own. Law: every page is made of
one read-only snapshot of the log, works without scripts and without anything from elsewhere, and what a reader can
cause ends in a page that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any
from uuid import UUID

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import Engine
from starlette.exceptions import HTTPException

from replay.errors import UnknownRollout
from replay.media import MediaSource
from store.database import read
from store.errors import (
    DamagedTensors,
    LogUnavailable,
    MediaDamaged,
    MediaMissing,
    MediaUnavailable,
    MediaUnreadable,
)
from turnlog.boundary import Detokenizer
from turnlog.ui import boundaries, call, history, lanes, listing, pictures, runs, tokens, words
from turnlog.ui.door import Door, safe_path
from turnlog.ui.errors import NoPicture, PageError
from turnlog.ui.plots import colour, fill_plot, harness_table, row_plot, staleness_plot, token_plot, week_plot

Place = Annotated[int | None, Query(ge=0, lt=2**63)]


def build(database: Engine, *, shown_log: str, token: str | None = None, tokenizer: Detokenizer | None = None) -> Door:
    """The page over one log; `shown_log` is what it calls the log. The caller disposes of the database."""
    held = MediaSource(database.url.render_as_string(hide_password=False))
    app = FastAPI(title="turnlog", docs_url=None, redoc_url=None, openapi_url=None)
    templates = words.environment()
    static = files("turnlog.ui") / "static"
    style = (static / "style.css").read_text(encoding="utf-8")
    picture = (static / "icon.svg").read_text(encoding="utf-8")

    def shown(name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        text = templates.get_template(f"{name}.html.jinja").render(log=shown_log, guarded=token is not None, **values)
        return HTMLResponse(text, status_code=status, headers={"cache-control": "no-store"})

    def failed(status: int, said: str) -> HTMLResponse:
        return shown("error", status=status, title=HTTPStatus(status).phrase, said=said)

    @app.get("/style.css")
    def style_sheet() -> Response:
        return Response(style, media_type="text/css", headers={"cache-control": "max-age=60"})

    @app.get("/icon.svg")
    def icon() -> Response:
        return Response(picture, media_type="image/svg+xml", headers={"cache-control": "max-age=3600"})

    @app.get("/login")
    def login(wanted: Annotated[str, Query(alias="next")] = "/", wrong: bool = False) -> HTMLResponse:
        return shown("login", wanted=safe_path(wanted), wrong=wrong)

    @app.get("/")
    def rollouts(filters: Annotated[listing.Filters, Query()]) -> HTMLResponse:
        with read(database) as connection:
            return shown(
                "rollouts",
                filters=filters,
                page=listing.page(connection, filters),
                states=listing.STATES,
                harnesses=listing.harnesses(connection),
                reasons=boundaries.reasons(connection),
            )

    @app.get("/rollouts/{rollout_id}")
    def rollout(rollout_id: str, first: Place = None) -> HTMLResponse:
        with read(database) as connection:
            found = history.load(connection, rollout_id)
        return shown("rollout", rollout=found, picture=lanes.draw(found, first=first or 1), geometry=lanes)

    @app.get("/calls/{call_id}")
    def one_call(call_id: UUID, first: Place = None, table: bool = False) -> HTMLResponse:
        with read(database) as connection:
            found = call.load(connection, call_id)
            completed = found.completed
            before = call.images_before(connection, found)
            compared = None if completed is None else call.compared(connection, completed, tokenizer)
        return shown(
            "call",
            call=found,
            before=before,
            part=None if completed is None or not completed.delta_len else tokens.part(completed, tokenizer, first),
            detokenized=tokenizer is not None,
            compared=compared,
            as_table=table,
            shades=tokens.PROBABILITIES,
        )

    @app.get("/pictures/{sha256}.png")
    def one_picture(sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
        with read(database) as connection:
            shown = call.occurrence(connection, bytes.fromhex(sha256))
        try:
            made = pictures.picture(held.tensors(shown.sha256), tokens=shown.tokens, height=shown.height)
        except (MediaUnavailable, MediaUnreadable, MediaMissing, MediaDamaged, DamagedTensors) as error:
            raise NoPicture(sha256, str(error)) from error
        if made is None:
            raise NoPicture(sha256, "its tensors are laid out in a way that this page does not know")
        # Content-addressed, so it never changes; but only for who may see the log.
        return Response(made, media_type="image/png", headers={"cache-control": "private, max-age=86400"})

    @app.get("/runs")
    def all_runs() -> HTMLResponse:
        with read(database) as connection:
            return shown("runs", runs=runs.runs(connection))

    @app.get("/run")
    def one_run(asked: Annotated[runs.Asked, Query()]) -> HTMLResponse:
        with read(database) as connection:
            found = runs.steps(connection, asked)
        return shown(
            "run",
            run=asked.name,
            found=found,
            asked=asked,
            tokens=token_plot(asked.name, found.steps),
            staleness=staleness_plot(asked.name, found.steps),
            fill=None if asked.budget is None else fill_plot(asked.name, found.steps),
        )

    @app.get("/step")
    def one_step(run: str, number: Annotated[int, Query(ge=0, lt=2**63)]) -> HTMLResponse:
        with read(database) as connection:
            return shown("step", run=run, step=runs.step(connection, run, number))

    @app.get("/boundaries")
    def statistics(window: Annotated[boundaries.Window, Query()]) -> HTMLResponse:
        with read(database) as connection:
            counts = boundaries.counts(connection, window)
            harnesses = listing.harnesses(connection)
        return shown(
            "boundaries",
            window=window,
            counts=counts,
            harnesses=harnesses,
            weeks=week_plot(counts),
            rows=row_plot(counts),
            table=harness_table(counts),
            colour=colour,
            calls=boundaries.CALLS,
        )

    @app.exception_handler(PageError)
    def unknown(_: Request, error: PageError) -> HTMLResponse:
        return failed(error.status, str(error))

    @app.exception_handler(UnknownRollout)
    def unknown_rollout(_: Request, error: UnknownRollout) -> HTMLResponse:
        return failed(404, str(error))

    @app.exception_handler(LogUnavailable)
    def away(_: Request, error: LogUnavailable) -> HTMLResponse:
        return failed(503, str(error))

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> HTMLResponse:
        said = "; ".join(f"{_named(each)}: {each['msg']}" for each in error.errors())
        return failed(422, f"the address says something that cannot be shown ({said}): change it, or go back")

    @app.exception_handler(HTTPException)
    def no_page(_: Request, error: HTTPException) -> HTMLResponse:
        return failed(error.status_code, "there is no such page: choose one above")

    return Door(app, token=token)


def _named(error: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in error["loc"][1:]) or "address"
