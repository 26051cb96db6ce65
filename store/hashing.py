"""Canonical bytes and every digest of the log, each tagged with its purpose and version.

Knows how values become bytes and bytes become digests; does not know what an item or a chat message is.
Law: a change of any rule here is a new `HASH_VERSION`, so a digest of another version never matches.

A digest is SHA-256 over a domain tag and its length-framed parts, so that no two lists of parts collide:

>>> tagged_digest("example", b"ab", b"c") == tagged_digest("example", b"a", b"bc")
False
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from uuid import UUID

from pydantic import JsonValue

HASH_VERSION = 1
"""Version of the canonical form and of every digest below; stored with each call."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: JsonValue) -> bytes:
    r"""The one byte form of a JSON value: keys sorted, no spaces, ASCII escapes, NaN and Infinity refused.

    >>> canonical_json({"b": [1, None], "a": "é"})
    b'{"a":"\\u00e9","b":[1,null]}'

    Raises ValueError for NaN and Infinity, which JSON cannot hold.
    """
    return _CANONICAL.encode(value).encode()


def tagged_digest(domain: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 over `turnlog/<domain>/v<HASH_VERSION>` and the length-framed parts; 32 bytes."""
    return digest_of_parts(domain, parts)


def digest_of_parts(domain: str, parts: Iterable[bytes | memoryview]) -> bytes:
    """The tagged digest of parts that come one by one, of which none is kept.

    >>> digest_of_parts("row", iter([b"1", b"2"])) == tagged_digest("row", b"1", b"2")
    True
    """
    state = hashlib.sha256(_tag(domain))
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


@cache
def _tag(domain: str) -> bytes:
    return f"turnlog/{domain}/v{HASH_VERSION}".encode() + b"\0"


def item_digest(canonical_item: bytes) -> bytes:
    """Digest of one canonical item (design §5)."""
    return tagged_digest("item", canonical_item)


def render_hash(options: JsonValue) -> bytes:
    """Digest of all that shapes a prompt besides its messages (design §5)."""
    return tagged_digest("render", canonical_json(options))


def extend_request_hash(request_hash: bytes, next_item: bytes) -> bytes:
    """One step of the chained request digest: it starts from the render hash and takes one item digest at a time."""
    return tagged_digest("request", request_hash, next_item)


def request_hash(start: bytes, item_digests: Iterable[bytes]) -> bytes:
    """The chained digest of a request's items on top of `start`, its render hash.

    >>> one_by_one = extend_request_hash(extend_request_hash(b"r", b"1"), b"2")
    >>> request_hash(b"r", [b"1", b"2"]) == one_by_one
    True
    """
    current = start
    for digest in item_digests:
        current = extend_request_hash(current, digest)
    return current


def answer_key(canonical_answer: bytes) -> bytes:
    """Digest of what a served answer must be echoed as: its tool calls and its trimmed text (design §5)."""
    return tagged_digest("answer", canonical_answer)


def summary_hash(request: bytes, answer: bytes) -> bytes:
    """The key by which the next request finds the call it continues: digest(request hash, answer key)."""
    return tagged_digest("summary", request, answer)


def chain_hash(parent: bytes | None, delta_token_ids: bytes | memoryview) -> bytes:
    """Digest of a call's delta tokens (int32 little-endian) on top of its parent's chain hash; None for a root."""
    above = b"" if parent is None else parent
    # The tagged digest of (above, delta), taken in two steps: replay derives one for every call of a log.
    sizes = len(above).to_bytes(8, "big"), len(delta_token_ids).to_bytes(8, "big")
    state = hashlib.sha256(b"".join((_tag("chain"), sizes[0], above, sizes[1])))
    state.update(delta_token_ids)
    return state.digest()


def event_digest(kind: str, fields: Mapping[str, object], *arrays: bytes) -> bytes:
    """Digest of an event's whole content: its fields in the JSON that events have, then its arrays uncompressed."""
    return tagged_digest("event", kind.encode(), _EVENT.encode(fields).encode(), *arrays)


def _in_json(value: object) -> object:
    """What JSON has no form of: bytes are hex, an id is its text, a model is its fields."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, UUID) else vars(value)


_EVENT = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_in_json
)  # half the time of pydantic's own dump, and the same bytes
