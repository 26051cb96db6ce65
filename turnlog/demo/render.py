"""What a fresh render of an agent's messages would give: the prompt a trainer makes up when nobody kept the tokens.

Knows the demo's tokenizer and template; does not know the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from turnlog.demo.agent import TOOL


class Renderer:
    """Renders and tokenises an agent's messages as the server does for a request without a parent."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def prompt(self, messages: Sequence[dict[str, Any]], *, thinking: bool) -> list[int]:
        """Token ids of the prompt."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=[TOOL], enable_thinking=thinking, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))
