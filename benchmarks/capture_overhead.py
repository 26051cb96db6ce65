"""What does capturing a call cost its harness? Captured calls against stock ones, side by side on one real server.

One conversation grows by turns of about 200 tokens. At some of its lengths the next call is made many times, in turn on
the stock path and on a rollout's (each time as a new sibling of the same parent), with one sampled token, so that the
time is all rendering, prompt processing and, for the captured call, decision, splice and two commits. Ratios of medians
are what to read; the machine is noisy.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from figures import keep, kept, options

from store import migrate
from store.database import open_database
from turnlog.demo.model import build_model
from turnlog.demo.server import NAME, model_server

LENGTHS = (1, 5, 10, 20)
REPEATS = 30


def main() -> None:
    """Measure, print and keep the figures beside this script."""
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        url = f"sqlite:///{folder}/turnlog.db"
        database = open_database(url)
        migrate.upgrade(database)
        database.dispose()
        model = build_model(folder / "model")
        with model_server(model, url=url, log=folder / "server.log") as address:
            figures = measure(address)
    file = Path(__file__).with_suffix(".json")
    keep(file, kept(file) | {"calls": figures})
    for row in figures:
        print(row)


def measure(address: str) -> list[dict[str, Any]]:
    """Median milliseconds of both paths at each length of the conversation."""
    figures: list[dict[str, Any]] = []
    with httpx.Client(base_url=address, timeout=60) as client:
        messages: list[dict[str, str]] = [{"role": "user", "content": "Say something. " * 60}]
        for turn in range(1, max(LENGTHS) + 1):
            if turn in LENGTHS:
                times: dict[str, list[float]] = {"stock": [], "captured": []}
                for _ in range(REPEATS):
                    for path, kept in times.items():
                        began = time.perf_counter()
                        answer = ask(client, "" if path == "stock" else "/rollouts/bench", messages, tokens=1)
                        kept.append(1000 * (time.perf_counter() - began))
                stock, captured = (statistics.median(kept) for kept in times.values())
                figures.append(
                    {
                        "turn": turn,
                        "prompt_tokens": answer["usage"]["prompt_tokens"],
                        "stock_ms": round(stock, 2),
                        "captured_ms": round(captured, 2),
                        "ratio": round(captured / stock, 2),
                    }
                )
            answer = ask(client, "/rollouts/bench", messages, tokens=24)
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""},
                {"role": "user", "content": "Go on about this. " * 30},
            ]
    return figures


def ask(client: httpx.Client, rollout: str, messages: list[dict[str, str]], *, tokens: int) -> dict[str, Any]:
    """One chat completion."""
    body = {
        "model": NAME,
        "messages": messages,
        "max_tokens": tokens,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = client.post(f"{rollout}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return dict(answer.json())


if __name__ == "__main__":
    main()
