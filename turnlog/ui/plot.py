"""Plots of columns, as numbers that a template turns into SVG.

Knows values and geometry; does not know what they mean, SVG's syntax or colours. Law: a column's parts are as high as
their values are, on an axis that begins at zero unless values are below it.

>>> plot = columns([Column(label="a", parts=(Part(value=2.0, kind="k"), Part(value=3.0, kind="l")))], height=110)
>>> [(box.y, box.height) for box in plot.boxes], [mark.text for mark in plot.marks]
([(70, 40), (10, 60)], ['0', '1', '2', '3', '4', '5'])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEFT, TOP, BOTTOM = 52, 10, 22
_NARROWEST, _WIDEST, _GAP = 3, 46, 0.22
_WIDTH = 620
_LETTER, _APART = 7, 12
"""Pixels of a letter below the axis, and between two labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a column, on top of the parts before it."""

    value: float
    kind: str
    """What it is of: the class of its box."""
    base: float | None = None
    """Where it begins, when it does not stand on the part before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column."""

    label: str
    parts: tuple[Part, ...]
    title: str = ""
    """What is said of it in words."""
    href: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a column in pixels."""

    x: int
    y: int
    width: int
    height: int
    kind: str
    title: str
    href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A text on an axis."""

    at: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """All of it."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    marks: tuple[Mark, ...]
    """Of the upright axis, with a line at each."""
    labels: tuple[Mark, ...] = field(default=())
    """Below the axis."""


def columns(values: Sequence[Column], *, height: int = 180, width: int = _WIDTH, whole: bool = True) -> Plot:
    """Columns side by side; `whole` values get no marks at fractions."""
    inner = height - TOP - BOTTOM if height > 140 else height - TOP
    edges = [edge for column in values for edge in _edges(column)]
    steps = _steps(min([0.0, *edges]), max([0.0, *edges]), whole=whole)
    low, high = steps[0], steps[-1]
    slot = max(_NARROWEST, min(_WIDEST, (width - LEFT) / max(1, len(values))))
    wide = max(2, int(slot * (1 - _GAP)))

    def y(value: float) -> int:
        return TOP + round(inner * (high - value) / (high - low))

    boxes: list[Box] = []
    labels: list[Mark] = []
    for number, column in enumerate(values):
        x = LEFT + int(number * slot + (slot - wide) / 2)
        stands = 0.0
        for part in column.parts:
            base = stands if part.base is None else part.base
            top, bottom = y(max(base, base + part.value)), y(min(base, base + part.value))
            stands = base + part.value
            if part.value:
                boxes.append(
                    Box(
                        x=x,
                        y=top,
                        width=wide,
                        height=max(bottom - top, 2),
                        kind=part.kind,
                        title=column.title or column.label,
                        href=column.href,
                    )
                )
        middle = x + wide // 2
        if not labels or middle - labels[-1].at >= _LETTER * len(column.label) + _APART:
            labels.append(Mark(at=middle, text=column.label))
    return Plot(
        width=max(width, LEFT + int(slot * len(values))),
        height=height,
        boxes=tuple(boxes),
        marks=tuple(Mark(at=y(step), text=_short(step)) for step in steps),
        labels=tuple(labels),
    )


def _edges(column: Column) -> list[float]:
    found: list[float] = []
    stands = 0.0
    for part in column.parts:
        base = stands if part.base is None else part.base
        stands = base + part.value
        found += [base, stands]
    return found


def _steps(low: float, high: float, *, whole: bool) -> list[float]:
    """Four to six round numbers that hold both.

    >>> _steps(0, 0.83, whole=False), _steps(0, 1, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0, 1])
    """
    span = (high - low) or 1.0
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    """A number for an axis.

    >>> _short(2500000), _short(12000), _short(0.25), _short(3.0)
    ('2.5M', '12k', '0.25', '3')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
