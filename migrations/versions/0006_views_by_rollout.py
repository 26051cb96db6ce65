"""Views of one rollout read that rollout: `declared_vs_found`, and on SQLite `row_token_count`."""

from pathlib import Path

from alembic import op
from sqlalchemy import Connection, text

from store.revision import run_file

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
in_one_transaction = True


def upgrade() -> None:
    run_file(__file__)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    views = ("declared_vs_found", "row_token_count") if dialect == "sqlite" else ("declared_vs_found",)
    words = Path(__file__).with_name(f"0004_audit_views.{dialect}.sql").read_text(encoding="utf-8")
    for view in views:
        if dialect == "sqlite":
            op.execute(f"drop view {view}")
        part = next(part for part in words.split("\n\n") if f" view {view} as" in part)
        op.execute(text(part.rstrip().removesuffix(";").replace(":", "\\:")))


def losses(connection: Connection) -> list[str]:  # noqa: ARG001
    """What is gone after a downgrade: nothing that events say."""
    return []
