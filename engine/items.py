"""Canonical items: the meeting point of the three dialects, and the one place that says what counts as the same.

Knows what a message, a reasoning block, a tool call and a tool result are, and which re-encodings of one are harmless;
does not know a wire format, a database or a model server. Law: equal digests mean that the model is shown the same
thing; a change of any rule here is a new `HASH_VERSION` (design §5).

A hosted item is what a server's own tool did (a web search, a computer's screen): it is told apart from others, but
what of it a model is shown only that server knows, so a request that holds one is compared with nothing.

The same: a string and a list with that one text part; text in one part or in several next to each other (a refusal is
text); null, absent, `""` and an empty list; tool arguments in any spacing, key order or number notation; media bytes
in any base64 spelling. Different: white space, order, roles, names, ids of tool calls.

>>> one = Item.tool_call("call_1", "add", '{"a": 1, "b": 2.50}')
>>> other = Item.tool_call("call_1", "add", '{"b":2.5,"a":1.0}')
>>> one.digest == other.digest
True
>>> Item.message("user", ["Hel", "", "lo"]).digest == Item.message("user", ["Hello"]).digest
True
>>> Item.message("user", ["Hello "]).digest == Item.message("user", ["Hello"]).digest
False
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal
from urllib.parse import unquote_to_bytes

from pydantic import JsonValue

from store import hashing
from store.events import ItemTrace

Kind = Literal["message", "reasoning", "tool_call", "tool_result", "hosted"]
Role = Literal["system", "developer", "user", "assistant", "reasoning", "tool_call", "tool_result", "hosted"]
"""Who a message is from; for the other kinds the kind itself."""
MessageRole = Literal["system", "developer", "user", "assistant"]
MediaKind = Literal["image", "audio", "video", "file"]

OUTER_SPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
"""What a harness may trim at the ends of an answer: the white space of Python and of JavaScript together."""
_REMEMBERED = 2000
"""Characters up to which a text is remembered."""
_KEPT = 32_768
"""Texts of each kind that are remembered: 80 MB at most, and a fifth of that in practice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image, sound, video or file by its address: `sha256:` of its bytes, or its URL.

    >>> Media.from_url("image", "data:image/png;base64,AA==") == Media.from_base64("image", " A A ")
    True
    """

    kind: MediaKind
    address: str

    @classmethod
    def from_url(cls, kind: MediaKind, url: str) -> Media:
        """From a URL; a data URI counts by its bytes."""
        if url[:5].lower() != "data:":
            return cls(kind=kind, address=f"url:{url}")
        head, comma, payload = url.partition(",")
        if head.lower().endswith(";base64"):
            return cls.from_base64(kind, unquote_to_bytes(_utf8(payload)).decode("latin-1"))
        return cls._of_bytes(kind, unquote_to_bytes(_utf8(payload))) if comma else cls(kind=kind, address=f"text:{url}")

    @classmethod
    def from_base64(cls, kind: MediaKind, data: str) -> Media:
        """From base64 in either alphabet, however spaced and padded; what is no base64 counts by its text."""
        letters = "".join(data.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
        try:
            raw = base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
        except ValueError:
            return cls(kind=kind, address=f"text:{data}")
        return cls._of_bytes(kind, raw)

    @classmethod
    def _of_bytes(cls, kind: MediaKind, raw: bytes) -> Media:
        return cls(kind=kind, address=f"sha256:{hashlib.sha256(raw).hexdigest()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What an echoed tool call must repeat; `arguments` is in canonical form, see `canonical_arguments`."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One canonical piece of a request or an answer; made by the five constructors below."""

    kind: Kind
    role: Role
    digest: bytes
    text: str = ""
    """A message's or tool result's joined text; reasoning's text or opaque payload; what kind a hosted item is."""
    media: tuple[Media, ...] = ()
    call: ToolCall | None = None
    opaque: bool = False
    """The reasoning is a payload that only its server can read."""
    item_id: str | None = field(default=None, compare=False)
    """What the wire calls this item, such as `msg_1` or a thinking block's signature; no part of what it says."""
    canonical: Mapping[str, JsonValue] | None = field(default=None, compare=False, repr=False)
    """What its digest is of; None for an item without media."""

    @property
    def model_authored(self) -> bool:
        """Whether only a model, or its server's own tool, writes such an item; a harness may still have made it up."""
        return self.role == "assistant" or self.kind in ("reasoning", "tool_call", "hosted")

    @property
    def media_count(self) -> int:
        """Images, sounds, videos and files in this item."""
        return len(self.media)

    def digest_with(self, media: Sequence[Media]) -> bytes:
        """The digest that this item would have with other media in the places of its own.

        >>> one, other = (Media(kind="image", address=address) for address in ("sha256:1", "sha256:2"))
        >>> item = Item.message("user", ["Look:", one])
        >>> item.digest_with([other]) == Item.message("user", ["Look:", other]).digest != item.digest
        True
        """
        assert self.canonical is not None, "an item with media"
        parts, rest = self.canonical["parts"], iter(media)
        assert isinstance(parts, list)
        shown: list[JsonValue] = []
        for part in parts:
            is_text = isinstance(part, dict) and "text" in part
            shown += [part] if is_text else _canonical_parts([next(rest)])
        return hashing.item_digest(hashing.canonical_json({**self.canonical, "parts": shown}))

    @classmethod
    def message(
        cls,
        role: MessageRole,
        parts: Sequence[str | Media] = (),
        *,
        attributes: Mapping[str, JsonValue] | None = None,
        item_id: str | None = None,
    ) -> Item:
        """A message; `attributes` are what else of it a template may show, such as the sender's name.

        No parts make an empty message, which is an item too: it stands in the prompt, and it is the whole echo of an
        answer that was nothing but reasoning when a harness does not send reasoning back.
        """
        joined, shown = _joined(parts), _shown(attributes)
        if not shown and (text := _short_text(joined)) is not None:
            return _called(_text_message(role, text), item_id)
        fields: dict[str, JsonValue] = {"kind": "message", "role": role, "parts": _canonical_parts(joined)}
        digest = _digest(fields, shown)
        media = _media(joined)
        return cls(
            kind="message",
            role=role,
            digest=digest,
            text=_text(joined),
            media=media,
            item_id=item_id,
            canonical=fields if media else None,
        )

    @classmethod
    def reasoning(cls, text: str, *, opaque: bool = False, item_id: str | None = None) -> Item:
        """A reasoning block: its text, or the opaque payload that stands for it."""
        fields: dict[str, JsonValue] = {"kind": "reasoning", "opaque" if opaque else "text": text}
        digest = _digest(fields)
        return cls(kind="reasoning", role="reasoning", digest=digest, text=text, opaque=opaque, item_id=item_id)

    @classmethod
    def tool_call(cls, call_id: str, name: str, arguments: JsonValue, *, item_id: str | None = None) -> Item:
        """A tool call; `arguments` is JSON text as most wires have it, or the value itself."""
        if isinstance(arguments, str) and len(arguments) <= _REMEMBERED:
            return _called(_text_tool_call(call_id, name, arguments), item_id)
        return _called(_tool_call(call_id, name, canonical_arguments(arguments)), item_id)

    @classmethod
    def tool_result(
        cls,
        call_id: str,
        parts: Sequence[str | Media] = (),
        *,
        is_error: bool = False,
        attributes: Mapping[str, JsonValue] | None = None,
    ) -> Item:
        """What a tool gave back for the call of that id; `is_error` is the mark of dialects that have one."""
        joined, shown = _joined(parts), _shown(attributes)
        if not shown and (text := _short_text(joined)) is not None:
            return _text_result(call_id, text, is_error)
        return _tool_result(call_id, joined, is_error, shown)

    @classmethod
    def hosted(cls, what: str, content: Mapping[str, JsonValue], *, item_id: str | None = None) -> Item:
        """What a server's own tool did, by the wire's name for it and with all that the wire says about it."""
        fields: dict[str, JsonValue] = {"kind": "hosted", "what": what, "content": json.dumps(content, sort_keys=True)}
        return cls(kind="hosted", role="hosted", digest=_digest(fields), text=what, item_id=item_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice of a response."""

    index: int
    items: tuple[Item, ...]
    finish_reason: str | None


def answer_key(items: Sequence[Item]) -> bytes:
    r"""What an echo of this answer must repeat: its tool calls in order, and its text but for white space around it.

    Reasoning is not part of it (`reasoning_digest`), nor is where the text stood among the tool calls.

    >>> served = [Item.reasoning("Hm."), Item.message("assistant", ["Done.\n"])]
    >>> answer_key(served) == answer_key([Item.message("assistant", ["Done."])])
    True
    """
    messages = [item for item in items if item.kind == "message"]
    calls = [item.call for item in items if item.call is not None]
    fields: dict[str, JsonValue] = {
        "text": "".join(message.text for message in messages).strip(OUTER_SPACE),
        "media": [[media.kind, media.address] for message in messages for media in message.media],
        "calls": [[call.call_id, call.name, call.arguments] for call in calls],
    }
    return hashing.answer_key(hashing.canonical_json(fields))


def reasoning_digest(items: Sequence[Item]) -> bytes | None:
    r"""Digest of the reasoning blocks, white space around each left out; None when there is no reasoning.

    >>> reasoning_digest([Item.reasoning("Hm.\n")]) == reasoning_digest([Item.reasoning(" Hm.")])
    True
    >>> reasoning_digest([Item.reasoning(" \n")]) is None
    True
    """
    blocks: list[JsonValue] = [
        ["opaque" if item.opaque else "text", trimmed]
        for item in items
        if item.kind == "reasoning" and (trimmed := item.text.strip(OUTER_SPACE))
    ]
    return hashing.tagged_digest("reasoning", hashing.canonical_json(blocks)) if blocks else None


def traces(items: Sequence[Item]) -> tuple[ItemTrace, ...]:
    """Digest and role of each item, as the log keeps them."""
    return tuple(ItemTrace(role=item.role, digest=item.digest) for item in items)


def canonical_arguments(arguments: JsonValue) -> str:
    """The one form of a tool call's arguments: `json:` and a value, or `text:` and what is no JSON value.

    Numbers are doubles, as JavaScript reads them; one that no double holds (1e999, NaN) leaves the whole as text. Null,
    absent and `""` are the empty object, which is also what vLLM shows the model for them.

    >>> canonical_arguments('{"n": 12345678901234567890, "a": [1.0, -0]}')
    'json:{"a":[1.0,0.0],"n":1.2345678901234567e+19}'
    >>> canonical_arguments('{"n": 1')
    'text:{"n": 1'
    >>> canonical_arguments(None) == canonical_arguments("") == canonical_arguments("{}")
    True
    """
    if arguments is None or arguments == "":
        return "json:{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text, parse_int=_double, parse_float=_double)
        return "json:" + hashing.canonical_json(value).decode()
    except (ValueError, RecursionError):  # no JSON, a number that is infinite or NaN, nested beyond reading
        return "text:" + text


def _double(token: str) -> float:
    return float(token) + 0.0  # -0.0 becomes 0.0: equal as numbers, and JavaScript writes both as 0


def _joined(parts: Sequence[str | Media]) -> list[str | Media]:
    """Parts with adjacent text joined and empty text gone."""
    if len(parts) == 1 and parts[0]:
        return [*parts]
    joined: list[str | Media] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if not is_text:
            joined += run
        elif text := "".join(part for part in run if isinstance(part, str)):
            joined.append(text)
    return joined


def _short_text(joined: Sequence[str | Media]) -> str | None:
    """What parts say that are one short text and nothing else."""
    text = joined[0] if len(joined) == 1 else None
    return text if isinstance(text, str) and len(text) <= _REMEMBERED else None


def _text(joined: Sequence[str | Media]) -> str:
    return "".join(part for part in joined if isinstance(part, str))


def _media(joined: Sequence[str | Media]) -> tuple[Media, ...]:
    return tuple(part for part in joined if isinstance(part, Media))


def _canonical_parts(joined: Sequence[str | Media]) -> list[JsonValue]:
    return [{"text": part} if isinstance(part, str) else {part.kind: part.address} for part in joined]


def _shown(attributes: Mapping[str, JsonValue] | None) -> dict[str, JsonValue]:
    """The attributes that say something."""
    return {name: value for name, value in attributes.items() if value not in (None, "", [])} if attributes else {}


def _digest(fields: dict[str, JsonValue], attributes: Mapping[str, JsonValue] | None = None) -> bytes:
    if attributes:
        fields["attributes"] = {**attributes}
    return hashing.item_digest(hashing.canonical_json(fields))


def _called(item: Item, item_id: str | None) -> Item:
    return item if item_id is None else replace(item, item_id=item_id)


# A harness sends its whole history again with each call, so what is short is remembered.


@lru_cache(maxsize=_KEPT)
def _text_message(role: MessageRole, text: str) -> Item:
    fields: dict[str, JsonValue] = {"kind": "message", "role": role, "parts": [{"text": text}]}
    return Item(kind="message", role=role, digest=_digest(fields), text=text)


@lru_cache(maxsize=_KEPT)
def _text_tool_call(call_id: str, name: str, arguments: str) -> Item:
    return _tool_call(call_id, name, canonical_arguments(arguments))


@lru_cache(maxsize=_KEPT)
def _text_result(call_id: str, text: str, is_error: bool) -> Item:
    return _tool_result(call_id, [text], is_error, {})


def _tool_call(call_id: str, name: str, arguments: str) -> Item:
    fields: dict[str, JsonValue] = {"kind": "tool_call", "id": call_id, "name": name, "arguments": arguments}
    call = ToolCall(call_id=call_id, name=name, arguments=arguments)
    return Item(kind="tool_call", role="tool_call", digest=_digest(fields), call=call)


def _tool_result(call_id: str, joined: Sequence[str | Media], is_error: bool, shown: Mapping[str, JsonValue]) -> Item:
    fields: dict[str, JsonValue] = {
        "kind": "tool_result",
        "id": call_id,
        "error": is_error,
        "parts": _canonical_parts(joined),
    }
    digest = _digest(fields, shown)
    media = _media(joined)
    return Item(
        kind="tool_result",
        role="tool_result",
        digest=digest,
        text=_text(joined),
        media=media,
        canonical=fields if media else None,
    )


def _utf8(text: str) -> bytes:
    """Bytes of a text that may hold lone surrogates, as JSON can carry them."""
    return text.encode("utf-8", "surrogatepass")
