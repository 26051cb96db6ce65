"""A harness's ordinary output, read into the passages that a model is said to have written.

Knows the forms in which harnesses return what they did, and the dialects' items; does not know the log or which call
wrote what: `replay.output` decides that. Law: nothing is skipped silently and nothing is guessed. What has no canonical
form is an error that names its place, and an output that could be read in two ways is refused.

The forms of an output:

- `text`: a string, the last answer.
- `chat`, `messages`: a list of Chat or Anthropic messages, a whole conversation or its last part.
- `items`: a list of Responses items; alone, or as `output` of one response, whose id is then the last call's.
- `snapshots`: a list of such lists, each the whole state after a step (below).
- `responses`: an ordered list of whole responses of any dialect. Each is exactly one call's answer.
- references: a list of call or response ids, `{"calls": [...]}` or `{"turns": [{"model_calls": [...]}]}`, with or
  without `ng_trajectory` around it. Alone they are what the outcome accepts; beside an output they must name the same
  calls as the output does.

An object may name its form: `messages`, `output`, `responses` or `response`; what else it says is not output.

Of snapshots, each passage counts once. A passage of a later snapshot is one of an earlier when it has the same ids or,
for want of ids, the same content, and stands behind those found before it; the others are new. So a harness may drop or
replace what is old: what it has shown once stays. What cannot be seen: an answer equal to an earlier one, without ids,
in a snapshot that no longer shows the earlier one. It counts as that one.

>>> found = read_output([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. "}])
>>> [(passage.at, passage.roles) for passage in found.output.passages]
[('output[1]', ('assistant',))]
>>> read_output(["chatcmpl-1", "chatcmpl-2"]).references
('chatcmpl-1', 'chatcmpl-2')
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pydantic import JsonValue

from engine.dialects import chat, messages, responses
from engine.dialects.wire import Dialect, Fields, malformed, object_of, objects_of, shown, text_of
from engine.errors import BadRequest, UnreadableAnswer
from engine.items import Item, answer_key, reasoning_digest
from store import hashing
from store.output import Between, HarnessOutput, OutputForm, Passage

JOINED = 16
"""Passages of one answer whose text may have been cut or trimmed; longer answers are compared passage by passage."""

_NAMES = ("messages", "output", "responses", "response")
_FORMS = (
    "a text, a list of messages, of Responses items, of snapshots or of whole responses, a list of call or response "
    f"ids, or an object with one of {', '.join(_NAMES)}, turns and calls"
)
_REFERENCES = ("call_id", "response_id", "model_call_id")
_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"}) | messages.HOSTED
"""Blocks that only Anthropic's messages have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutput:
    """What an output says: passages, or the calls it refers to, or both."""

    output: HarnessOutput | None
    references: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What stands at one place of the wire; all of its items are the model's, or none is."""

    at: str
    items: tuple[Item, ...]
    response_id: str | None = None
    whole: bool = False

    @property
    def authored(self) -> bool:
        return self.whole or any(item.model_authored for item in self.items)

    @property
    def item_ids(self) -> tuple[str, ...]:
        return tuple(item.item_id for item in self.items if item.item_id is not None)

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(item.digest for item in self.items)


_Found = tuple[OutputForm, list[_Entry]]


def read_output(output: JsonValue) -> ReadOutput:
    """Read an output that is not None. Raises BadRequest, UnknownItem."""
    try:
        return _read(output)
    except RecursionError:
        raise BadRequest("output nests too deep to be read: send what the harness returned, as it is") from None


def _read(output: JsonValue) -> ReadOutput:
    try:
        source = hashing.tagged_digest("output", hashing.canonical_json(output)).hex()
    except ValueError:
        why = "output holds NaN or Infinity, which JSON cannot hold: send what another program can read"
        raise BadRequest(why) from None
    references = _references(output)
    if references is not None and not _has_output(output):
        return ReadOutput(output=None, references=references)
    form, entries = _named(output, "output")
    kept = HarnessOutput(
        version=1,
        hash_version=hashing.HASH_VERSION,
        form=form,
        source=source,
        references=references,
        passages=tuple(_passages(entries)),
        after=_between(_tail(entries)),
    )
    return ReadOutput(output=kept, references=references)


def _has_output(output: JsonValue) -> bool:
    return isinstance(output, dict) and any(output.get(name) is not None for name in _NAMES)


def _named(output: JsonValue, at: str) -> _Found:
    """An output, or the object around it."""
    if not isinstance(output, dict):
        return _form(output, at)
    if _is_response(output) and output.get("output") is None:
        return "responses", [_response(output, at)]
    names = [name for name in _NAMES if output.get(name) is not None]
    if len(names) != 1:
        found = f"has {' and '.join(names)}" if names else f"is an object with {shown([*sorted(output)])}"
        raise BadRequest(f"{at} {found}, one form is read: send {_FORMS}", param=at)
    (name,) = names
    if name == "response":
        return _named(object_of(output[name], f"{at}.response"), f"{at}.response")
    form, entries = _form(output[name], f"{at}.{name}")
    last_id = text_of(output, "id", at) if name == "output" else ""
    return form, _with_last_id(entries, last_id) if last_id else entries


def _form(value: JsonValue, at: str) -> _Found:
    if isinstance(value, str):
        return "text", [_Entry(at=at, items=(Item.message("assistant", [value]),))]
    if not isinstance(value, list):
        raise malformed(value, at, _FORMS)
    if value and all(isinstance(entry, list) for entry in value):
        states = [(objects_of(entry, f"{at}[{place}]"), f"{at}[{place}]") for place, entry in enumerate(value)]
        return "snapshots", _flattened([_conversation(state, where)[1] for state, where in states])
    objects = objects_of(value, at)
    if any(map(_is_response, objects)):
        return "responses", [_response(entry, f"{at}[{place}]") for place, entry in enumerate(objects)]
    return _conversation(objects, at)


def _conversation(objects: Sequence[Fields], at: str) -> _Found:
    """A list of messages or items: what has a type is an item of Responses, whose messages may do without."""
    form: OutputForm = "chat"
    if any(entry.get("type") is not None for entry in objects):
        form = "items"
    elif any(_is_anthropic(entry) for entry in objects):
        form = "messages"
    entries: list[_Entry] = []
    for place, entry in enumerate(objects):
        where = f"{at}[{place}]"
        match form:
            case "items":
                items: Sequence[Item] = [responses.item_of(entry, where)]
            case "messages":
                items = messages.message_items(entry, where)
            case _:
                items = chat.message_items(entry, where)
        runs = groupby(items, key=lambda item: item.model_authored)
        entries += (_Entry(at=where, items=tuple(run)) for _, run in runs)
    return form, _said(entries)


def _is_anthropic(message: Fields) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in _BLOCKS for part in content)


def _is_response(value: Fields) -> bool:
    if value.get("type") is not None:
        return value["type"] == "message" and "stop_reason" in value  # an item has a type too, even one with `output`
    return isinstance(value.get("choices"), list) or isinstance(value.get("output"), list)


def _response(value: Fields, at: str) -> _Entry:
    """A whole response of any dialect."""
    dialect: Dialect = responses if "output" in value else chat if "choices" in value else messages
    try:
        answers = dialect.answers(value)
        response_id = dialect.response_id(value)
    except (BadRequest, UnreadableAnswer) as error:
        raise BadRequest(f"{at} is no response that was answered in full ({error}): leave it out", param=at) from error
    if len(answers) != 1:
        why = f"{at} holds {len(answers)} choices, one of them was used: send that one, or accept calls by their ids"
        raise BadRequest(why, param=at)
    return _Entry(at=at, items=answers[0].items, response_id=response_id, whole=True)


def _references(output: JsonValue) -> tuple[str, ...] | None:
    """Call or response ids in order; None when the output refers to no calls."""
    if isinstance(output, list):
        return _ids(output, "output") if output and all(map(_is_reference, output)) else None
    if not isinstance(output, dict):
        return None
    owner, at = output, "output"
    if output.get("ng_trajectory") is not None:
        at = "output.ng_trajectory"
        owner = object_of(output["ng_trajectory"], at)
    if owner.get("turns") is None:
        calls = owner.get("calls")
        if calls is not None and not isinstance(calls, list):
            raise malformed(calls, f"{at}.calls", "a list of call or response ids")
        return None if calls is None else _ids(calls, f"{at}.calls")
    turns = [turn.get("model_calls") or [] for turn in objects_of(owner["turns"], f"{at}.turns")]
    silent = [place for place, calls in enumerate(turns) if not calls]
    if silent and len(silent) < len(turns):
        why = f"{at}.turns[{silent[0]}] has no model_calls, other turns have: name the calls of every turn or of none"
        raise BadRequest(why, param=at)
    found = [
        reference
        for place, calls in enumerate(turns)
        for reference in _ids(objects_of(calls, f"{at}.turns[{place}].model_calls"), f"{at}.turns[{place}].model_calls")
    ]
    return tuple(found) or None


def _is_reference(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return not {"type", "role"} & value.keys() and any(value.get(name) is not None for name in _REFERENCES)
    return isinstance(value, str)


def _ids(values: Iterable[JsonValue], at: str) -> tuple[str, ...]:
    found: list[str] = []
    for place, value in enumerate(values):
        where = f"{at}[{place}]"
        if not isinstance(value, str):
            owner = object_of(value, where)
            said = [text for name in _REFERENCES[:2] if (text := text_of(owner, name, where))]
            if len(said) > 1:
                why = f"{where} has call_id and response_id, which may differ: send one of them"
                raise BadRequest(why, param=where)
            value = said[0] if said else text_of(owner, _REFERENCES[2], where)  # a harness's own name for a call
        if not value:
            why = f"{where} is empty, a reference names a call: send its call id or response id"
            raise BadRequest(why, param=where)
        found.append(value)
    return tuple(found)


def _said(entries: Sequence[_Entry]) -> list[_Entry]:
    """Without reasoning that says nothing; a turn of the model that is nothing else is an empty message."""
    found: list[_Entry] = []
    for authored, run in groupby(entries, key=lambda entry: entry.authored):
        turn = list(run)
        kept = [entry for entry in turn if any(item.kind != "reasoning" or item.text for item in entry.items)]
        found += kept or ([replace(turn[0], items=(Item.message("assistant"),))] if authored else [])
    return found


def _with_last_id(entries: Sequence[_Entry], response_id: str) -> list[_Entry]:
    authored = [place for place, entry in enumerate(entries) if entry.authored]
    return [
        replace(entry, response_id=response_id) if authored and place == authored[-1] and not entry.whole else entry
        for place, entry in enumerate(entries)
    ]


def _flattened(snapshots: Sequence[Sequence[_Entry]]) -> list[_Entry]:
    """Every passage once, in the order in which the snapshots show it first."""
    found: list[_Entry] = []
    places: defaultdict[tuple[str | bytes, ...], list[int]] = defaultdict(list)
    contents: dict[str, tuple[bytes, ...]] = {}
    after: list[_Entry] = []
    for snapshot in snapshots:
        position, earlier = 0, len(found)
        after = []
        for entry in snapshot:
            if not entry.authored:
                after.append(entry)
                continue
            _check_content(entry, contents)
            known = places[entry.item_ids or entry.digests]
            at = bisect_left(known, position)
            if at < len(known) and known[at] < earlier:
                position = known[at] + 1
            else:
                found += after
                known.append(len(found))
                found.append(entry)
            after = []
    return [*found, *after]


def _check_content(entry: _Entry, contents: dict[str, tuple[bytes, ...]]) -> None:
    for item_id in entry.item_ids:
        if contents.setdefault(item_id, entry.digests) != entry.digests:
            why = f"{entry.at} has id {item_id!r} of an item with other content, an id names one item"
            raise BadRequest(f"{why}: send each item as it was answered", param=entry.at)


def _passages(entries: Sequence[_Entry]) -> Iterable[Passage]:
    before: list[_Entry] = []
    for place, entry in enumerate(entries):
        if not entry.authored:
            before.append(entry)
            continue
        reasoning = reasoning_digest(entry.items)
        yield Passage(
            at=entry.at,
            roles=tuple(item.role for item in entry.items),
            digests=tuple(digest.hex() for digest in entry.digests),
            keys=tuple(_keys(entries, place)),
            reasoning=None if reasoning is None else reasoning.hex(),
            item_ids=entry.item_ids,
            tool_call_ids=tuple(item.call.call_id for item in entry.items if item.call is not None),
            response_id=entry.response_id,
            whole=entry.whole,
            before=_between(before),
        )
        before = []


def _keys(entries: Sequence[_Entry], place: int) -> Iterable[str]:
    """The answer key of this entry, of it and the next, ..."""
    items: list[Item] = []
    for entry in entries[place : place + JOINED]:
        if not entry.authored or (entry.whole and items):
            return
        items += entry.items
        yield answer_key(items).hex()
        if entry.whole:
            return


def _tail(entries: Sequence[_Entry]) -> list[_Entry]:
    authored = [place for place, entry in enumerate(entries) if entry.authored]
    return list(entries[authored[-1] + 1 :] if authored else entries)


def _between(entries: Iterable[_Entry]) -> tuple[Between, ...]:
    return tuple(Between(role=item.role, digest=item.digest.hex()) for entry in entries for item in entry.items)
