"""The hash of a rollout's secret, and the views of auditors: `rollout_state` and `row_boundary`."""

from alembic import op

from store.revision import run_file

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_file(__file__)
    if op.get_context().dialect.name == "postgresql":
        op.execute("alter table rollout validate constraint rollout_secret_hash")
