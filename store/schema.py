"""The tables of the log, as SQLAlchemy Core declares them: one row is one event.

Knows columns, keys and checks on both databases; does not know how rows are written, read or migrated, and holds no
triggers (they live in `migrations/`, their names in `guards`). Law: a column is an event's field under its own name, so
that a row reads back as the event it was; what the log adds is `sequence`, the place in its order, and `digest`.

Ids are 16 bytes on SQLite and `uuid` on PostgreSQL, digests are bytes, JSON is text that holds canonical JSON, so that
both databases keep the same bytes. Times are Unix microseconds. The heavy columns come last.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    and_,
    func,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from store import hashing


class Id(TypeDecorator[UUID]):
    """A UUID: 16 bytes on SQLite, `uuid` on PostgreSQL."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Pick the database's own type."""
        return dialect.type_descriptor(LargeBinary() if dialect.name == "sqlite" else Uuid())

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        """Bytes for SQLite, the id itself for PostgreSQL."""
        return value.bytes if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        """The id again."""
        return UUID(bytes=bytes(value)) if value is not None and dialect.name == "sqlite" else value


class CanonicalJson(TypeDecorator[JsonValue]):
    """A JSON value as text in its one canonical form; a NULL is None."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: JsonValue, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Canonical text."""
        return None if value is None else hashing.canonical_json(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> JsonValue:  # noqa: ARG002
        """The value again."""
        return None if value is None else json.loads(value)


_BIG = BigInteger().with_variant(Integer(), "sqlite")
_SMALL = SmallInteger().with_variant(Integer(), "sqlite")
_REAL: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")

metadata = MetaData()
"""The tables of events as both databases have them; `metadata_for` adds what each has its own way, and the tally."""

rollout = Table(
    "rollout",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("group_id", Text),
    Column("slot", _BIG),
    Column("task", Text),
    Column("harness", Text),
    Column("metadata", CanonicalJson, nullable=False),
    Column("opened_at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("secret_hash", LargeBinary),
    CheckConstraint("sequence > 0", name="rollout_sequence"),
    CheckConstraint("length(digest) = 32", name="rollout_digest"),
    CheckConstraint("length(rollout_id) between 1 and 128", name="rollout_rollout_id"),
    CheckConstraint("length(secret_hash) = 32", name="rollout_secret_hash"),
    Index("rollout_group", "group_id"),
    sqlite_strict=True,
)

call_intent = Table(
    "call_intent",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("call_id", Id, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("decision", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("parent_id", Id),
    Column("worker", Text, nullable=False),
    Column("at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="call_intent_sequence"),
    CheckConstraint("length(digest) = 32", name="call_intent_digest"),
    CheckConstraint("decision in ('root', 'continuation')", name="call_intent_decision"),
    CheckConstraint("(parent_id is null) = (decision = 'root')", name="call_intent_parent"),
    Index("call_intent_rollout", "rollout_id", "sequence"),
    sqlite_strict=True,
)

model_call = Table(
    "model_call",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("call_id", Id, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("parent_id", Id),
    Column("root_id", Id, nullable=False),
    Column("depth", _BIG, nullable=False),
    Column("decision", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("candidates", _BIG, nullable=False),
    Column("reasoning_policy", Text, nullable=False),
    Column("summary_hash", LargeBinary, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("answer_key", LargeBinary, nullable=False),
    Column("render_hash", LargeBinary, nullable=False),
    Column("tools_digest", LargeBinary, nullable=False),
    Column("hash_version", _BIG, nullable=False),
    Column("reasoning_digest", LargeBinary),
    Column("prev_len", _BIG, nullable=False),
    Column("prompt_len", _BIG, nullable=False),
    Column("sampled_len", _BIG, nullable=False),
    Column("chain_hash", LargeBinary, nullable=False),
    Column("policy_spans", CanonicalJson, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("dialect", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("response_id", Text),
    Column("answer_item_ids", CanonicalJson, nullable=False),
    Column("choice", _BIG, nullable=False),
    Column("media_count", _BIG, nullable=False),
    Column("writer_id", Id, nullable=False),
    Column("writer_seq", _BIG, nullable=False),
    Column("started_at", _BIG, nullable=False),
    Column("completed_at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("evidence", CanonicalJson, nullable=False),
    Column("sampling", CanonicalJson, nullable=False),
    Column("hints", CanonicalJson, nullable=False),
    Column("request_roles", CanonicalJson, nullable=False),
    Column("request_digests", LargeBinary, nullable=False),
    Column("answer_roles", CanonicalJson, nullable=False),
    Column("answer_digests", LargeBinary, nullable=False),
    Column("codec", _SMALL, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="model_call_sequence"),
    CheckConstraint(
        "length(digest) = 32 and length(summary_hash) = 32 and length(request_hash) = 32 and length(answer_key) = 32"
        " and length(render_hash) = 32 and length(tools_digest) = 32 and length(chain_hash) = 32"
        " and length(reasoning_digest) = 32",
        name="model_call_digests",
    ),
    CheckConstraint("decision in ('root', 'continuation')", name="model_call_decision"),
    CheckConstraint(
        "(parent_id is null) = (decision = 'root') and (parent_id is null) = (depth = 0)"
        " and (parent_id is null) = (root_id = call_id) and (parent_id is null) = (prev_len = 0)",
        name="model_call_parent",
    ),
    CheckConstraint(
        "depth >= 0 and prev_len >= 0 and prompt_len >= prev_len and sampled_len >= 0 and writer_seq >= 0",
        name="model_call_counts",
    ),
    CheckConstraint(
        "length(logprobs) = 4 * sampled_len"
        " and (codec <> 0 or length(token_ids) = 4 * (prompt_len - prev_len + sampled_len))",
        name="model_call_arrays",
    ),
    CheckConstraint("length(request_digests) % 32 = 0 and length(answer_digests) % 32 = 0", name="model_call_items"),
    Index("model_call_rollout", "rollout_id", "sequence"),
    Index("model_call_summary", "rollout_id", "summary_hash"),
    Index("model_call_parent", "parent_id"),
    Index("model_call_root", "root_id", "depth"),
    sqlite_strict=True,
)

call_end = Table(
    "call_end",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("call_id", Id, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("codec", _SMALL, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="call_end_sequence"),
    CheckConstraint("length(digest) = 32", name="call_end_digest"),
    CheckConstraint("state in ('failed', 'refused', 'abandoned', 'lost')", name="call_end_state"),
    Index("call_end_rollout", "rollout_id", "sequence"),
    sqlite_strict=True,
)

rollout_outcome = Table(
    "rollout_outcome",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("outcome_id", Id, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("reward", _REAL, nullable=False),
    Column("status", Text, nullable=False),
    Column("accepted", CanonicalJson),
    Column("output", CanonicalJson),
    Column("declared_rewrites", CanonicalJson, nullable=False),
    Column("at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="rollout_outcome_sequence"),
    CheckConstraint("length(digest) = 32", name="rollout_outcome_digest"),
    Index("rollout_outcome_rollout", "rollout_id", "sequence"),
    sqlite_strict=True,
)

trained_row = Table(
    "trained_row",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("run", Text, nullable=False),
    Column("step", _BIG, nullable=False),
    Column("row_id", Text, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("tip_call_id", Id, nullable=False),
    Column("selection", Text, nullable=False),
    Column("selection_version", _BIG, nullable=False),
    Column("advantage", _REAL, nullable=False),
    Column("trainer_policy_version", _BIG, nullable=False),
    Column("at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="trained_row_sequence"),
    CheckConstraint("length(digest) = 32", name="trained_row_digest"),
    Index("trained_row_rollout", "rollout_id", "sequence"),
    sqlite_strict=True,
)

media_object = Table(
    "media_object",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("size", _BIG, nullable=False),
    Column("tensors", CanonicalJson, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="media_object_sequence"),
    CheckConstraint("length(digest) = 32 and length(sha256) = 32", name="media_object_digest"),
    sqlite_strict=True,
)

call_media = Table(
    "call_media",
    metadata,
    Column("sequence", _BIG, Identity(always=True), nullable=False),
    Column("call_id", Id, nullable=False),
    Column("place", _BIG, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("modality", Text, nullable=False),
    Column("sha256", LargeBinary, nullable=False),
    Column("item_hash", LargeBinary, nullable=False),
    Column("mm_hash", Text, nullable=False),
    Column("start", _BIG, nullable=False),
    Column("length", _BIG, nullable=False),
    Column("tokens", _BIG, nullable=False),
    Column("geometry", CanonicalJson, nullable=False),
    Column("at", _BIG, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    CheckConstraint("sequence > 0", name="call_media_sequence"),
    CheckConstraint("length(digest) = 32 and length(sha256) = 32 and length(item_hash) = 32", name="call_media_digest"),
    CheckConstraint(
        "place >= 0 and start >= 0 and length > 0 and tokens > 0 and tokens <= length", name="call_media_counts"
    ),
    Index("call_media_rollout", "rollout_id", "sequence"),
    Index("call_media_object", "sha256"),
    sqlite_strict=True,
)

tally = Table(
    "tally",
    MetaData(),
    Column("table_name", Text, nullable=False),
    Column("low", _BIG, nullable=False),
    Column("high", _BIG, nullable=False),
    Column("dropped", Boolean().with_variant(Integer(), "sqlite"), nullable=False),
    CheckConstraint("low > 0 and low <= high", name="tally_run"),
    sqlite_strict=True,
)
"""Runs of sequences that were given to events, `low` to `high`; or left with a partition. It holds no events itself."""

IDS = {
    "rollout": ("rollout_id",),
    "call_intent": ("call_id",),
    "model_call": ("call_id",),
    "call_end": ("call_id",),
    "rollout_outcome": ("outcome_id",),
    "trained_row": ("run", "step", "row_id"),
    "media_object": ("sha256",),
    "call_media": ("call_id", "place"),
}
"""The columns of each table that are its events' id: no two events have the same."""
PARTITIONED = ("model_call", "call_intent", "call_end", "call_media")
"""Tables that PostgreSQL keeps in partitions, by ranges of `call_id` and so of time."""
VIEWS = {
    "rollout_state": (
        *("rollout_id", "group_id", "slot", "task", "harness", "metadata", "opened_at", "calls", "roots", "failed"),
        *("refused", "abandoned", "lost", "pending", "reward", "status", "first_at", "last_at", "served_tokens"),
        *("stored_tokens", "sampled_tokens"),
    ),
    "row_boundary": (
        *("sequence", "rollout_id", "call_id", "reason", "nearest_call", "first_difference", "role_here", "role_there"),
        *("digest_here", "digest_there", "started_at", "completed_at", "items", "nearest_items", "items_shared"),
        *("items_new", "items_gone", "role", "harness", "prompt_len", "sampled_len"),
    ),
    "chain": (
        *("rollout_id", "tip_call_id", "tip_sequence", "superseded", "position", "call_id", "sequence", "parent_id"),
        *("root_id", "depth", "decision", "reason", "prev_len", "prompt_len", "sampled_len", "policy_spans"),
        *("finish_reason", "model", "started_at", "completed_at"),
    ),
    "row_token_count": (
        *("rollout_id", "tip_call_id", "tip_sequence", "root_id", "superseded", "calls", "tokens", "sampled"),
        *("trained", "oldest_version", "newest_version", "reason", "completed_at"),
    ),
    "declared_vs_found": (*("rollout_id", "call_id", "sequence", "reason", "role", "source", "declared", "state"),),
    "drift": (
        *("sequence", "rollout_id", "call_id", "parent_id", "kind", "served_roles", "kept_tokens", "path", "role"),
        *("started_at",),
    ),
}
"""What auditors read: each view with its columns, the same on both databases."""


def metadata_for(dialect: str) -> MetaData:
    """The tables as one database has them.

    SQLite must be told how long an id is. On PostgreSQL the key of a partitioned table is what it is partitioned by.
    """
    copied = MetaData()
    for table in metadata.sorted_tables:
        partitioned = dialect == "postgresql" and table.name in PARTITIONED
        copy = table.to_metadata(copied)
        key = IDS[table.name] if partitioned else ("sequence",)
        copy.append_constraint(PrimaryKeyConstraint(*key, name=f"{table.name}_pkey"))
        if partitioned:
            copy.dialect_options["postgresql"]["partition_by"] = "range (call_id)"
            Index(f"{table.name}_order", copy.c.sequence)
        else:
            copy.append_constraint(UniqueConstraint(*IDS[table.name], name=f"{table.name}_id_key"))
        if dialect == "sqlite" and (ids := [column for column in copy.c if isinstance(column.type, Id)]):
            copy.append_constraint(
                CheckConstraint(and_(*(func.length(each) == 16 for each in ids)), f"{table.name}_ids")
            )
    counted = tally.to_metadata(copied)
    if dialect == "sqlite":
        Index("tally_order", counted.c.table_name, counted.c.low)
    return copied


def guards(dialect: str) -> frozenset[str]:
    """Names of the triggers without which a database is not a log.

    They refuse every change of an event, tally what is appended, and on PostgreSQL announce which sequences may still
    appear.
    """
    sqlite, postgresql = ("no_update", "no_delete", "insert_once"), ("no_change", "no_truncate")
    refuse = sqlite if dialect == "sqlite" else postgresql
    kinds = (*refuse, "tallied", *(() if dialect == "sqlite" else ("announced",)))
    return frozenset(f"{table}_{kind}" for table in metadata.tables for kind in kinds) | {
        *(f"tally_{kind}" for kind in refuse),
        "model_call_not_ended",
        "call_end_not_completed",
    }
