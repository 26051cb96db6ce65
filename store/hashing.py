"""Canonical bytes and every digest of the log, each tagged with its purpose and version.

Knows how values become bytes and bytes become digests; does not know what an item or a chat message is.
Law: a change of any rule here is a new `HASH_VERSION`, and digests of a version that is not derived here never match.

A digest is SHA-256 over a domain tag and its length-framed parts, so that no two lists of parts collide:

>>> tagged_digest("example", b"ab", b"c") == tagged_digest("example", b"a", b"bc")
False
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any
from uuid import UUID

from pydantic import BaseModel, JsonValue

HASH_VERSION = 2
"""Version of the canonical form and of every digest below; stored with each call."""
DERIVED = frozenset((1, HASH_VERSION))
"""Versions that this release derives. They differ in what the digest of a root's event covers (docs/decisions/0032), so
calls of both have the same keys and continue each other."""
_TAGGED = 1
"""The version in the tags: that of the last rule whose change changes a key."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: JsonValue) -> bytes:
    r"""The one byte form of a JSON value: keys sorted, no spaces, ASCII escapes, NaN and Infinity refused.

    >>> canonical_json({"b": [1, None], "a": "é"})
    b'{"a":"\\u00e9","b":[1,null]}'

    Raises ValueError for NaN and Infinity, which JSON cannot hold.
    """
    return _CANONICAL.encode(value).encode()


def tagged_digest(domain: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 over `turnlog/<domain>/v1` and the length-framed parts; 32 bytes."""
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
    return f"turnlog/{domain}/v{_TAGGED}".encode() + b"\0"


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


def event_digest(kind: str, texts: Mapping[str, str], *arrays: bytes) -> bytes:
    """Digest of an event: its fields as `json_texts` has them in order of their names, then its arrays uncompressed."""
    return tagged_digest("event", kind.encode(), _json_object(texts).encode(), *arrays)


def json_texts(fields: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    r"""Fields in the JSON that events have: canonical, bytes as hex, an id as its text, a model as its fields.

    >>> json_texts({"a": {"b": [1, None], "a": 0.5}, "b": b"\0\xff"}, ["b", "a"])
    {'b': '"00ff"', 'a': '{"a":0.5,"b":[1,null]}'}
    """
    return {name: _TEXT_OF[type(value := fields[name])](value) for name in names}


def _json_object(texts: Mapping[str, str]) -> str:
    """An object of texts, in their order; their names need no escape."""
    return "{" + ",".join([f'"{name}":{text}' for name, text in texts.items()]) + "}"


class _TextOf(dict[type, Callable[[Any], str]]):
    """How values become text, by their type: of a call's fields this takes half the time that one encoder takes."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        self[kind] = found = _model_text(kind) if issubclass(kind, BaseModel) else _EVENT.encode
        return found


def _model_text(kind: type[BaseModel]) -> Callable[[BaseModel], str]:
    names = sorted(kind.model_fields)

    def text(value: BaseModel) -> str:
        fields = value.__dict__
        return "{" + ",".join([f'"{name}":{_TEXT_OF[type(field := fields[name])](field)}' for name in names]) + "}"

    return text


def _array_text(values: Iterable[object]) -> str:
    return "[" + ",".join([_TEXT_OF[type(value)](value) for value in values]) + "]"


def _id_text(value: UUID) -> str:
    digits = f"{value.int:032x}"  # as `str` writes it, in two thirds of the time
    return f'"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"'


_EVENT = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, check_circular=False
)  # what events hold was JSON before, which has no circles: to look for them would take half the time
_TEXT_OF = _TextOf(
    {
        type(None): lambda _: "null",
        int: int.__repr__,
        str: encode_basestring_ascii,
        bytes: lambda value: f'"{value.hex()}"',
        UUID: _id_text,
        tuple: _array_text,
        list: _array_text,
        dict: lambda value: _EVENT.encode(value) if value else "{}",
    }
)
