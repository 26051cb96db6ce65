"""Every page over HTTP: whole HTML, nothing from elsewhere, everything escaped, and each link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from store.database import open_database
from tests.turnlog.played import played_log
from turnlog.boundary import Detokenizer

VOID = frozenset(("meta", "link", "input", "br", "hr", "img"))
Visit = Callable[..., TestClient]


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps links, texts and what a reader hears."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: set[str] = set()
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.inputs: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        assert not [name for name in found if name.startswith("on") or name == "style"], "the policy forbids these"
        assert tag != "script"
        if tag == "a" and (href := found.get("href")):
            self.links.add(href)
        if name := found.get("id"):
            self.ids.append(name)
        if tag == "label" and (name := found.get("for")):
            self.labelled.add(name)
        if tag in ("input", "select") and found.get("type") != "hidden":
            self.inputs.append(found)
        if tag in ("link", "img"):
            assert str(found.get("href", found.get("src"))).startswith("/"), "nothing comes from elsewhere"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(client: TestClient, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text[-800:])
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    found = Page(answer.text)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    for each in found.inputs:
        assert each.get("aria-label") or each.get("id") in found.labelled, each
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The played recordings; read only, so that one copy does for all tests."""
    made = played_log(tmp_path_factory.mktemp("played"))
    url = made.url.render_as_string()
    made.dispose()
    database = open_database(url)
    yield database
    database.dispose()


def test_every_page_that_a_link_leads_to_is_whole(played: Engine, visit: Visit) -> None:
    client = visit(played, tokenizer=Detokenizer(decode=lambda ids: "".join(f"<{i}>" for i in ids), special={1}))
    waiting, seen, kinds = ["/"], set[str](), dict[str, int]()
    while waiting:
        path = waiting.pop(0)
        kind = re.sub(r"[0-9a-f-]{36}|(?<=rollouts/)[^?]+|=[^&]*", "X", path)
        if path in seen or kinds.get(kind, 0) >= 12:  # some of each kind
            continue
        seen.add(path)
        kinds[kind] = kinds.get(kind, 0) + 1
        waiting += [urljoin(path, link).partition("#")[0] for link in sorted(page_of(client, path).links)]
    assert {"/", "/runs", "/boundaries"} <= seen
    for start in ("/rollouts/", "/calls/", "/run?", "/step?", "/?group=", "/?reason="):
        assert any(path.startswith(start) for path in seen), start


def test_what_a_harness_wrote_is_text_and_nothing_else(
    sqlite_database: Engine, log_of_rollouts: Callable[[Engine], None], visit: Visit
) -> None:
    log_of_rollouts(sqlite_database)
    client = visit(sqlite_database, tokenizer=Detokenizer(decode=lambda ids: "<b>bold</b>" * len(ids), special=()))
    for path in ("/", "/rollouts/forked", "/boundaries", "/?task=%22%3E%3Cscript%3E", "/?harness=codex+<b>"):
        text = client.get(path).text
        assert "<script" not in text
        assert "codex <b>" not in text
        page_of(client, path)
    for link in page_of(client, "/rollouts/forked").links:
        if link.startswith("/calls/"):
            text = client.get(link).text
            assert "<b>" not in text
            assert "<i>" not in text
            page_of(client, link)
    assert "Count the &lt;script&gt;alert(1)&lt;/script&gt; files &amp; folders" in client.get("/").text


def test_a_filter_stays_in_the_form_and_in_the_links_to_other_pages(
    sqlite_database: Engine, log_of_rollouts: Callable[[Engine], None], visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnlog.ui import listing

    log_of_rollouts(sqlite_database)
    monkeypatch.setattr(listing.page, "__kwdefaults__", {**listing.page.__kwdefaults__, "size": 3})
    client = visit(sqlite_database)
    first = client.get("/?task=number&harness=&state=scored").text
    assert 'name="task" value="number"' in first
    (older,) = re.findall(r'rel="next" href="([^"]+)"', first)
    assert older.startswith("/?before=")
    assert "task=number" in older
    assert "state=scored" in older
    assert "harness" not in older


def test_a_rollout_says_what_it_was(
    sqlite_database: Engine, log_of_rollouts: Callable[[Engine], None], visit: Visit
) -> None:
    log_of_rollouts(sqlite_database)
    client = visit(sqlite_database)
    found = page_of(client, "/rollouts/forked")
    text = " ".join(" ".join(found.texts).split())
    for said in ("Row 3", "branches off call 1", "item edited at item 3", "the engine <i>said</i> no", "too long"):
        assert said in text
    assert "0.500" in text
    call = next(link for link in found.links if link.startswith("/calls/"))
    assert "Start the page with" not in client.get(call).text or "--tokenizer" in client.get(call).text


def test_tokens_stand_in_a_table_too(played: Engine, visit: Visit) -> None:
    client = visit(played)
    (call, *_) = [link for link in page_of(client, "/rollouts/codex").links if link.startswith("/calls/")]
    found = page_of(client, f"{call}?table=1")
    assert "Log-probability" in found.texts


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nothing", 404, "no such page"),
        ("/rollouts/nobody", 404, "nobody"),
        ("/calls/not-an-id", 422, "valid UUID"),
        ("/calls/00000000-0000-7000-8000-000000000000", 404, "is not in the log"),
        ("/run?name=nobody", 404, "is not in the log"),
        ("/run?name=played&budget=0", 422, "at least one position"),
        ("/run", 422, "name"),
        ("/step?run=played&number=99", 404, "step 99"),
        ("/?reward_min=much", 422, "reward_min"),
        ("/?state=happy", 422, "state"),
        ("/?since=yesterday", 422, "since"),
        ("/?before=-1", 422, "before"),
        ("/rollouts/codex?first=x", 422, "first"),
    ],
)
def test_what_cannot_be_shown_is_said_on_a_page(
    played: Engine, visit: Visit, path: str, status: int, said: str
) -> None:
    assert said in " ".join(page_of(visit(played), path, status).texts)


def test_a_log_that_is_away_is_said_on_a_page(tmp_path: Path, visit: Visit) -> None:
    database = played_log(tmp_path)
    client = visit(database)
    page_of(client, "/")
    database.dispose()
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "played.db").mkdir()
    assert "unable to open" in " ".join(page_of(client, "/", 503).texts)
    database.dispose()


def test_the_page_changes_nothing(sqlite_database: Engine, visit: Visit, log_of_rollouts: Any) -> None:
    log_of_rollouts(sqlite_database)
    client = visit(sqlite_database)
    with sqlite_database.connect() as connection:
        before = connection.exec_driver_sql("pragma data_version").scalar()
        for path in ("/", "/rollouts/forked", "/runs", "/boundaries"):
            client.get(path)
        assert connection.exec_driver_sql("pragma data_version").scalar() == before
    for method in ("post", "put", "delete"):
        assert getattr(client, method)("/rollouts/forked").status_code == 405
