"""Which path is which dialect's.

Knows the paths that a rollout may use; does not know what goes over them. Law: a path is captured by one dialect,
passed on untouched, or not served at all.

>>> served = dialect_at("/v1/messages")
>>> served.NAME if served else None
'messages'
>>> dialect_at("/v1/messages/count_tokens") is None
True
"""

from __future__ import annotations

from engine.dialects import chat, messages, responses
from engine.dialects.wire import Dialect

DIALECTS: tuple[Dialect, ...] = (chat, responses, messages)
PASSED = frozenset({"/v1/models", messages.PATH + "/count_tokens"})
"""Paths under a rollout that ask the server something and generate nothing."""


def dialect_at(path: str) -> Dialect | None:
    """The dialect of a call to this path; None where no call is captured."""
    return next((dialect for dialect in DIALECTS if path == dialect.PATH), None)
