"""What `turnlog explain` shows a person: each call of a recording with its decision, and the rows it comes to.

Knows files of recorded calls and how to lay out what was decided about them; does not know how that is decided. Law:
every line that was read is in a table or a count, and what gave no row says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from engine.explain import BadLine, Explained, ExplainedRow, Recording


@dataclass(slots=True, kw_only=True)
class ExplainedFile:
    """One recording, as far as it has been decided."""

    name: str
    calls: list[Explained] = field(default_factory=list[Explained])
    rows: Sequence[ExplainedRow] = ()
    bad_lines: int = 0


def decided(recording: Recording, file: Path) -> Iterator[Explained | BadLine]:
    """Every line of the file that is not empty, decided, or named as one that cannot be read."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield recording.read(line, number)
                except BadLine as bad:
                    yield bad


def tables(files: Sequence[ExplainedFile]) -> Iterator[Table | str]:
    """Each recording's calls and rows, then all in numbers."""
    for file in files:
        yield calls_table(file)
        if file.rows:
            yield rows_table(file)
    yield from counts_tables(files)
    if dropped := sum(call.reason == "reasoning_dropped" for file in files for call in file.calls):
        yield (
            f"{dropped} roots are calls whose harness did not send reasoning back: with `--reasoning restore`, here "
            "and when serving, they continue with the reasoning kept."
        )


def calls_table(file: ExplainedFile) -> Table:
    """The calls of one recording, in its order."""
    table = Table(title=escape(file.name), title_justify="left")
    table.add_column("call", justify="right")
    for name in ("decision", "why", "role", "no answer"):
        table.add_column(name, overflow="fold")
    for call in file.calls:
        decision = f"continues {call.parent}" if call.kind == "continuation" else f"[bold]{call.kind}[/]"
        unanswered = str(call.evidence.get("no_answer") or "")
        table.add_row(str(call.seq), decision, *map(escape, (_why(call), call.role or "", unanswered)))
    return table


def rows_table(file: ExplainedFile) -> Table:
    """The rows of one recording: what each would show, and what each would train."""
    table = Table()
    table.add_column("row", justify="right")
    for name in ("calls", "trains", "begins because"):
        table.add_column(name, overflow="fold")
    for number, row in enumerate(file.rows, start=1):
        trained = "all of them" if row.trained == row.calls else _path(row.trained)
        table.add_row(str(number), _path(row.calls), trained, escape(row.reason))
    return table


def counts_tables(files: Sequence[ExplainedFile]) -> Iterator[Table]:
    """All recordings in numbers, then how often a row begins for which reason."""
    counts = [_counts(file) for file in files]
    # What is rare has a column only where it is found.
    shown = [name for name in counts[0] if name in _ALWAYS or any(count[name] for count in counts)]
    table = Table()
    table.add_column("recording", overflow="fold")
    for name in shown:
        table.add_column(name, justify="right")
    for file, count in zip(files, counts, strict=True):
        table.add_row(escape(file.name), *(str(count[name]) for name in shown))
    if len(files) > 1:
        table.add_section()
        table.add_row(f"{len(files)} recordings", *(str(sum(count[name] for count in counts)) for name in shown))
    yield table
    reasons = Counter(call.reason for file in files for call in file.calls if call.kind == "root")
    if reasons:
        roots = Table("roots", "reason")
        for reason, number in reasons.most_common():
            roots.add_row(str(number), escape(reason))
        yield roots


_ALWAYS = ("calls", "continue", "roots", "rows")


def _counts(file: ExplainedFile) -> dict[str, int]:
    kinds = Counter(call.kind for call in file.calls)
    return {
        "calls": kinds["continuation"] + kinds["root"],
        "continue": kinds["continuation"],
        "roots": kinds["root"],
        "rows": len(file.rows),
        "no answer": sum("no_answer" in call.evidence for call in file.calls),
        "refused": kinds["refused"],
        "passed": kinds["passed"],
        "bad lines": file.bad_lines,
    }


def _why(call: Explained) -> str:
    """Why a call is what it is, in words; a continuation needs none, unless it was tolerant."""
    if call.kind == "continuation":
        return "its reasoning did not come back and is kept" if call.evidence.get("flags") else ""
    evidence = call.evidence
    nearest, place = evidence.get("nearest_call"), evidence.get("first_difference")
    if call.kind != "root" or place is None:
        return call.reason
    here, there = evidence.get("role_here"), evidence.get("role_there")
    roles = f"{here}" if here == there or nearest is None else f"{here or 'nothing'} for {there or 'nothing'}"
    return f"{call.reason} at item {place} ({roles})" + ("" if nearest is None else f" against call {nearest}")


def _path(calls: Sequence[int]) -> str:
    """Calls in a row, with what comes one after the other shortened.

    >>> _path([1, 2, 3, 4, 8, 9])
    '1 … 4 → 8 → 9'
    """
    runs: list[list[int]] = []
    for call in calls:
        if runs and call == runs[-1][-1] + 1:
            runs[-1].append(call)
        else:
            runs.append([call])
    return " → ".join(f"{run[0]} … {run[-1]}" if len(run) > 2 else " → ".join(map(str, run)) for run in runs)
