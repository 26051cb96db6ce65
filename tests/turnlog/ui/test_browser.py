"""The page in a real browser: what is seen, reached by keyboard, heard, and asked for; light and dark.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`). `TURNLOG_SHOTS=docs/ui` keeps pictures.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

from store import hashing
from store.database import write
from store.events import CallCompleted, Event, PolicySpan, RolloutOpened, logprob_bytes, token_bytes
from store.log import append
from tests.turnlog.played import played_log
from turnlog.tokenizer import open_tokenizer
from turnlog.ui.app import build

TOKEN = "correct-horse-battery-staple"
PAGES = {
    "rollouts": "/",
    "rollout": "/rollouts/claude-code-subagents",
    "call": "/rollouts/pi#root",
    "tokens": "/rollouts/sampled#root",
    "boundaries": "/boundaries",
    "training": "/run?name=played&budget=20000",
}
SHOTS = os.environ.get("TURNLOG_SHOTS")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium
        if installed is None and not Path(chromium.executable_path).exists():
            pytest.skip("no Chromium on this machine: apt-get install chromium, or playwright install chromium")
        try:
            found = chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"Chromium does not start on this machine: {error.message.splitlines()[0]}")
        yield found
        found.close()


def serve(page: Any) -> tuple[uvicorn.Server, threading.Thread, str]:
    server = uvicorn.Server(uvicorn.Config(page, port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    return server, thread, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[str]:
    """Where the played recordings are shown, with their texts."""
    database = played_log(tmp_path_factory.mktemp("browsed"))
    with write(database) as connection:
        append(connection, sampled_rollout(demo_model))
    tokenizer = open_tokenizer(str(demo_model))
    server, thread, found = serve(build(database, shown_log="sqlite:///turnlog.db", tokenizer=tokenizer))
    yield found
    server.should_exit = True
    thread.join()
    database.dispose()


def sampled_rollout(model: Path) -> list[Event]:
    """One call whose tokens were sampled with scores, under two policy versions: recordings are played as they were."""
    from transformers import AutoTokenizer

    prompt = (
        "<|im_start|>system\nYou keep a small Python library tidy.<|im_end|>\n"
        "<|im_start|>user\nWhy does test_walk fail? Fix it.<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = (
        "The test expects names in sorted order, but `os.walk` yields them as the file system does. I will sort the "
        "entries before they are compared, and keep the generator lazy:\n\n```python\ndef walk(path):\n"
        "    for folder, folders, files in os.walk(path):\n        folders.sort()\n"
        "        yield from (os.path.join(folder, name) for name in sorted(files))\n```\n\n"
        "Sorting `folders` in place also fixes the order in which `os.walk` descends. ✓<|im_end|>"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    ids, sampled = tokenizer.encode(prompt), tokenizer.encode(answer)
    dice = np.random.default_rng(3)
    at = 1_790_000_000_000_000
    tokens = token_bytes([*ids, *sampled])
    call = CallCompleted.example().model_copy(
        update={
            "rollout_id": "sampled", "prompt_len": len(ids), "sampled_len": len(sampled), "token_ids": tokens,
            "logprobs": logprob_bytes(-dice.exponential(0.6, len(sampled)) * (dice.random(len(sampled)) < 0.6)),
            "chain_hash": hashing.chain_hash(None, tokens), "started_at": at, "completed_at": at + 2_140_000,
            "policy_spans": (
                PolicySpan(start=0, end=60, policy_version=41),
                PolicySpan(start=60, end=len(sampled), policy_version=42),
            ),
        }
    )  # fmt: skip
    task = "Why does test_walk fail? Fix it."
    return [RolloutOpened(rollout_id="sampled", task=task, harness="by hand", opened_at=at), call]


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A tab that fails the test when the page asks another machine for something, or the console complains."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, base_url=address)
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(address):
            complaints.append(request.url)

    tab = context.new_page()
    tab.on("console", heard)
    tab.on("request", asked)
    yield tab
    context.close()
    assert complaints == []


def go(page: Page, name: str) -> None:
    """Open one of `PAGES`; of a rollout whose place is `#root` its last call that begins a row."""
    path, _, place = PAGES[name].partition("#")
    page.goto(path)
    if place:
        page.locator("table tr", has=page.locator("strong", has_text="root")).last.locator("th a").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_passes_the_rules_of_accessibility(page: Page, scheme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    rules = ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]
    for name in PAGES:
        go(page, name)
        # In the dark only colours are others.
        wanted: Any = rules if scheme == "light" else {"type": "rule", "values": ["color-contrast"]}
        found = Axe().run(page, options={"runOnly": wanted})
        said = [(each["id"], each["nodes"][0]["html"][:160]) for each in found.response["violations"]]
        assert said == [], name
        if SHOTS and (scheme == "light" or name in ("rollout", "tokens")):
            suffix = "" if scheme == "light" else "-dark"
            page.screenshot(path=Path(SHOTS) / f"{name}{suffix}.png")


def test_a_reader_finds_a_rollout_and_reads_why_a_row_begins(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Harness", exact=True).fill("Claude Code")
    page.get_by_label("State").select_option("scored")
    page.get_by_role("button", name="Filter").click()
    assert "harness=Claude+Code" in page.url
    assert page.get_by_label("State").input_value() == "scored"
    page.get_by_role("link", name="claude-code", exact=True).click()
    lanes = page.get_by_role("region", name="The calls in time")
    assert page.get_by_text("Row 3", exact=True).is_visible()
    lanes.get_by_role("link", name="call 10, row 3").click()
    assert page.get_by_role("heading", level=1).inner_text() == "Call 10"
    assert page.get_by_text("A row begins here").is_visible()
    assert page.get_by_role("heading", name="What changed").is_visible()
    tokens = page.get_by_role("group", name="Tokens as text")
    assert "<|im_start|>" in tokens.inner_text()
    page.get_by_role("link", name="As a table").click()
    assert page.get_by_role("columnheader", name="Log-probability").is_visible()


def test_all_of_it_is_reached_by_keyboard(page: Page) -> None:
    page.goto("/rollouts/claude-code")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    reached: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
    assert any(label.startswith("call 1, row 1, first call") for label in reached)
    while not page.evaluate("document.activeElement.getAttribute('aria-label') || ''").startswith("call 10"):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.get_by_role("heading", level=1).inner_text() == "Call 10"


def test_bars_stand_where_the_lanes_are_named(page: Page) -> None:
    page.goto("/rollouts/claude-code")
    for row in ("1", "2", "3"):
        name = page.locator(".rows li", has_text=f"Row {row}").bounding_box()
        bar = page.get_by_role("link", name=f", row {row}").first.locator("rect.bar").bounding_box()
        assert name is not None
        assert bar is not None
        assert abs(name["y"] - bar["y"]) < 12


def test_a_narrow_window_scrolls_only_what_is_wide(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for name in PAGES:
        go(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_the_token_is_asked_for_once_and_stands_in_no_address(
    browser: Browser, tmp_path: Path, demo_model: Path
) -> None:
    database = played_log(tmp_path)
    server, thread, found = serve(build(database, shown_log="log", token=TOKEN))
    context = browser.new_context(base_url=found)
    page = context.new_page()
    page.goto("/rollouts/codex")
    page.get_by_label("The token that this page was started with").fill(TOKEN)
    page.get_by_role("button", name="Open the log").click()
    assert page.url == f"{found}/rollouts/codex"
    page.get_by_role("link", name="Boundaries").click()
    assert page.get_by_role("heading", level=1).inner_text() == "Boundaries"
    context.close()
    server.should_exit = True
    thread.join()
    database.dispose()
