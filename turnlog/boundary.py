"""What changed where a row begins: the nearest earlier context beside the new one, item by item.

Knows a rollout's calls, tokens and how both are compared; does not know the log, tokenizers' files or how a change is
shown.
Law: which items changed is exact, by their digests; the text of a change is what the tokens say, and stays apart from
the items where it is not certain which of them it belongs to.

The log holds no texts. Each context's tokens are cut at the tokenizer's special tokens, as templates put them between
turns, and the pieces of both contexts are compared as the items are. Where as many stretches of pieces changed as of
items, and a stretch has as many pieces as items, the texts are those items' own. A message whose text gives its digest
again is `proven`.

A tool result was hidden, and the rest is as it was:

>>> there = [ItemTrace(role=role, digest=bytes([number]) * 32) for number, role in enumerate(("user", "tool_result"))]
>>> here = [there[0], ItemTrace(role="tool_result", digest=bytes([9]) * 32)]
>>> [change.sentence() for change in compare(there, here)]
['1 item is the same', 'tool result 1 was replaced']
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Literal, cast
from uuid import UUID

from engine.items import Item, MessageRole
from store.events import CallCompleted, ItemTrace, token_array

Kind = Literal["same", "replaced", "removed", "inserted"]
MESSAGES = ("system", "developer", "user", "assistant")
_MOST = 4000
"""Items or pieces beyond which only the common start and end of two contexts are told from what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One item of one of the two contexts."""

    index: int
    """Its place in the context, from 0."""
    role: str
    nth: int
    """Its place among the items of its role, from 1."""
    digest: bytes
    text: str | None = None
    """None where nothing says which text is this item's."""
    proven: bool = False
    """The text gives the item's digest."""

    @property
    def name(self) -> str:
        """As people call it: `tool result 3`."""
        return f"{self.role.replace('_', ' ')} {self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stretch of items that both contexts share, or that differs; in the order of the contexts."""

    kind: Kind
    there: tuple[Part, ...]
    """In the nearest earlier context: its request, then its answer."""
    here: tuple[Part, ...]
    """In the request that begins a row."""
    text_there: str | None = None
    """What the tokens of the whole stretch say, markup of the template included; None when it is not certain."""
    text_here: str | None = None

    def sentence(self) -> str:
        """The change in a few words, such as `tool result 3 was replaced`."""
        there, here = _named(self.there), _named(self.here)
        were = "was" if len(self.there or self.here) == 1 else "were"
        match self.kind:
            case "same":
                return "1 item is the same" if len(self.here) == 1 else f"{len(self.here)} items are the same"
            case "removed":
                return f"{there} {were} removed"
            case "inserted":
                return f"{here} {were} inserted"
            case "replaced" if [part.role for part in self.there] == [part.role for part in self.here]:
                return f"{there} {were} replaced"
            case "replaced":
                return f"{there} {were} replaced by {here}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenizer:
    """A tokenizer as far as texts need one."""

    decode: Callable[[Sequence[int]], str]
    """The text of tokens, special ones shown."""
    special: Collection[int]
    """Tokens that templates put around turns; pieces are cut before each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One call's whole request and prompt, and what was answered."""

    call: CallCompleted
    request: tuple[ItemTrace, ...]
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a row begins, beside the nearest earlier call."""

    here: Context
    nearest: Context | None
    """None for a root that has nothing to be compared with."""
    changes: tuple[Change, ...]
    """All stretches in order; empty without a nearest call."""
    loose: tuple[tuple[str, str], ...]
    """(there, here): stretches of text that differ and are no certain item's; empty where `changes` has the texts."""


def context(calls: Mapping[UUID, CallCompleted], call_id: UUID) -> Context:
    """The whole context of a call, from the calls of its rollout. Raises KeyError when one above it is missing."""
    path = [calls[call_id]]
    while (parent_id := path[-1].parent_id) is not None:
        path.append(calls[parent_id])
    path.reverse()
    tokens = [token for call in path for token in token_array(call.token_ids).tolist()]
    call = path[-1]
    return Context(
        call=call,
        request=tuple(trace for each in path for trace in each.request_items),
        prompt=tuple(tokens[: call.prompt_len]),
        sampled=tuple(tokens[call.prompt_len :]),
    )


def boundary(
    calls: Mapping[UUID, CallCompleted], root: CallCompleted, detokenizer: Detokenizer | None = None
) -> Boundary:
    """A root beside the nearest earlier call that its evidence names."""
    here = context(calls, root.call_id)
    named = root.evidence.get("nearest_call")
    if not isinstance(named, str) or UUID(named) not in calls:
        return Boundary(here=here, nearest=None, changes=(), loose=())
    nearest = context(calls, UUID(named))
    tokens_there = (*nearest.prompt, *nearest.sampled)
    changes = compare(
        (*nearest.request, *nearest.call.answer_items),
        here.request,
        tokens_there=tokens_there,
        tokens_here=here.prompt,
        detokenizer=detokenizer,
    )
    told = any(change.text_there is not None or change.text_here is not None for change in changes)
    loose = () if detokenizer is None or told else tuple(token_changes(tokens_there, here.prompt, detokenizer))
    return Boundary(here=here, nearest=nearest, changes=tuple(changes), loose=loose)


def compare(
    there: Sequence[ItemTrace],
    here: Sequence[ItemTrace],
    *,
    tokens_there: Sequence[int] = (),
    tokens_here: Sequence[int] = (),
    detokenizer: Detokenizer | None = None,
) -> list[Change]:
    """Every stretch of items in order, the same ones too.

    Args:
        there: the nearest earlier context: its request, then the answer it was served.
        here: the request that begins a row.
        tokens_there: the earlier context's tokens, prompt and generation.
        tokens_here: the new prompt's.
        detokenizer: without one there are no texts.
    """
    stretches = _stretches([trace.digest for trace in there], [trace.digest for trace in here])
    parts_there, parts_here = _parts(there), _parts(here)
    texts: dict[int, _Texts] = {}
    if detokenizer is not None:
        texts = _texts(stretches, _pieces(tokens_there, detokenizer), _pieces(tokens_here, detokenizer))
    changes: list[Change] = []
    for number, each in enumerate(stretches):
        found = texts.get(number, _Texts())
        changes.append(
            Change(
                kind=each.kind,
                there=_with_texts(parts_there[each.there_start : each.there_end], found.there),
                here=_with_texts(parts_here[each.here_start : each.here_end], found.here),
                text_there=None if found.there is None else "".join(found.there),
                text_here=None if found.here is None else "".join(found.here),
            )
        )
    return changes


def token_changes(
    tokens_there: Sequence[int], tokens_here: Sequence[int], detokenizer: Detokenizer
) -> list[tuple[str, str]]:
    """The stretches of text that differ, (there, here), for when nothing says which items they belong to."""
    there, here = _pieces(tokens_there, detokenizer), _pieces(tokens_here, detokenizer)
    return [
        ("".join(there[each.there_start : each.there_end]), "".join(here[each.here_start : each.here_end]))
        for each in _stretches(there, here)
        if each.kind != "same"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    kind: Kind
    there_start: int
    there_end: int
    here_start: int
    here_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    there: list[str] | None = None
    here: list[str] | None = None


def _stretches(there: Sequence[object], here: Sequence[object]) -> list[_Stretch]:
    """Both sequences cut into stretches that are the same, and ones that are not."""
    kinds: dict[str, Kind] = {"equal": "same", "replace": "replaced", "delete": "removed", "insert": "inserted"}
    front = 0
    while front < min(len(there), len(here)) and there[front] == here[front]:
        front += 1
    back = 0
    while back < min(len(there), len(here)) - front and there[-1 - back] == here[-1 - back]:
        back += 1
    middle_there, middle_here = there[front : len(there) - back], here[front : len(here) - back]
    if len(middle_there) + len(middle_here) > _MOST:  # comparing all with all would take minutes
        tag = "replace" if middle_there and middle_here else "delete" if middle_there else "insert"
        inner = [(tag, 0, len(middle_there), 0, len(middle_here))]
    else:
        inner = SequenceMatcher(None, middle_there, middle_here, autojunk=False).get_opcodes()
    found: list[tuple[str, int, int, int, int]] = [("equal", 0, front, 0, front)] if front else []
    found += [(tag, low + front, high + front, at + front, end + front) for tag, low, high, at, end in inner]
    if back:
        found.append(("equal", len(there) - back, len(there), len(here) - back, len(here)))
    return [
        _Stretch(kind=kinds[tag], there_start=low, there_end=high, here_start=at, here_end=end)
        for tag, low, high, at, end in found
    ]


def _parts(traces: Sequence[ItemTrace]) -> list[Part]:
    counts: dict[str, int] = {}
    parts: list[Part] = []
    for index, trace in enumerate(traces):
        counts[trace.role] = counts.get(trace.role, 0) + 1
        parts.append(Part(index=index, role=trace.role, nth=counts[trace.role], digest=trace.digest))
    return parts


def _pieces(tokens: Sequence[int], detokenizer: Detokenizer) -> list[str]:
    """The text in pieces that begin at special tokens; what is white space alone goes with the piece before it."""
    edges = sorted({0, len(tokens), *(at for at, token in enumerate(tokens) if token in detokenizer.special)})
    pieces: list[str] = []
    for low, high in pairwise(edges):
        text = detokenizer.decode(tokens[low:high])
        bare = detokenizer.decode([token for token in tokens[low:high] if token not in detokenizer.special])
        if pieces and not bare.strip():
            pieces[-1] += text
        else:
            pieces.append(text)
    return pieces


def _texts(stretches: Sequence[_Stretch], there: Sequence[str], here: Sequence[str]) -> dict[int, _Texts]:
    """The pieces of each stretch of items that changed, by its number; empty when they do not correspond."""
    changed = [number for number, each in enumerate(stretches) if each.kind != "same"]
    pieces = [each for each in _stretches(there, here) if each.kind != "same"]
    # The prompt ends with the template's opening of the next answer, where the earlier context has its answer.
    if len(pieces) == len(changed) + 1 and pieces[-1].there_end == len(there) and pieces[-1].here_end == len(here):
        pieces.pop()
    if [each.kind for each in pieces] != [stretches[number].kind for number in changed]:
        return {}
    return {
        number: _Texts(there=[*there[each.there_start : each.there_end]], here=[*here[each.here_start : each.here_end]])
        for number, each in zip(changed, pieces, strict=True)
    }


def _with_texts(parts: Sequence[Part], texts: list[str] | None) -> tuple[Part, ...]:
    """The items with their texts where there is one for each."""
    if texts is None or len(texts) != len(parts):
        return tuple(parts)
    return tuple(_with_text(part, text) for part, text in zip(parts, texts, strict=True))


def _with_text(part: Part, text: str) -> Part:
    """The item's own text where it can be told from the template's around it, by giving its digest; else all of it."""
    own: str | None = None
    if part.role in MESSAGES:
        own = next((each for each in _insides(text) if _digest(part.role, each) == part.digest), None)
    return Part(
        index=part.index,
        role=part.role,
        nth=part.nth,
        digest=part.digest,
        text=text if own is None else own,
        proven=own is not None,
    )


def _insides(text: str) -> list[str]:
    """What of a piece a message may be: all of it, what follows its first line, each without white space around."""
    lines = [text, text.partition("\n")[2], text.partition(">")[2].partition("\n")[2], text.partition(">")[2]]
    lines += [each.rpartition("<")[0] for each in [*lines]]
    return [*dict.fromkeys(cut for each in lines for cut in (each, each.removesuffix("\n"), each.strip()))]


def _digest(role: str, text: str) -> bytes:
    return Item.message(cast("MessageRole", role), [text]).digest


def _named(parts: Sequence[Part]) -> str:
    if len(parts) <= 2:
        return " and ".join(part.name for part in parts)
    return f"{parts[0].name} to {parts[-1].name} ({len(parts)} items)"
