"""The command line: names, options and output; each rule lives in the package that owns it.

Knows arguments, tables and exit codes; does not know how a log is kept, a row is made or a server decides. Law: what a
user can cause ends in one clear line on stderr and exit code 1, never in a traceback. Heavy imports happen inside the
command that needs them, so that `turnlog --help` is quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.markup import escape

from turnlog.archive import archive
from turnlog.audit.command import audit_log
from turnlog.console import (
    Archived,
    AsJson,
    AsOf,
    Db,
    ExcludeRole,
    Processes,
    Rule,
    notes,
    opened,
    pool_of,
    print_json,
    progress_bar,
    table_of,
)
from turnlog.copying import copy_log
from turnlog.db import db
from turnlog.history import replay_history
from turnlog.media import media
from turnlog.recovery import check, drain
from turnlog.tail import tail_log
from turnlog.ui.command import ui

NEEDED_BY_DEMO = ("vllm", "openai", "transformers", "torch", "megatron")
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="The durable log between LLM agents and their training.",
    epilog="Start with [bold]turnlog demo[/]: it runs the whole path on this machine in a few minutes.",
)
app.add_typer(db, name="db")
app.add_typer(media, name="media")
app.command(epilog="Example: [bold]turnlog archive --before 2026-11-01 --to s3://bucket/turnlog[/]")(archive)
db.command("copy", epilog="Example: [bold]turnlog db copy sqlite:///turnlog.db postgresql://user@host/turnlog[/]")(
    copy_log
)
db.command(
    "check",
    epilog="Examples: [bold]turnlog db check[/] lists, "
    "[bold]turnlog db check --mark-lost --worker host:8000[/] ends them.",
)(check)
db.command("drain", epilog="Example: [bold]turnlog db drain turnlog.spool --db postgresql://user@host/turnlog[/]")(
    drain
)
app.command(
    "audit",
    epilog="Examples: [bold]turnlog audit[/] while servers run, "
    "[bold]turnlog audit --finished --archive s3://bucket/turnlog[/] at the end.",
)(audit_log)
app.command(
    "tail",
    epilog="Examples: [bold]turnlog tail -f --after now[/] watches, "
    "[bold]turnlog tail --after 60.5.5.0.62.1 > new.jsonl[/] takes what is new.",
)(tail_log)
app.command(epilog="Example: [bold]turnlog ui --tokenizer models/Qwen3-8B[/], then open http://127.0.0.1:7080/")(ui)
app.command(
    "replay",
    epilog="Examples: [bold]turnlog replay --steps 20[/] counts; [bold]turnlog replay --out steps --policy "
    """'{"max_trained": 0, "min_reward": 0.5}'[/] writes what never trained.""",
)(replay_history)


def main() -> None:
    """Run the command line; an error that a user can mend becomes one line."""
    try:
        app()
    except Exception as error:
        if not isinstance(error, _expected()):
            raise
        notes().print(f"[red]turnlog:[/] {escape(str(error))}")
        sys.exit(1)


def _expected() -> tuple[type[Exception], ...]:
    """Errors whose message names value, rule and remedy."""
    from engine.errors import EngineError
    from replay.errors import ReplayError
    from store.errors import LogError
    from turnlog.errors import CommandError

    return (LogError, EngineError, ReplayError, CommandError)


@app.command(epilog="Example: [bold]turnlog demo[/]")
def demo(
    url: Db = None,
    folder: Annotated[
        Path, typer.Option(file_okay=False, help="Where the model and the server's log are kept.")
    ] = Path("demo"),
) -> None:
    """Run the whole path on this machine: agent, model server, log, rows, one optimizer step. A few minutes."""
    from turnlog.errors import MissingPackages

    if missing := [name for name in NEEDED_BY_DEMO if find_spec(name) is None]:
        raise MissingPackages(missing)
    from store.database import database_url
    from turnlog.demo.run import run_demo

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    try:
        run_demo(url=database_url(url), folder=folder, console=Console(highlight=False))
    except KeyboardInterrupt:
        notes().print("stopped; the model server too")
        sys.exit(130)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: [bold]turnlog serve Qwen/Qwen3-0.6B --port 8000 --reasoning-parser qwen3[/]",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model: a folder or a hub name. Any `vllm serve` flag may follow.")],
    url: Db = None,
    reasoning: Annotated[
        Literal["strict", "restore"],
        typer.Option(help="When a harness drops the model's thoughts: begin a new row (strict), or keep them."),
    ] = "strict",
    require_open: Annotated[
        bool,
        typer.Option("--require-open", help="Serve a rollout by its secret alone, and all else by $TURNLOG_TOKEN."),
    ] = False,
    worker: Annotated[
        str | None,
        typer.Option(help="Stable name of this server, by which it finds calls it left open. Default: host:port."),
    ] = None,
    on_log_failure: Annotated[
        Literal["refuse", "spool"] | None,
        typer.Option(
            help="While the log is away: answer 503 (refuse, the default), or serve and keep events in a file of "
            "$TURNLOG_SPOOL until it is back (spool), up to $TURNLOG_SPOOL_LIMIT (4GiB)."
        ),
    ] = None,
    durability: Annotated[
        Literal["full", "relaxed"] | None,
        typer.Option(help="Whether answers survive a power cut (full, the default), or the last ones may be lost."),
    ] = None,
) -> None:
    """Start the stock vLLM server with turnlog on: what agents do at /rollouts/ID/v1 goes into the log.

    $TURNLOG_TOKEN, where it is set, is what the operator shows to steer the server.
    """
    from engine.settings import Settings
    from store.database import database_url
    from turnlog.serve import command, environment

    arguments = command(model, context.args)
    resolved = database_url(url)
    _prepare(resolved, create=url is None and "TURNLOG_URL" not in os.environ)
    variables = environment(
        os.environ,
        url=resolved,
        reasoning=reasoning,
        require_open=require_open,
        worker=worker,
        on_log_failure=on_log_failure,
        durability=durability,
    )
    Settings.from_environment(variables)  # what is wrong is told before a model is loaded
    sys.stdout.flush()
    os.execve(arguments[0], arguments, variables)


def _prepare(url: str, *, create: bool) -> None:
    """Check the log and the place for media before a model is loaded; the default file is created if there is none."""
    from store import migrate
    from store.database import open_database
    from store.media import open_media

    database = open_database(url)
    try:
        if create and migrate.current(database) is None:
            migrate.upgrade(database)
        migrate.await_current(database)
        open_media(None, url)
    finally:
        database.dispose()


@app.command(
    epilog="Examples: [bold]turnlog show[/] lists the rollouts, [bold]turnlog show demo1-1[/] draws one, "
    "[bold]turnlog show demo1-1 --boundary 3 --tokenizer MODEL[/] says what changed before its third call."
)
def show(
    rollout: Annotated[str | None, typer.Argument(help="Id of the rollout. Without it: a list of all.")] = None,
    boundary: Annotated[
        str | None,
        typer.Option(metavar="CALL", help="What changed before this call, which begins a row: its number or id."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder of the served model, to show the texts of --boundary.")
    ] = None,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Draw a rollout as a tree: which call continues which, where rows begin and why."""
    from store import log
    from store.database import read
    from turnlog.changes import facts_of_boundary, found_boundary, print_boundary
    from turnlog.show import facts, load, summaries, tree

    if boundary is not None and rollout is None:
        raise typer.BadParameter("names a call of a rollout: name the rollout too", param_hint="--boundary")
    if tokenizer is not None and boundary is None:
        raise typer.BadParameter("shows the texts of a boundary: give --boundary too", param_hint="--tokenizer")
    with opened(url) as database, read(database) as connection:
        if rollout is not None and boundary is not None:
            changed = found_boundary(connection, rollout, boundary, tokenizer)
            if as_json:
                print_json(facts_of_boundary(changed))
            else:
                print_boundary(changed, Console(highlight=False))
            return
        if rollout is not None:
            found = load(connection, rollout)
            if as_json:
                print_json(facts(found))
            else:
                Console().print(tree(found))
            return
        with progress_bar("Reading rollouts"):
            listed = summaries(connection, log.rollouts(connection))
    if as_json:
        print_json([*listed])
    else:
        Console().print(
            table_of(listed, empty="no rollouts yet: start `turnlog serve MODEL`, send calls to /rollouts/ID/v1")
        )


@app.command(epilog="Example: [bold]turnlog outcome r1 --reward 1 --output conversation.json[/]")
def outcome(
    rollout: Annotated[str, typer.Argument(help="Id of the rollout.")],
    reward: Annotated[float, typer.Option(help="A finite number.")],
    status: Annotated[
        Literal["completed", "truncated", "failed"],
        typer.Option(help="It ran to its end, was stopped by a limit, or broke."),
    ] = "completed",
    accept: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Call or response id of a call that counts; may be repeated.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="What the harness returned, as JSON; - for standard input.")
    ] = None,
    declared_rewrite: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="A rewrite that the harness declares; may be repeated.")
    ] = None,
    outcome_id: Annotated[
        str | None, typer.Option(metavar="UUID", help="Makes it safe to run the same command again.")
    ] = None,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Score a rollout in the log: its reward, and which of its calls count."""
    import secrets
    import time

    from store.events import uuid7
    from turnlog.outcome import outcome_of, record

    described = outcome_of(
        reward=reward,
        status=status,
        accepted=accept,
        output=output,
        rewrites=declared_rewrite or (),
        outcome_id=outcome_id,
    )
    now = time.time_ns()
    with opened(url) as database:
        told = record(database, rollout, described, new_id=uuid7(now // 10**6, secrets.token_bytes(10)), at=now // 1000)
    if as_json:
        print_json(told)
    else:
        Console(soft_wrap=True).print(f"rollout {rollout} has outcome {told['outcome_id']}: {reward}, {status}")


@app.command(epilog="Examples: [bold]turnlog rows[/] counts, [bold]turnlog rows --out rows.parquet[/] writes a file.")
def rows(
    out: Annotated[Path | None, typer.Option(help="File or folder to write. Without it: count only.")] = None,
    form: Annotated[
        Literal["parquet", "megatron"],
        typer.Option("--format", help="A Parquet file, or a folder of Megatron's IndexedDatasets."),
    ] = "parquet",
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; may be repeated.")] = None,
    rule: Rule = "completed",
    exclude_role: ExcludeRole = None,
    as_of: AsOf = None,
    archive: Archived = None,
    processes: Processes = None,
    url: Db = None,
    as_json: AsJson = False,
) -> None:
    """Replay the log into training rows, say what was refused and why, and write them to a file.

    Rows are written as they come, so a log of any size needs the memory of a part of it.
    """
    from replay.rowset import stream
    from replay.selection import Selection
    from replay.source import Position
    from store import log
    from store.database import read
    from turnlog.summary import again, summary, summary_tables, writer

    if out is not None and not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"folder {str(out.absolute().parent)!r} does not exist: create it", param_hint="--out")
    selection = Selection(rule=rule, excluded_roles=frozenset(exclude_role or ()))
    consume = writer(form, out)
    with (
        opened(url) as database,
        pool_of(processes, database, archive) as pool,
        progress_bar("Building rows") as progress,
    ):
        parts = stream(
            database,
            selection,
            rollouts=rollout,
            position=None if as_of is None else Position.parse(as_of),
            archive=archive,
            progress=lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total),
            pool=pool,
        )
        found = consume(parts, selection)
        with read(database) as connection:
            unfinished = log.unfinished(connection, rollout)
    if as_json:
        print_json({**summary(found, unfinished), "out": None if out is None else str(out)})
        return
    for table in summary_tables(found, unfinished):
        Console().print(table)
    Console(soft_wrap=True).print(
        f"the same rows again, at any time: [bold]{escape(again(found, rollout, archive, url))}[/]"
    )
    if out is not None:
        Console(soft_wrap=True).print(f"wrote {found.rows} rows to {out}")


@app.command(epilog="Example: [bold]turnlog explain requests.jsonl --reasoning restore[/]")
def explain(
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True, dir_okay=False, readable=True, help="Recorded request streams, one rollout a file."
        ),
    ],
    reasoning: Annotated[
        Literal["strict", "restore"],
        typer.Option(help="When a harness drops the model's thoughts: begin a new row (strict), or keep them."),
    ] = "strict",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a call instead, as it is read.")
    ] = False,
) -> None:
    """Decide recorded calls as a server would, and show how rows would be cut; needs no model and no log.

    A file holds one JSON object a line, in order of arrival: endpoint, request, response; and where they are known seq,
    t_start_ms, t_end_ms and headers. A line that cannot be read is named, left out, and makes the exit code 1.
    """
    from engine.explain import BadLine, Recording
    from turnlog.explain import ExplainedFile, decided, tables

    found: list[ExplainedFile] = []
    for file in files:
        recording = Recording(reasoning, name=str(file))
        explained = ExplainedFile(name=str(file))
        # No progress bar beside JSON: it would take what is printed to stdout for its own.
        with nullcontext() if as_json else progress_bar(f"Deciding {file}"):
            for call in decided(recording, file):
                if isinstance(call, BadLine):
                    explained.bad_lines += 1
                    notes().print(f"[red]turnlog:[/] {escape(str(call))}")
                elif as_json:
                    named: dict[str, JsonValue] = {"file": str(file)} if len(files) > 1 else {}
                    print(json.dumps({**named, **call.as_json()}), flush=True)
                else:
                    explained.calls.append(call)
        explained.rows = recording.rows()
        found.append(explained)
    if not as_json:
        for table in tables(found):
            Console().print(table)
    if any(file.bad_lines for file in found):
        raise typer.Exit(1)


@app.command(
    epilog="Examples: [bold]turnlog sql[/] lists the tables; "
    "[bold]turnlog sql \"select reason, count(*) from model_call where decision = 'root' group by reason\"[/] asks; "
    "[bold]turnlog sql --csv - < query.sql > answer.csv[/] reads the query from a file."
)
def sql(
    query: Annotated[
        str | None, typer.Argument(help="One query in the SQL of the log's database; - reads it from stdin.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead, all lines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of objects instead, all lines.")] = False,
    parquet: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all lines to this file instead.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most lines in the terminal; 0 for all.")] = 100,
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask log and this archive as one, in DuckDB's SQL.")
    ] = None,
    url: Db = None,
) -> None:
    """Ask the log a question in SQL. Whatever the query says, it cannot change the log.

    Ids are shown as UUIDs, other bytes in hex; uuid('0198...') makes an id of a text.
    """
    from turnlog.sql import ask, ask_both, first_lines, tables, write_csv, write_json, write_parquet

    if sum((as_csv, as_json, parquet is not None)) > 1:
        raise typer.BadParameter("--csv, --json and --parquet are three answers: ask for one of them")
    if query is None and (as_csv or parquet is not None or archive is not None):
        raise typer.BadParameter("--csv, --parquet and --archive are for the answer to a query: give one")
    with opened(url) as database:
        if query is None:
            listed = tables(database)
            if as_json:
                print_json([*listed])
            else:
                Console().print(table_of(listed, empty="no tables"))
            return
        words = sys.stdin.read() if query == "-" else query
        with ask(database, words) if archive is None else ask_both(database, archive, words) as answer:
            if as_csv:
                write_csv(answer, sys.stdout)
            elif as_json:
                write_json(answer, sys.stdout)
            elif parquet is not None:
                with progress_bar(f"Writing {parquet}"):
                    written = write_parquet(answer, parquet)
                Console(soft_wrap=True).print(f"wrote {written} lines to {parquet}")
            else:
                with progress_bar("Reading lines"):
                    table, more = first_lines(answer, limit)
                Console().print(table)
                if more:
                    notes().print(f"these are the first {limit} lines: --limit 0 shows all, --csv prints them")
