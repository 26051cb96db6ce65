"""Run the migrations on the connection and in the transaction that `store.migrate` opened."""

from alembic import context

from store.schema import metadata_for

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata_for(connection.dialect.name))
context.run_migrations()
