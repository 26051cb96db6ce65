"""Media: objects by content address, and their occurrences in calls."""

from pathlib import Path

from alembic import op
from sqlalchemy import Connection, text

from store.revision import run_file

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
in_one_transaction = True


def upgrade() -> None:
    run_file(__file__)


def downgrade() -> None:
    op.execute("drop table call_media")
    op.execute("drop table media_object")
    if op.get_context().dialect.name == "postgresql":
        first = Path(__file__).with_name("0001_events.postgresql.sql").read_text(encoding="utf-8")
        begin = first.index("create function make_partition")
        words = first[begin : first.index("$$;", begin) + 2].replace("create function", "create or replace function", 1)
        op.execute(text(words.replace(":", "\\:")))


def losses(connection: Connection) -> list[str]:
    """What is gone after a downgrade."""
    shown = connection.scalar(text("select count(*) from call_media"))
    return [f"which media were shown, {shown} times, so that calls with media give no rows"] if shown else []
