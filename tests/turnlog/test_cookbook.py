"""The cookbook's questions, asked of the log of the recordings, give the answers that it prints.

`python -m tests.turnlog.test_cookbook` writes the answers anew, for when a question or the log changed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from replay.attached import attached
from store import schema
from tests.turnlog.played import played_into, played_log
from turnlog.sql import Answer, ask, ask_copy

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "cookbook.md"
ENTRY = re.compile(
    r"^## (?P<title>\d+\. .+?)$(?P<words>.*?)```sql\n(?P<sql>.*?)```\n(?P<rest>.*?)(?=^## |\Z)", re.M | re.S
)
ANSWER = re.compile(r"```text\n(.*?)```\n", re.S)
ENTRIES = {found["title"]: found for found in ENTRY.finditer(PAGE.read_text())}


def printed(answer: Answer) -> str:
    """An answer in columns, as the page prints it."""
    lines = [list(answer.columns), *([shown(value) for value in line] for line in answer.lines)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(answer.columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def shown(value: object) -> str:
    """Numbers the same from every database."""
    if value is None:
        return ""
    try:
        return f"{float(str(value)):g}" if not isinstance(value, bytes) else value.hex()
    except ValueError:
        return str(value)


@pytest.fixture(scope="module")
def sqlite_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    database = played_log(tmp_path_factory.mktemp("played"))
    yield database
    database.dispose()


def test_there_are_fifteen_questions() -> None:
    assert len(ENTRIES) == 15


@pytest.mark.parametrize("title", ENTRIES)
def test_a_question_has_the_answer_that_the_page_prints(sqlite_log: Engine, title: str) -> None:
    with ask(sqlite_log, ENTRIES[title]["sql"]) as answer:
        found = printed(answer)
    (answered,) = ANSWER.findall(ENTRIES[title]["rest"])
    assert found == answered


@pytest.mark.postgres
def test_postgresql_answers_the_same(postgres_database: Engine, tmp_path: Path) -> None:
    played_into(postgres_database, tmp_path)
    for title, entry in ENTRIES.items():
        with ask(postgres_database, entry["sql"]) as answer:
            assert printed(answer) == ANSWER.findall(entry["rest"])[0], title


def test_duckdb_answers_the_same(sqlite_log: Engine) -> None:
    with attached(sqlite_log, "") as engine:
        for title, entry in ENTRIES.items():
            with ask_copy(engine, entry["sql"]) as answer:
                assert printed(answer) == ANSWER.findall(entry["rest"])[0], title


def test_every_column_of_a_view_is_documented() -> None:
    page = (DOCS / "views.md").read_text()
    for view, columns in schema.VIEWS.items():
        (section,) = re.findall(rf"^## {view}$(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M))) == list(columns)


def write_answers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = played_log(Path(folder))
        words = PAGE.read_text()
        for entry in reversed([*ENTRIES.values()]):
            with ask(database, entry["sql"]) as answer:
                block = f"\n```text\n{printed(answer)}```\n\n"
            words = f"{words[: entry.start('rest')]}{block}{words[entry.end('rest') :]}"
        database.dispose()
    PAGE.write_text(words.rstrip() + "\n")


if __name__ == "__main__":
    write_answers()
