"""What does a suffix cost? CPU time of the splice against a full render, as the history of a conversation grows.

The demo model's own tokenizer and template render an agent's conversation: each answer is a thought and a tool call,
each message is about 200 tokens. *marker* is what a call pays once its shape is proven, *full* what it pays where a
template proves nothing (here one that counts messages), *render* what a server without a log pays for the same request.
The proofs of the usual shapes are paid once, at start-up.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import keep, kept, options
from jinja2 import TemplateError
from transformers import AutoTokenizer

from engine.splice import CannotRender, Message, Splicer, Suffix
from turnlog.demo.model import END_OF_TURN, build_model

LENGTHS = (1, 10, 100, 1000)
REPEATS = 15
TEXT = "def area(width, height):\n    return width * height  # of a rectangle\n" * 10
COUNTING = "{%- if add_generation_prompt -%}{{- messages | length -}}{%- endif -%}"
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


class Rendering:
    """A template and a tokenizer as the splicer asks for them."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.renders = 0

    async def __call__(self, messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
        """Token ids of the messages."""
        self.renders += 1
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tools=TOOLS if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except TemplateError as error:
            raise CannotRender(str(error)) from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def main() -> None:
    """Measure, print and keep the figures beside this script."""
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = AutoTokenizer.from_pretrained(build_model(Path(scratch) / "model"))
    proven = Rendering(tokenizer, tokenizer.chat_template)
    counting = Rendering(tokenizer, tokenizer.chat_template + COUNTING)
    splicer, other = (Splicer(tokenizer.get_added_vocab().values()) for _ in range(2))
    start_up = cpu_ms(lambda: asyncio.run(splicer.probe(proven, options=b"")), repeats=1)
    renders = proven.renders
    figures: list[dict[str, Any]] = []
    for length in LENGTHS:
        messages = conversation(length)
        full = asyncio.run(proven(messages, generation_prompt=True, tools=True))
        figures.append(
            {
                "history_messages": len(messages) - 2,
                "prompt_tokens": len(full),
                "suffix_tokens": len(suffix(splicer, proven, messages, "marker").token_ids),
                "marker_ms": cpu_ms(lambda m=messages: suffix(splicer, proven, m, "marker")),
                "full_ms": cpu_ms(lambda m=messages: suffix(other, counting, m, "full")),
                "render_ms": cpu_ms(lambda m=messages: asyncio.run(proven(m, generation_prompt=True, tools=True))),
            }
        )
    file = Path(__file__).with_suffix(".json")
    found = kept(file) | {"start_up": {"renders": renders, "cpu_ms": start_up}, "calls": figures}
    keep(file, found)
    print(found["start_up"])
    for row in figures:
        print(row)


def conversation(length: int) -> list[Message]:
    """An agent's request: a history of about so many messages, its last answer and the result of the answer's call."""
    messages: list[Message] = [{"role": "user", "content": TEXT}]
    for place in range(1, length, 2):
        messages += [answer(place), result(place)]
    return [*messages, answer(length), result(length)]


def answer(place: int) -> Message:
    """A thought and a call."""
    function = {"name": "run", "arguments": {"text": TEXT}}
    call = {"id": f"call{place:05}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "reasoning": "So it is.", "tool_calls": [call]}


def result(place: int) -> Message:
    """What a call gave."""
    return {"role": "tool", "tool_call_id": f"call{place:05}", "content": TEXT}


def suffix(splicer: Splicer, rendering: Rendering, messages: list[Message], path: str) -> Suffix:
    """One suffix, found on the path that is measured."""
    end = rendering.tokenizer.convert_tokens_to_ids(END_OF_TURN)
    found = asyncio.run(splicer.suffix(rendering, messages, options=b"", tools=True, last_token=end))
    assert isinstance(found, Suffix), found
    assert found.path == path, found.path
    return found


def cpu_ms(act: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median CPU time of the whole process in milliseconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        act()
        times.append(1000 * (time.process_time() - began))
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
