"""What changed where a row begins: the nearest earlier context beside the new one, item by item.

Knows a rollout's calls, tokens and how both are compared; does not know the log, tokenizers' files or how a change is
shown.
Law: which items changed is exact, by their digests; the text of a change is what the tokens say, and stays apart from
the items where it is not certain which of them it belongs to.

The log holds no texts. A context's tokens are cut at the tokenizer's special tokens, which templates put around turns.
A message whose text is found between two of them gives its digest again, so it is `proven`. A tool result's digest
holds its call's id, which no token shows: where the pieces that look like tool results are as many as the context's
tool results, each is taken for the one in its place. What else differs is kept apart, as `loose` text.

A tool result was hidden, and the rest is as it was:

>>> there = [ItemTrace(role=role, digest=bytes([number]) * 32) for number, role in enumerate(("user", "tool_result"))]
>>> here = [there[0], ItemTrace(role="tool_result", digest=bytes([9]) * 32)]
>>> [change.sentence() for change in compare(there, here)]
['1 item is the same', 'tool result 1 was replaced']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Literal, cast
from uuid import UUID

from engine.items import Item, MessageRole
from store.events import CallCompleted, ItemTrace, token_array

Kind = Literal["same", "replaced", "removed", "inserted", "appended"]
MESSAGES = ("system", "developer", "user", "assistant")
_RESULT = re.compile(r"tool[ _]?(response|result|output)|<\|im_start\|>tool|ipython")
"""How templates open a tool result."""
_HEAD = 60
"""Characters of a piece in which it is opened."""
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
    """`appended` is what only comes after all of the earlier context: new, and no change of it."""
    there: tuple[Part, ...]
    """In the nearest earlier context: its request, then its answer."""
    here: tuple[Part, ...]
    """In the request that begins a row."""

    def sentence(self) -> str:
        """The change in a few words, such as `tool result 3 was replaced`."""
        there, here = _named(self.there), _named(self.here)
        were = "was" if len(self.there or self.here) == 1 else "were"
        match self.kind:
            case "same":
                return "1 item is the same" if len(self.here) == 1 else f"{len(self.here)} items are the same"
            case "removed":
                return f"{there} {were} removed"
            case "appended":
                return f"{here} {'is' if len(self.here) == 1 else 'are'} new"
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
    """(there, here): every stretch of text that differs, where an item that changed has no certain text."""


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
    changed = (part for change in changes if change.kind != "same" for part in (*change.there, *change.here))
    told = detokenizer is None or all(part.text is not None for part in changed)
    loose = () if told or detokenizer is None else tuple(token_changes(tokens_there, here.prompt, detokenizer))
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
    parts_there = _parts(there, () if detokenizer is None else _pieces(tokens_there, detokenizer))
    parts_here = _parts(here, () if detokenizer is None else _pieces(tokens_here, detokenizer))
    return [
        Change(
            kind=each.kind,
            there=tuple(parts_there[each.there_start : each.there_end]),
            here=tuple(parts_here[each.here_start : each.here_end]),
        )
        for each in _stretches([trace.digest for trace in there], [trace.digest for trace in here])
    ]


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


def _stretches(there: Sequence[object], here: Sequence[object]) -> list[_Stretch]:
    """Both sequences cut into stretches that are the same, and ones that are not."""
    kinds: dict[str, Kind] = {
        "equal": "same",
        "replace": "replaced",
        "delete": "removed",
        "insert": "inserted",
        "append": "appended",
    }
    front = 0
    while front < min(len(there), len(here)) and there[front] == here[front]:
        front += 1
    back = 0
    while back < min(len(there), len(here)) - front and there[-1 - back] == here[-1 - back]:
        back += 1
    middle_there, middle_here = there[front : len(there) - back], here[front : len(here) - back]
    if len(middle_there) + len(middle_here) > _MOST:  # comparing all with all would take minutes
        tag = "replace" if middle_there and middle_here else "delete" if middle_there else "insert"
        inner: list[tuple[str, int, int, int, int]] = [(tag, 0, len(middle_there), 0, len(middle_here))]
    else:
        inner = [*SequenceMatcher(None, middle_there, middle_here, autojunk=False).get_opcodes()]
    found: list[tuple[str, int, int, int, int]] = [("equal", 0, front, 0, front)] if front else []
    found += [(tag, low + front, high + front, at + front, end + front) for tag, low, high, at, end in inner]
    if back:
        found.append(("equal", len(there) - back, len(there), len(here) - back, len(here)))
    elif found and found[-1][0] == "insert" and found[-1][1] == len(there):
        found[-1] = ("append", *found[-1][1:])
    return [
        _Stretch(kind=kinds[tag], there_start=low, there_end=high, here_start=at, here_end=end)
        for tag, low, high, at, end in found
    ]


def _parts(traces: Sequence[ItemTrace], pieces: Sequence[str]) -> list[Part]:
    counts: dict[str, int] = {}
    proven = _proven(traces, pieces)
    results = [piece for piece in pieces if _RESULT.search(piece[:_HEAD].lower())]
    taken = results if len(results) == sum(trace.role == "tool_result" for trace in traces) else []
    parts: list[Part] = []
    for index, trace in enumerate(traces):
        nth = counts[trace.role] = counts.get(trace.role, 0) + 1
        text = proven.get(trace.digest)
        if text is None and trace.role == "tool_result" and taken:
            text = taken[nth - 1]
        parts.append(
            Part(
                index=index,
                role=trace.role,
                nth=nth,
                digest=trace.digest,
                text=text,
                proven=trace.digest in proven,
            )
        )
    return parts


def _proven(traces: Sequence[ItemTrace], pieces: Sequence[str]) -> dict[bytes, str]:
    """The texts of messages, by the digests that they give."""
    wanted = {trace.digest for trace in traces if trace.role in MESSAGES}
    roles = {trace.role for trace in traces if trace.role in MESSAGES}
    found: dict[bytes, str] = {}
    for piece in pieces:
        for text in _insides(piece):
            for role in roles:
                digest = Item.message(cast("MessageRole", role), [text]).digest
                if digest in wanted:
                    found[digest] = text
    return found


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


def _insides(text: str) -> list[str]:
    """What of a piece a message may be: all of it, what follows its first line, each without white space around."""
    lines = [text, text.partition("\n")[2], text.partition(">")[2].partition("\n")[2], text.partition(">")[2]]
    lines += [each.rpartition("<")[0] for each in [*lines]]
    return [*dict.fromkeys(cut for each in lines for cut in (each, each.removesuffix("\n"), each.strip()))]


def _named(parts: Sequence[Part]) -> str:
    if len(parts) <= 2:
        return " and ".join(part.name for part in parts)
    return f"{parts[0].name} to {parts[-1].name} ({len(parts)} items)"
