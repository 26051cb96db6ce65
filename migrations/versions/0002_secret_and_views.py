"""The hash of a rollout's secret, and the views of auditors: rollout_state and row_boundary."""

from alembic import op
from sqlalchemy import Connection, text

from store.revision import run_file

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
in_one_transaction = False  # on PostgreSQL the check is validated after the table's lock is given back


def upgrade() -> None:
    run_file(__file__)
    if op.get_context().dialect.name == "postgresql":
        with op.get_context().autocommit_block():
            op.execute("alter table rollout validate constraint rollout_secret_hash")


def downgrade() -> None:
    op.execute("drop view row_boundary")
    op.execute("drop view rollout_state")
    op.execute("alter table rollout drop column secret_hash")


def losses(connection: Connection) -> list[str]:
    """What is gone after a downgrade."""
    secrets = connection.scalar(text("select count(*) from rollout where secret_hash is not null"))
    return [f"the secret hashes of {secrets} rollouts, whose openings then miss their digests"] if secrets else []
