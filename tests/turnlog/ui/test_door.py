"""Who may see the page."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from turnlog.ui.door import COOKIE, expect_guarded
from turnlog.ui.errors import OpenToAll, WeakToken

TOKEN = "correct-horse-battery-staple"
HTML = {"accept": "text/html,*/*"}
Visit = Callable[..., TestClient]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_other_machines_are_let_in_by_a_token_alone() -> None:
    expect_guarded("127.0.0.1", None)
    expect_guarded("::1", None)
    expect_guarded("0.0.0.0", TOKEN)
    for host in ("0.0.0.0", "::", "192.168.1.4", "log.example.org"):
        with pytest.raises(OpenToAll, match="TURNLOG_UI_TOKEN"):
            expect_guarded(host, None)
    for token in ("short", "", "with spaces in between it all", "ünforgettable-to-be-sure"):
        with pytest.raises(WeakToken):
            expect_guarded("127.0.0.1", token)


@pytest.mark.parametrize("host", ["rebound.example.org", "rebound.example.org:7080", "127.0.0.1.example.org", ""])
def test_without_a_token_only_this_machines_own_names_are_answered(
    sqlite_database: Engine, visit: Visit, host: str
) -> None:
    client = visit(sqlite_database)
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"host": "[::1]:7080"}).status_code == 200
    refused = client.get("/", headers={"host": host})
    assert refused.status_code == 421
    assert "TURNLOG_UI_TOKEN" in refused.text


@pytest.mark.parametrize("path", ["/", "/rollouts/r1", "/boundaries", "/runs", "/nothing", "/login/../"])
def test_with_a_token_nothing_is_shown_to_who_has_none(sqlite_database: Engine, visit: Visit, path: str) -> None:
    client = visit(sqlite_database, token=TOKEN, host="log.example.org")
    for wrong in (
        {},
        {"authorization": "Bearer wrong"},
        {"cookie": f"{COOKIE}=wrong"},
        {"cookie": f"{COOKIE}={TOKEN}"},
    ):
        refused = client.get(path, headers=wrong)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    asked = client.get(path, headers=HTML)
    assert asked.status_code == 303
    assert asked.headers["location"].startswith("/login?next=%2F")


def test_a_program_shows_the_token_in_a_header(sqlite_database: Engine, visit: Visit) -> None:
    client = visit(sqlite_database, token=TOKEN, host="log.example.org")
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_browser_shows_it_once_and_comes_back_to_where_it_wanted(sqlite_database: Engine, visit: Visit) -> None:
    client = visit(sqlite_database, token=TOKEN, host="log.example.org")
    asked = client.get("/boundaries?harness=a", headers=HTML)
    form = client.get(asked.headers["location"])
    assert 'name="next" value="/boundaries?harness=a"' in form.text
    wrong = client.post("/login", data={"token": "guessed", "next": "/boundaries?harness=a"})
    assert wrong.status_code == 303
    assert COOKIE not in client.cookies
    assert "That is not the token" in client.get(wrong.headers["location"]).text
    right = client.post("/login", data={"token": TOKEN, "next": "/boundaries?harness=a"})
    assert (right.status_code, right.headers["location"]) == (303, "/boundaries?harness=a")
    cookie = right.headers["set-cookie"]
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=Strict"} <= {each.strip() for each in cookie.split(";")}
    assert client.get("/boundaries").status_code == 200


def test_a_session_ends_with_the_page_that_began_it(sqlite_database: Engine, visit: Visit) -> None:
    first = visit(sqlite_database, token=TOKEN, host="log.example.org")
    first.post("/login", data={"token": TOKEN})
    again = visit(sqlite_database, token=TOKEN, host="log.example.org")
    again.cookies.update(first.cookies)
    assert first.get("/").status_code == 200
    assert again.get("/").status_code == 401


@pytest.mark.parametrize("wanted", ["//example.org", "https://example.org", "/\\example.org", "javascript:alert(1)"])
def test_nobody_is_sent_elsewhere_after_the_token(sqlite_database: Engine, visit: Visit, wanted: str) -> None:
    client = visit(sqlite_database, token=TOKEN, host="log.example.org")
    assert client.post("/login", data={"token": TOKEN, "next": wanted}).headers["location"] == "/"


def test_the_command_refuses_to_be_open_to_all(run: Run, sqlite_database: Engine, sqlite_url: str) -> None:
    found = run("ui", "--host", "0.0.0.0", "--db", sqlite_url)
    assert found.returncode == 1
    assert found.stderr.startswith("turnlog: --host 0.0.0.0 can be reached from other machines")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = run("ui", "--port", str(taken.getsockname()[1]), "--db", sqlite_url)
    assert (busy.returncode, busy.stderr.count("\n")) == (1, 1)
    assert "name another --port" in busy.stderr


def test_the_command_serves_until_it_is_interrupted_and_writes_no_token(
    sqlite_database: Engine, sqlite_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "turnlog", "ui", "--host", "0.0.0.0", "--port", "0", "--db", sqlite_url]
    environment: dict[str, Any] = {
        "TURNLOG_UI_TOKEN": TOKEN,
        "PATH": "/nowhere",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
    }
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert page.stdout is not None
        said = page.stdout.readline()
        port = re.findall(r":(\d+)/", said)[0]
        address = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{address}/").status_code == 401
        assert httpx.get(f"{address}/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        httpx.post(f"{address}/login", data={"token": TOKEN})
    finally:
        page.send_signal(signal.SIGINT)
        rest, _ = page.communicate(timeout=60)
    assert TOKEN not in said + rest
    assert "it asks for the token" in said
