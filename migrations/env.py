"""Run the migrations on the connection that `store.migrate` opened, or write them down as SQL.

On PostgreSQL each revision has a transaction of its own, so that one may leave it for what needs none. On SQLite all of
them share the caller's, which holds the write lock.
"""

from alembic import context

given = context.config.attributes
if context.is_offline_mode():
    context.configure(
        dialect_name=given["dialect"],
        dialect_opts={"paramstyle": "named"},  # so that no % is doubled
        literal_binds=True,
        transactional_ddl=True,
        transaction_per_migration=True,
    )
else:
    context.configure(connection=given["connection"], transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
