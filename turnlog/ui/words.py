"""How values read on a page: times, counts, shares; and the templates, which know these by name.

Knows Jinja and formats; does not know the log. Law: whatever is put into a page is escaped, and a name that a template
does not get is an error, not an empty place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from difflib import SequenceMatcher
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import JsonValue

HUES = 10
"""Colours that rows take in turn."""


_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_WORDS = 3000
_ALIKE = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """Two texts, each in parts of (differs, text)."""

    there: tuple[tuple[bool, str], ...]
    here: tuple[tuple[bool, str], ...]


def environment() -> Environment:
    """The templates."""
    found = Environment(
        loader=PackageLoader("turnlog.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "day": day,
        "clock": clock,
        "iso": iso,
        "count": count,
        "lasted": lasted,
        "percent": percent,
        "hue": hue,
        "pretty": pretty,
        "spoken": spoken,
    }
    found.globals |= {"link": link, "marked": marked}
    return found


def day(at: int) -> str:
    """A time in microseconds, to the minute.

    >>> day(1_700_000_000_000_000)
    '2023-11-14 22:13'
    """
    return _time(at).strftime("%Y-%m-%d %H:%M")


def clock(at: int) -> str:
    """A time in microseconds, to the millisecond.

    >>> clock(1_700_000_000_123_456)
    '2023-11-14 22:13:20.123'
    """
    return _time(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def iso(at: int) -> str:
    """A time as HTML's `datetime` has it."""
    return _time(at).isoformat()


def count(number: float) -> str:
    r"""A whole number, its thousands apart.

    >>> count(1234567)
    '1\u202f234\u202f567'
    """
    return f"{number:,.0f}".replace(",", "\u202f")


def lasted(microseconds: int) -> str:
    """A span of time.

    >>> [lasted(each) for each in (0, 500, 41_300, 2_500_000, 125_000_000, 7_260_000_000)]
    ['0 s', '0.5 ms', '41 ms', '2.5 s', '2 min 5 s', '2 h 1 min']
    """
    seconds = microseconds / 1e6
    if not microseconds:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    """A share.

    >>> percent(0.257), percent(0.9996)
    ('26 %', '100 %')
    """
    return f"{100 * share:.0f} %"


def hue(row: int | None) -> str:
    """The class of a row's colour; that of a call without one is `none`."""
    return "none" if row is None else f"hue{(row - 1) % HUES}"


def link(path: str, **fields: str | float | date | None) -> str:
    """A path with a query; what is None is left out.

    >>> link("/step", run="a b", number=7, before=None)
    '/step?run=a+b&number=7'
    """
    return f"{path}?{urlencode({name: value for name, value in fields.items() if value is not None})}"


def marked(there: str, here: str) -> Marked | None:
    """Two texts in parts, so that what differs can be marked; None where they have too little in common for it.

    >>> marked("ls gave a.txt", "ls gave [hidden]").here
    ((False, 'ls gave '), (True, '[hidden]'))
    """
    words_there, words_here = _WORDS.findall(there), _WORDS.findall(here)
    if len(words_there) + len(words_here) > _MOST_WORDS:
        return None
    matcher = SequenceMatcher(None, words_there, words_here, autojunk=False)
    if matcher.ratio() < _ALIKE:
        return None
    found = Marked(there=(), here=())
    for tag, low, high, at, end in matcher.get_opcodes():
        cut_there, cut_here = "".join(words_there[low:high]), "".join(words_here[at:end])
        found = Marked(
            there=(*found.there, *([(tag != "equal", cut_there)] if cut_there else [])),
            here=(*found.here, *([(tag != "equal", cut_here)] if cut_here else [])),
        )
    return found


def pretty(value: JsonValue) -> str:
    """A JSON value for people."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def spoken(name: str) -> str:
    """A name of the log in words.

    >>> spoken("context_replaced"), spoken("cannot_splice:prefix_too_long")
    ('context replaced', 'cannot splice: prefix too long')
    """
    return name.replace("_", " ").replace(":", ": ")


def _time(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1e6, UTC)
