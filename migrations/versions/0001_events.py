"""The six tables of events, and the triggers that refuse to change one.

Two texts, one a database: they differ in types, in how a trigger is written and in what a careless statement may try.
"""

from store.revision import run_file

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
in_one_transaction = True


def upgrade() -> None:
    run_file(__file__)
