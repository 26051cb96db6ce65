"""Every kind of event as a frozen model, and the union that reads them back.

Knows what can happen to a rollout; does not know tables, databases, model servers or trainers.
Law: an event is a fact. It is built once, checked when it is built, and never changed.

Token arrays are raw bytes (int32 little-endian ids, float32 little-endian log-probabilities), so that an event is
hashable, comparable and says exactly what is stored. `token_array` and `logprob_array` view them as numpy.

A root of 3 prompt tokens that sampled 2:

>>> call = CallCompleted.example()
>>> call.prompt_len, call.sampled_len, call.delta_len, call.chain_len
(3, 2, 5, 5)
>>> token_array(call.token_ids).tolist()
[1, 2, 3, 4, 5]
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import Annotated, ClassVar, Literal, Self, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    TypeAdapter,
    model_validator,
)

from store import hashing

_T = TypeVar("_T", bound=JsonValue)
_LARGEST = 2**63 - 1
_ARRAYS = ("token_ids", "logprobs")


def _storable_text(text: str) -> str:
    """Refuse what one of the databases could not give back: NUL, and halves of surrogate pairs."""
    if "\0" in text:
        raise ValueError("text holds a NUL character, which the log cannot store")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text holds half a surrogate pair, which the log cannot store") from error
    return text


def _storable_json(value: _T) -> _T:
    hashing.canonical_json(value)  # raises ValueError for NaN and Infinity
    return value


def _positive_zero(value: float) -> float:
    return value + 0.0  # SQLite gives -0.0 back as 0.0


RolloutId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
"""1 to 128 of letters, digits, `._-` (design §4)."""
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Microseconds = Annotated[int, Field(ge=0, le=_LARGEST)]
"""Unix time in microseconds."""
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Version = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
"""An integer that orders policies or rules."""
Real = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_positive_zero)]
Text = Annotated[str, AfterValidator(_storable_text)]
Json = Annotated[JsonValue, AfterValidator(_storable_json)]
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_storable_json)]
ReasoningPolicy = Literal["strict", "restore"]
"""What a missing reasoning block in an echoed answer means: a new root, or go on with thoughts kept (design §6.4)."""


def token_array(raw: bytes) -> npt.NDArray[np.int32]:
    """View raw token bytes as int32 ids, shape [T]; no copy."""
    return np.frombuffer(raw, dtype="<i4")


def logprob_array(raw: bytes) -> npt.NDArray[np.float32]:
    """View raw log-probability bytes as float32, shape [T]; no copy."""
    return np.frombuffer(raw, dtype="<f4")


def token_bytes(token_ids: npt.ArrayLike) -> bytes:
    """Token ids as int32 little-endian bytes."""
    if isinstance(token_ids, list):
        return struct.pack(f"<{len(token_ids)}i", *token_ids)  # three times as fast as by way of an array
    return np.asarray(token_ids, dtype="<i4").tobytes()


def logprob_bytes(logprobs: npt.ArrayLike) -> bytes:
    """Log-probabilities as float32 little-endian bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def uuid7(unix_ms: int, random: bytes) -> UUID:
    """A UUIDv7 (RFC 9562 §5.7) from a time in milliseconds and 10 random bytes: ids of one writer sort by time."""
    if len(random) != 10:
        raise ValueError(f"uuid7 needs 10 random bytes, got {len(random)}")
    value = (unix_ms & (2**48 - 1)) << 80 | int.from_bytes(random, "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def _check_parent(decision: str, parent_id: UUID | None) -> None:
    if (decision == "root") != (parent_id is None):
        raise ValueError(f"a {decision} with parent {parent_id}: a root has none, a continuation has one")


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")
    added: ClassVar[tuple[str, ...]] = ()
    """Fields that revision 0001 did not have. One that is None is no part of the digest: older events keep theirs."""

    def digest(self) -> bytes:
        """Digest of the event's whole content; equal digests mean the same event."""
        return self.digest_with(self.json_texts())

    def digest_with(self, texts: Mapping[str, str]) -> bytes:
        """The same, by whoever has the event's `json_texts` already."""
        fields = self.__dict__
        return hashing.event_digest(fields["kind"], texts, *(fields[name] for name in _ARRAYS if name in fields))

    def json_texts(self) -> dict[str, str]:
        """The fields that the digest covers besides kind and arrays, by name, each as the JSON that it covers."""
        fields = self.__dict__
        absent = {name for name in self.added if fields[name] is None} if self.added else ()
        names = _by_name(type(self))
        return hashing.json_texts(fields, [name for name in names if name not in absent] if absent else names)


@cache
def _by_name(kind: type[_Event]) -> tuple[str, ...]:
    """The fields of a kind of event that its digest covers as JSON."""
    return tuple(sorted({*kind.model_fields}.difference(("kind", *_ARRAYS))))


class RolloutOpened(_Event):
    """A rollout was opened, by `POST /rollouts` or by its first call."""

    added: ClassVar[tuple[str, ...]] = ("secret_hash",)
    kind: Literal["rollout_opened"] = "rollout_opened"
    rollout_id: RolloutId
    group_id: Text | None = None
    slot: Count | None = None
    """Place of the rollout within its group."""
    task: Text | None = None
    harness: Text | None = None
    metadata: JsonObject = Field(default_factory=dict)
    opened_at: Microseconds
    secret_hash: Digest | None = Field(default=None, repr=False)
    """SHA-256 of the secret that whoever calls in this rollout's name must show; None when it has none."""

    @property
    def implicit(self) -> bool:
        """Whether it says only that the rollout exists, as its first call does; any other opening satisfies it."""
        said = (self.group_id, self.slot, self.task, self.harness, self.secret_hash)
        return said == (None, None, None, None, None) and not self.metadata


class CallAdmitted(_Event):
    """A call passed its decision and is about to be generated: the intent, durable before the first token."""

    kind: Literal["call_admitted"] = "call_admitted"
    call_id: UUID
    rollout_id: RolloutId
    decision: Literal["root", "continuation"]
    reason: Text
    parent_id: UUID | None
    worker: Text
    """Stable name of the server process; on its next start it marks its own unfinished intents as lost."""
    at: Microseconds

    @model_validator(mode="after")
    def _parent_fits_decision(self) -> Self:
        _check_parent(self.decision, self.parent_id)
        return self


class PolicySpan(BaseModel):
    """Half-open range [start, end) of the sampled tokens, and the policy version that sampled it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    start: Count
    end: Count
    policy_version: Version


class ItemTrace(BaseModel):
    """Digest and author of one canonical item, kept so that the reason of a later root can be told and queried."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")
    role: Text
    """`system`, `developer`, `user`, `assistant`, `reasoning`, `tool_call`, `tool_result` or `hosted`."""
    digest: Digest


class CallCompleted(_Event):
    """A call was generated to its end: what the model saw that its parent had not, and what it sampled.

    Its delta is `prompt_len - prev_len` interstitial tokens, then `sampled_len` sampled ones; the loss mask is these
    two counts. A root has `prev_len` 0 and its delta is the whole prompt and the generation.
    """

    kind: Literal["call_completed"] = "call_completed"
    call_id: UUID
    rollout_id: RolloutId
    parent_id: UUID | None
    root_id: UUID
    """Own id for a root, else the parent's root."""
    depth: Count
    decision: Literal["root", "continuation"]
    reason: Text
    evidence: JsonObject = Field(default_factory=dict)
    """For a root: nearest call, index of the first difference, roles, digests; else how the call was spliced."""
    candidates: Count
    """How many earlier calls the summary hash found."""
    reasoning_policy: ReasoningPolicy
    summary_hash: Digest
    request_hash: Digest
    answer_key: Digest
    render_hash: Digest
    tools_digest: Digest
    """Digest of the effective tools alone, to tell `tools_changed` from `options_changed`."""
    hash_version: Count = hashing.HASH_VERSION
    reasoning_digest: Digest | None
    """Digest of the trimmed reasoning that was served; None when the answer had none."""
    request_items: tuple[ItemTrace, ...]
    """The request's items from the first one its parent's request does not have; all of them for a root."""
    answer_items: tuple[ItemTrace, ...]
    answer_item_ids: tuple[Text, ...] = ()
    """Ids that the answer's items had on the wire, those that had one: they tell calls with equal answers apart."""
    prev_len: Count
    """Tokens of the parent's whole chain."""
    prompt_len: Count
    """Tokens of the prompt that the engine saw."""
    sampled_len: Count
    chain_hash: Digest
    policy_spans: tuple[PolicySpan, ...]
    finish_reason: Text
    sampling: JsonObject = Field(default_factory=dict)
    dialect: Literal["chat", "responses", "messages"]
    model: Text
    response_id: Text | None
    """The id that the harness saw, by which an outcome may name this call."""
    choice: Count = 0
    """Index of the choice within its response (`n > 1` gives sibling calls)."""
    hints: JsonObject = Field(default_factory=dict)
    """What the harness says about the call's role; never part of a verdict."""
    media_count: Count = 0
    """Images, audio and video in the prompt. Rows refuse calls whose media the log does not hold."""
    writer_id: UUID
    writer_seq: Count
    """The writer's own count: a hole in it shows a lost event."""
    started_at: Microseconds
    completed_at: Microseconds
    token_ids: bytes
    """int32 little-endian, [prompt_len - prev_len + sampled_len]"""
    logprobs: bytes
    """float32 little-endian, [sampled_len], natural log of the probability under which each token was sampled"""

    def digest(self) -> bytes:
        """Digest of the event's whole content; equal digests mean the same event. Derives a root's chain hash."""
        tokens = hashing.chain_hash(None, self.token_ids) if self._has_own_chain else self.token_ids
        return hashing.event_digest(self.kind, self.json_texts(), tokens, self.logprobs)

    def digest_with(self, texts: Mapping[str, str]) -> bytes:
        """The same, by whoever has the event's `json_texts` already, and has checked its chain hash."""
        tokens = self.chain_hash if self._has_own_chain else self.token_ids
        return hashing.event_digest(self.kind, texts, tokens, self.logprobs)

    @property
    def _has_own_chain(self) -> bool:
        """Whether the chain hash is a digest of this call's tokens alone, and stands for them (docs/decisions/0032)."""
        return self.parent_id is None and self.hash_version > 1

    @property
    def delta_len(self) -> int:
        """Tokens that this call adds to its parent's chain."""
        return self.prompt_len - self.prev_len + self.sampled_len

    @property
    def chain_len(self) -> int:
        """Tokens from the root's first to this call's last; a child's `prev_len`."""
        return self.prompt_len + self.sampled_len

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_parent(self.decision, self.parent_id)
        if (self.parent_id is None) != (self.depth == 0) or (self.parent_id is None) != (self.root_id == self.call_id):
            raise ValueError("a root has depth 0 and is its own root; a continuation has neither")
        if self.prev_len > self.prompt_len or (self.parent_id is None) != (self.prev_len == 0):
            raise ValueError(f"prev_len {self.prev_len} does not fit prompt_len {self.prompt_len} of a {self.decision}")
        if len(self.token_ids) != 4 * self.delta_len:
            raise ValueError(f"token_ids hold {len(self.token_ids) // 4} tokens, the lengths say {self.delta_len}")
        if len(self.logprobs) != 4 * self.sampled_len:
            raise ValueError(f"logprobs hold {len(self.logprobs) // 4} values for {self.sampled_len} sampled tokens")
        if not np.isfinite(logprob_array(self.logprobs)).all():
            raise ValueError("every sampled token needs a finite log-probability")
        edges = [0, *(span.end for span in self.policy_spans)]
        starts = [span.start for span in self.policy_spans]
        if starts != edges[:-1] or edges[-1] != self.sampled_len:
            raise ValueError(
                f"policy spans {starts} to {edges[1:]} do not cover {self.sampled_len} sampled tokens in order"
            )
        return self

    @classmethod
    def example(cls) -> CallCompleted:
        """A small root, for documentation and tests."""
        call_id = uuid7(0, bytes(10))
        tokens = token_bytes([1, 2, 3, 4, 5])
        start = hashing.render_hash({"model": "example"})
        answer = hashing.answer_key(b"[]")
        return cls(
            call_id=call_id,
            rollout_id="example",
            parent_id=None,
            root_id=call_id,
            depth=0,
            decision="root",
            reason="first_call",
            candidates=0,
            reasoning_policy="strict",
            summary_hash=hashing.summary_hash(start, answer),
            request_hash=start,
            answer_key=answer,
            render_hash=start,
            tools_digest=start,
            reasoning_digest=None,
            request_items=(),
            answer_items=(),
            prev_len=0,
            prompt_len=3,
            sampled_len=2,
            chain_hash=hashing.chain_hash(None, tokens),
            policy_spans=(PolicySpan(start=0, end=2, policy_version=0),),
            finish_reason="stop",
            dialect="chat",
            model="example",
            response_id=None,
            writer_id=uuid7(0, bytes(10)),
            writer_seq=0,
            started_at=0,
            completed_at=1,
            token_ids=tokens,
            logprobs=logprob_bytes([-0.5, -0.25]),
        )


class CallEnded(_Event):
    """A call ended without an answer: failed, refused, abandoned by its client, or lost with its worker.

    The tokens sampled until then are kept, and never selected for training by default.
    """

    kind: Literal["call_ended"] = "call_ended"
    call_id: UUID
    rollout_id: RolloutId
    state: Literal["failed", "refused", "abandoned", "lost"]
    reason: Text
    at: Microseconds
    token_ids: bytes = b""
    """Sampled tokens only: int32 little-endian, [n]"""
    logprobs: bytes = b""
    """float32 little-endian, [n]"""

    @model_validator(mode="after")
    def _arrays_fit(self) -> Self:
        if len(self.token_ids) % 4 or len(self.token_ids) != len(self.logprobs):
            sizes = f"{len(self.token_ids)} bytes of token_ids, {len(self.logprobs)} of logprobs"
            raise ValueError(f"{sizes}: every sampled token needs one log-probability of 4 bytes")
        return self


class MediaStored(_Event):
    """The tensors that a model server's processor made of an image, a video or a sound, by their content.

    They lie in the media store under this address (`store.tensors` says how). What it says follows from the bytes, so
    that whoever stores the same again says the same.
    """

    kind: Literal["media_stored"] = "media_stored"
    sha256: Digest
    media_type: Text
    size: Count
    tensors: JsonObject
    """Type and shape of each tensor, by name."""

    @classmethod
    def example(cls) -> MediaStored:
        """A small image, for documentation and tests."""
        tensors: JsonObject = {"pixel_values": ["U8", [4, 12]]}
        return cls(sha256=bytes(32), media_type="application/x-safetensors", size=128, tensors=tensors)


class MediaShown(_Event):
    """An image, a video or a sound stood in a call's prompt and in no prompt that the call continues."""

    kind: Literal["media_shown"] = "media_shown"
    call_id: UUID
    rollout_id: RolloutId
    place: Count
    """Its place among the media that are new in this call."""
    modality: Literal["image", "video", "audio"]
    sha256: Digest
    """Of its tensors: the object that it is."""
    item_hash: Digest
    """Of what the harness sent: SHA-256 of its bytes, or the tagged digest of an address that has none."""
    mm_hash: Text
    """What the model server calls it."""
    start: Count
    """Its placeholder's first token, counted from the prompt's first."""
    length: Count
    """Tokens of its placeholder."""
    tokens: Count
    """How many of these the model sees as the media; the others are marks between its parts."""
    geometry: JsonObject
    at: Microseconds

    @classmethod
    def example(cls) -> MediaShown:
        """`MediaStored.example` in `CallCompleted.example`, for documentation and tests."""
        call = CallCompleted.example()
        return cls(
            call_id=call.call_id,
            rollout_id=call.rollout_id,
            place=0,
            modality="image",
            sha256=MediaStored.example().sha256,
            item_hash=bytes(32),
            mm_hash="",
            start=1,
            length=1,
            tokens=1,
            geometry={"image_grid_thw": [1, 2, 2]},
            at=call.completed_at,
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not 0 < self.tokens <= self.length:
            raise ValueError(f"{self.tokens} of {self.length} placeholder tokens are media: at least one, at most all")
        return self


class RolloutScored(_Event):
    """A rollout got its outcome; several are allowed, the latest counts."""

    kind: Literal["rollout_scored"] = "rollout_scored"
    outcome_id: UUID
    rollout_id: RolloutId
    reward: Real
    status: Text = "completed"
    accepted: tuple[Text, ...] | None = None
    """Call or response ids the harness accepted; None when it does not say."""
    output: Json = None
    """The harness's ordinary output, for the `output` selection rule."""
    declared_rewrites: tuple[Json, ...] = ()
    at: Microseconds


class RowTrained(_Event):
    """A row entered a training step."""

    kind: Literal["row_trained"] = "row_trained"
    run: Text
    step: Count
    row_id: Text
    rollout_id: RolloutId
    tip_call_id: UUID
    selection: Text
    selection_version: Version
    advantage: Real
    trainer_policy_version: Version
    at: Microseconds


Event = RolloutOpened | CallAdmitted | CallCompleted | CallEnded | MediaStored | MediaShown | RolloutScored | RowTrained
AnyEvent: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
"""Reads an event back from its fields; an unknown kind fails by name."""
