"""The tally of the sequences that were given to events, by which a deleted event is missed."""

from pathlib import Path

from alembic import op
from sqlalchemy import Connection, text

from store.revision import run_file

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
in_one_transaction = False  # on PostgreSQL no lock is held while the events that are there already are tallied

_TABLES = (
    *("rollout", "media_object", "call_intent", "call_end", "call_media", "model_call", "rollout_outcome"),
    "trained_row",
)
_APPENDS = """
select tally_appends('{table}', named)
from (
  select '{table}'::regclass as named
  union all
  select inhrelid::regclass from pg_inherits where inhparent = '{table}'::regclass
) as each
"""
_EARLIER = """
insert into tally (table_name, low, high, dropped)
select '{table}', min(sequence), max(sequence), false
from (
  select sequence, sequence - row_number() over (order by sequence) as run
  from {table}
  where sequence < coalesce((select min(low) from tally where table_name = '{table}'), 9223372036854775807)
) as each
group by run
"""
"""The events that were there before they were tallied: all below the first that was."""


def upgrade() -> None:
    run_file(__file__)
    if op.get_context().dialect.name == "postgresql":
        with op.get_context().autocommit_block():  # what waits for one table must hold no other
            for table in _TABLES:
                op.execute(_APPENDS.format(table=table))
                op.execute(_EARLIER.format(table=table))


def downgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        for table in _TABLES:
            op.execute(f"drop trigger {table}_tallied")
        op.execute("drop table tally")
        return
    _run_again("0003_media", "create or replace function make_partition")
    _run_again("0001_events", "create function drop_partition")
    op.execute("drop function tally_appends(text, regclass)")
    op.execute("drop function tally_appended() cascade")  # with the triggers of tables and partitions
    op.execute("drop table tally")


def _run_again(revision: str, begins: str) -> None:
    """A function as an earlier revision has it."""
    words = Path(__file__).with_name(f"{revision}.postgresql.sql").read_text(encoding="utf-8")
    begin = words.index(begins)
    words = words[begin : words.index("$$;", begin) + 2]
    op.execute(text(words.replace("create function", "create or replace function", 1).replace(":", "\\:")))


def losses(connection: Connection) -> list[str]:  # noqa: ARG001
    """What is gone after a downgrade: nothing that events say. Events deleted until then are not missed any more."""
    return []
