"""${message}."""

from alembic import op
from sqlalchemy import Connection

from store.revision import run_file

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}
in_one_transaction = True  # False where it leaves its transaction: then it must be able to run again from the start


def upgrade() -> None:
    ${upgrades if upgrades else "run_file(__file__)"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}


def losses(connection: Connection) -> list[str]:
    """What is gone after a downgrade."""
    return []
