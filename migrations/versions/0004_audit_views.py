"""The views of auditors, whole: chain, row_token_count, declared_vs_found and drift beside the two that were there."""

from pathlib import Path

from alembic import op
from sqlalchemy import Connection, text

from store.revision import run_file

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
in_one_transaction = True


def upgrade() -> None:
    run_file(__file__)


def downgrade() -> None:
    for view in ("drift", "declared_vs_found", "row_token_count", "chain", "row_boundary", "rollout_state"):
        op.execute(f"drop view {view}")
    dialect = op.get_context().dialect.name
    words = Path(__file__).with_name(f"0002_secret_and_views.{dialect}.sql").read_text(encoding="utf-8")
    for part in words.split("\n\n"):
        if " view " in part:
            op.execute(text(part.rstrip().removesuffix(";").replace(":", "\\:")))


def losses(connection: Connection) -> list[str]:  # noqa: ARG001
    """What is gone after a downgrade: nothing that events say."""
    return []
