"""One request's way to the template: its parameters, and digests of all that shapes a prompt besides its messages.

Knows the fields of vLLM's chat parameters by name; does not import vLLM, and renders nothing. Law: two requests with
equal hashes are rendered alike, whatever their messages are; what JSON cannot hold counts by its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from engine import decide
from engine.decide import Keys
from engine.dialects.wire import without_cache_control
from engine.items import Item
from store import hashing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """One request's way to the template: its parameters, and the hashes of what shapes a prompt besides messages."""

    chat_params: Any
    tok_params: Any
    options: Mapping[str, Any]
    render_hash: bytes
    tools_digest: bytes
    suffix_hash: bytes
    """The render hash without tools: what a proof about suffixes is remembered under."""
    keys: Keys

    @property
    def tools(self) -> bool:
        """Whether the prompt shows tools."""
        return bool(self.chat_params.chat_template_kwargs.get("tools"))

    @classmethod
    def of(
        cls,
        chat_params: Any,
        tok_params: Any,
        options: Mapping[str, Any],
        *,
        items: Sequence[Item],
        model: JsonValue,
        tokenizer_template: str,
    ) -> Rendering:
        """From what the server's renderer was given; `tokenizer_template` identifies the template of its tokenizer."""
        kwargs = {key: value for key, value in chat_params.chat_template_kwargs.items() if key != "tools"}
        tools = without_cache_control(plain_json(chat_params.chat_template_kwargs.get("tools")))
        shaped: dict[str, JsonValue] = {
            "model": model,
            "tokenizer_template": tokenizer_template,
            "template": chat_params.chat_template,
            "content_format": chat_params.chat_template_content_format,
            "template_kwargs": plain_json(kwargs),
            "media": plain_json(chat_params.media_io_kwargs),
            "processor": plain_json(chat_params.mm_processor_kwargs),
        }
        render_hash = hashing.render_hash({**shaped, "tools": tools})
        return cls(
            chat_params=chat_params,
            tok_params=tok_params,
            options=options,
            render_hash=render_hash,
            keys=decide.candidate_keys(items, render_hash),
            tools_digest=hashing.tagged_digest("tools", hashing.canonical_json(tools)),
            suffix_hash=hashing.render_hash(shaped),
        )


def plain(value: Any) -> Any:
    """A message as plain dicts and lists: the server's lazy iterators can be read only once."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, str | bytes | int | float) or value is None:
        return value
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    return [plain(inner) for inner in value]


def plain_json(value: Any) -> JsonValue:
    """An option as JSON; what JSON cannot hold by its name, which is all that a hash of it needs."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
