"""What a harness returned as its ordinary output, in the form in which an outcome keeps it.

Knows the shape that the engine writes and replay reads; does not know wires, items or which call wrote what. Law:
content is kept by digest only, made by the rules by which the log digests the answers of its calls, so that equal
digests mean equal content; a change of the shape is a new version.

A passage is what a model is said to have written in one item or message of a wire. A call's answer is one passage or
several that follow one another: a text and two tool calls are one chat message, but three items of Responses.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, StringConstraints

from store.events import Count

HexDigest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
OutputForm = Literal["chat", "messages", "items", "snapshots", "responses", "text"]
"""How the harness wrote it: Chat or Anthropic messages, Responses items flat or as the whole state after each step,
whole responses in order, or one text."""


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Between(_Shape):
    """An item that no model wrote, such as a tool's result."""

    role: str
    digest: HexDigest


class Passage(_Shape):
    """One item or message that a model is said to have written."""

    at: str
    """Its place in what was posted, such as `output[3]`."""
    roles: tuple[str, ...]
    digests: tuple[HexDigest, ...]
    """Of its canonical items, as the log has those of a call's answer."""
    keys: tuple[HexDigest, ...]
    """The answer key of this passage alone, of it and the next, ...: as far as no other item stands between."""
    reasoning: HexDigest | None = None
    """Digest of the trimmed reasoning in it, if there is any."""
    item_ids: tuple[str, ...] = ()
    tool_call_ids: tuple[str, ...] = ()
    response_id: str | None = None
    """The id of the response that it is said to be in."""
    whole: bool = False
    """It is a whole response, so a call answered this and no more."""
    before: tuple[Between, ...] = ()
    """What stands between the passage before and this one."""


class HarnessOutput(_Shape):
    """The model's part of a harness's output, in order, and what a person needs to find each passage again."""

    version: Literal[1]
    hash_version: Count
    form: OutputForm
    source: HexDigest
    """Digest of all that was posted: the text itself is not kept."""
    references: tuple[str, ...] | None = None
    """Call or response ids that came with it, in order."""
    passages: tuple[Passage, ...]
    after: tuple[Between, ...] = ()

    def as_json(self) -> JsonValue:
        """As an outcome stores it; what is empty is left out."""
        return self.model_dump(mode="json", exclude_defaults=True)
