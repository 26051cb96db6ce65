"""A call's tokens for the eye: which the policy sampled, how likely, under which version, and what they say.

Knows one event and how tokens become text; does not know the log or HTML. Law: every token of the part that is shown is
there once and in order, and the texts end to end are what the tokenizer makes of the part as a whole.

A tokenizer may give a character in several tokens. The last of them gets it, those before it get nothing:

>>> vocabulary = {0: b"a", 1: "ä".encode()[:1], 2: "ä".encode()[1:], 3: b"b"}
>>> decode = lambda ids: b"".join(vocabulary[i] for i in ids).decode(errors="replace")
>>> texts([0, 1, 2, 3], decode)
['a', '', 'ä', 'b']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from store.events import CallCompleted, logprob_array, token_array
from turnlog.boundary import Detokenizer

PAGE = 2000
"""Tokens on one page."""
BEFORE = 300
"""Tokens of the prompt that are shown before the first sampled one, when nobody asks for a place."""
PROBABILITIES = (0.9, 0.5, 0.2, 0.05, 0.01)
"""Least probability of each shade, the likeliest first; the last shade is for what is below all of them."""
_LONGEST = 12
"""Tokens after which a text that is no whole character is taken as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token."""

    place: int
    """In the whole chain, from 0."""
    token_id: int
    text: str | None
    """None without a tokenizer; empty for a part of a character."""
    special: bool
    logprob: float | None
    """None for a token that the policy did not sample: it has no loss."""
    policy: int | None
    changes: bool = False
    """Whether it is the first token that its policy version sampled in this call."""

    @property
    def shade(self) -> int | None:
        """0 for the likeliest, up to `len(PROBABILITIES)`; None when it was not sampled."""
        return None if self.logprob is None else shade(self.logprob)

    @property
    def probability(self) -> float | None:
        """Under which it was sampled."""
        return None if self.logprob is None else math.exp(self.logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a call's own tokens."""

    tokens: tuple[Token, ...]
    first: int
    """Place of the first one among the call's own, from 0."""
    of: int
    """How many the call has of its own."""
    earlier: int | None
    """Where the part before begins; None at the beginning."""
    later: int | None


def shade(logprob: float) -> int:
    """Which shade a log-probability has.

    >>> shade(0.0), shade(-0.6), shade(-20.0)
    (0, 1, 5)
    """
    probability = math.exp(logprob)
    return next((number for number, least in enumerate(PROBABILITIES) if probability >= least), len(PROBABILITIES))


def part(call: CallCompleted, tokenizer: Detokenizer | None, first: int | None = None) -> Part:
    """A page of the call's own tokens; by default the one on which its generation begins."""
    fresh = call.prompt_len - call.prev_len
    if first is None:
        first = 0 if call.delta_len <= PAGE else fresh - BEFORE
    first = max(0, min(first, call.delta_len - 1))
    ids = token_array(call.token_ids)[first : first + PAGE].tolist()
    logprobs = logprob_array(call.logprobs)
    versions = {span.start: span for span in call.policy_spans if span.end > span.start}
    said = texts(ids, tokenizer.decode) if tokenizer is not None else [None] * len(ids)
    tokens: list[Token] = []
    for at, (token_id, text) in enumerate(zip(ids, said, strict=True), start=first):
        sampled = at - fresh
        tokens.append(
            Token(
                place=call.prev_len + at,
                token_id=token_id,
                text=text,
                special=tokenizer is not None and token_id in tokenizer.special,
                logprob=float(logprobs[sampled]) if sampled >= 0 else None,
                policy=_version(call, sampled),
                changes=sampled in versions,
            )
        )
    return Part(
        tokens=tuple(tokens),
        first=first,
        of=call.delta_len,
        earlier=max(0, first - PAGE) if first else None,
        later=first + PAGE if first + PAGE < call.delta_len else None,
    )


def texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What each token adds to the text of those before it, looking back no further than a few."""
    found: list[str] = []
    start = read = 0  # text of ids[start:read] is out already; it is kept for the spaces between words
    for end in range(1, len(ids) + 1):
        before, whole = decode(ids[start:read]), decode(ids[start:end])
        if whole.endswith("\ufffd") and end - read < _LONGEST and end < len(ids):
            found.append("")
            continue
        found.append(whole[len(before) :])
        start, read = read, end
    return found


def _version(call: CallCompleted, sampled: int) -> int | None:
    return next((span.policy_version for span in call.policy_spans if span.start <= sampled < span.end), None)
