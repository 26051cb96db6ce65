"""What trained where: steps written to the log, and the way back from a row to its calls.

Knows training steps as events and the named queries of `sql/provenance.sql`; does not know how a step was planned or
what a trainer did with it. Law: a step is recorded once and whole; the same step again changes nothing, whenever it
comes, and another step under its number is refused.

    planned = plan(rows, seed=0, step=3, world=8, token_budget=8192)
    ...  # train it
    record(database, events(planned, rows, advantages, run="sft-7", selection=found.selection, ...))

The same questions in SQL, for `turnlog sql`, are in docs/replay.md.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa
from pydantic import TypeAdapter
from sqlalchemy import Connection, Engine, TextualSelect, select, text

from replay.errors import PlanMismatch, StepRecorded, UnknownRow
from replay.history import TRAINED
from replay.plan import StepPlan
from replay.queries import query
from replay.reader import open_reader
from replay.row import Row
from replay.selection import Selection
from store import log, schema
from store.database import read, write
from store.events import PolicySpan, RowTrained

_SPANS: TypeAdapter[tuple[PolicySpan, ...]] = TypeAdapter(tuple[PolicySpan, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """One of the calls that made a row."""

    call_id: UUID
    sequence: int
    decision: str
    reason: str
    prev_len: int
    prompt_len: int
    sampled_len: int
    policy_versions: tuple[int, ...]
    """Of the weights that sampled it, in order: more than one when they were updated meanwhile."""
    model: str
    completed_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a trained row came from."""

    trained: RowTrained
    """The step, the selection rule, the advantage and the trainer's policy version."""
    calls: tuple[RowCall, ...]
    """Root first; the last one is the tip."""


def events(
    plan: StepPlan,
    rows: Iterable[Row],
    advantages: Mapping[str, float],
    *,
    run: str,
    selection: Selection,
    trainer_version: int,
    at: int,
    without: Container[str] = (),
) -> list[RowTrained]:
    """One event for each row that the plan placed, in the order of ranks and micro-batches.

    Args:
        plan: of the step; rows that were too long for it did not train, and get no event.
        rows: those of the plan, and any others.
        advantages: by rollout id, as they were trained.
        run: name of the training run.
        selection: by which the rows were built.
        trainer_version: policy version of the weights that the step started from.
        at: when, in Unix microseconds.
        without: ids of planned rows that did not train, since their tokens turned out damaged.
    """
    by_id = {row.row_id: row for row in rows}
    found: list[RowTrained] = []
    for row_id in (row_id for rank in plan.ranks for micro_batch in rank for row_id in micro_batch):
        if row_id in without:
            continue
        if row_id not in by_id:
            raise PlanMismatch(f"row {row_id!r}", "is planned and not among the rows")
        row = by_id[row_id]
        if row.rollout_id not in advantages:
            raise PlanMismatch(f"rollout {row.rollout_id!r}", "has rows to train and no advantage")
        found.append(
            RowTrained(
                run=run,
                step=plan.step,
                row_id=row_id,
                rollout_id=row.rollout_id,
                tip_call_id=row.tip,
                selection=selection.rule,
                selection_version=selection.version,
                advantage=advantages[row.rollout_id],
                trainer_policy_version=trainer_version,
                at=at,
            )
        )
    return found


def record(database: Engine, step: Sequence[RowTrained]) -> bool:
    """Append one step's events in one transaction; False when the log has this very step already.

    A step that is trained again after a crash is the same step, though the clock has gone on: `at` stays what it was.
    Raises StepRecorded when the log has other rows, or the same ones trained otherwise, under this run and number.
    """
    if not step:
        return False
    run, number = step[0].run, step[0].step
    if any((event.run, event.step) != (run, number) for event in step):
        raise ValueError("the events are of several steps: record one step at a time")
    with write(database) as connection:
        stored = _of_step(connection, run, number)
        if not stored:
            log.append(connection, step)
            return True
    again = {event.row_id: event for event in step}
    if again.keys() != stored.keys():
        raise StepRecorded(run, number, f"has {len(stored)} rows there, not these {len(again)}")
    for row_id, event in stored.items():
        if event != again[row_id].model_copy(update={"at": event.at}):
            raise StepRecorded(run, number, f"row {row_id!r} was trained otherwise there")
    return False


def trained(database: Engine, sequence: int | None = None, *, archive: str | None = None) -> pa.Table:
    """What entered training steps, as `replay.history.eligible` reads it: all of it, or up to a `trained` position."""
    until = 2**63 - 1 if sequence is None else sequence
    with open_reader(database, archive) as reader:
        found = reader.table("trained", TRAINED, trained=until)
        if reader.sealed is None:
            return found
        both = pa.concat_tables([reader.sealed.table("trained_row", TRAINED, until), found])
        return both.group_by(TRAINED.names, use_threads=False).aggregate([])  # one event stands in both


def origin(database: Engine, run: str, step: int, row_id: str) -> Origin:
    """Which calls, selection rule and policy versions made a row of a step. Raises UnknownRow."""
    with read(database) as connection:
        found = _of_step(connection, run, step).get(row_id)
        if found is None:
            raise UnknownRow(run, step, row_id)
        calls = connection.execute(_ROW_CALLS, {"run": run, "step": step, "row_id": row_id}).mappings().all()
    return Origin(
        trained=found,
        calls=tuple(
            RowCall(
                **{name: value for name, value in call.items() if name != "policy_spans"},
                policy_versions=tuple(
                    dict.fromkeys(span.policy_version for span in _SPANS.validate_python(call["policy_spans"]))
                ),
            )
            for call in calls
        ),
    )


def steps_of(database: Engine, rollout_id: str) -> list[RowTrained]:
    """Every step that rows of the rollout went into, one event a row, in the order of the log."""
    with read(database) as connection:
        found = connection.execute(_ROLLOUT_STEPS, {"rollout_id": rollout_id}).mappings()
        return [RowTrained(**event) for event in found]


def _of_step(connection: Connection, run: str, step: int) -> dict[str, RowTrained]:
    table = schema.trained_row
    statement = select(*(table.c[name] for name in RowTrained.model_fields if name != "kind"))
    found = connection.execute(statement.where(table.c.run == run, table.c.step == step).order_by(table.c.sequence))
    return {event["row_id"]: RowTrained(**event) for event in found.mappings()}


def _statement(name: str) -> TextualSelect:
    columns = {column.name: column.type for table in (schema.model_call, schema.trained_row) for column in table.c}
    return text(query(name, "sqlalchemy")).columns(**columns)


_ROW_CALLS = _statement("row_calls")
_ROLLOUT_STEPS = _statement("rollout_steps")
