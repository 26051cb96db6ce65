"""Rule `output` 1 on recorded runs of stock harnesses: what it takes is right, and what it refuses has its reason.

The calls are those that were answered, in order of their answers, with the parents that `expected.json` says are true.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.dialects.routes import dialect_at
from engine.items import answer_key, reasoning_digest
from engine.output import read_output
from replay.output import Answered, Matched, Unmatched, match

RECORDINGS = Path(__file__).parents[2] / "../shared/recordings"
NAMES = sorted(folder.name for folder in RECORDINGS.iterdir() if folder.is_dir()) if RECORDINGS.is_dir() else []


class Recorded:
    """One recorded rollout."""

    def __init__(self, name: str) -> None:
        truth = json.loads((RECORDINGS / name / "expected.json").read_text())["calls"]
        self.parent_of = {call["seq"]: call["parent"] for call in truth}
        answered = {call["seq"] for call in truth if not call.get("failed")}
        lines = map(json.loads, (RECORDINGS / name / "requests.jsonl").read_text().splitlines())
        self.lines = sorted((line for line in lines if line["seq"] in answered), key=lambda line: line["t_end_ms"])
        self.calls = [self._call(number, line) for number, line in enumerate(self.lines, start=1)]
        request = _dialect(self.lines[0]).request_items(self.lines[0]["request"])
        self.given = [item.digest for item in request if item.model_authored]

    def match(self, output: Any) -> Matched | Unmatched:
        read = read_output(output).output
        assert read is not None
        return match(read.as_json(), self.calls, given=self.given)

    def tips(self) -> list[dict[str, Any]]:
        """Answered calls that none continues."""
        continued = {self.parent_of[line["seq"]] for line in self.lines}
        return [line for line in self.lines if line["seq"] not in continued]

    def chain(self, seq: int | None) -> set[int]:
        """Numbers of the calls from the root to this one."""
        numbers = {line["seq"]: number for number, line in enumerate(self.lines, start=1)}
        found: set[int] = set()
        while seq is not None:
            found.add(numbers[seq])
            seq = self.parent_of[seq]
        return found

    def _call(self, number: int, line: dict[str, Any]) -> Answered:
        dialect, parent = _dialect(line), self.parent_of[line["seq"]]
        (answer,) = dialect.answers(line["response"])
        return Answered(
            number=number,
            call_id=UUID(int=line["seq"]),
            parent_id=None if parent is None else UUID(int=parent),
            response_id=dialect.response_id(line["response"]),
            answer_item_ids=[item.item_id for item in answer.items if item.item_id is not None],
            answer_roles=[item.role for item in answer.items],
            answer_digests=b"".join(item.digest for item in answer.items),
            answer_key=answer_key(answer.items),
            reasoning_digest=reasoning_digest(answer.items),
        )


def _dialect(line: dict[str, Any]) -> Any:
    return dialect_at(line["endpoint"])


def conversation(line: dict[str, Any]) -> list[Any]:
    """What a harness holds after this call: what it sent, and the answer."""
    request, response = line["request"], line["response"]
    match _dialect(line).NAME:
        case "chat":
            return [*request["messages"], response["choices"][0]["message"]]
        case "messages":
            return [*request["messages"], {"role": "assistant", "content": response["content"]}]
        case _:
            sent = request["input"]
            return [*([{"role": "user", "content": sent}] if isinstance(sent, str) else sent), *response["output"]]


def test_the_recordings_are_here() -> None:
    assert NAMES, f"{RECORDINGS} is missing: outputs of real harnesses are matched here"


@pytest.mark.parametrize("name", NAMES)
def test_all_responses_in_order_are_all_calls(name: str) -> None:
    recorded = Recorded(name)
    found = recorded.match([line["response"] for line in recorded.lines])
    assert isinstance(found, Matched), found
    assert found.numbers == tuple(call.number for call in recorded.calls)


def test_a_conversation_is_the_calls_of_its_chain_or_is_refused() -> None:
    """A conversation after a rewrite may show answers of the chain before it too; it never lacks one of its own."""
    figures: Counter[str] = Counter()
    for name in NAMES:
        recorded = Recorded(name)
        for tip in recorded.tips():
            found = recorded.match(conversation(tip))
            if isinstance(found, Unmatched):
                figures[found.reason] += 1
                continue
            chain = recorded.chain(tip["seq"])
            figures["the chain" if {*found.numbers} == chain else "more chains"] += 1
            figures["with examples in front"] += bool(found.given)
            assert chain <= {*found.numbers}, (name, tip["seq"])
            assert found.numbers[-1] == max(chain), (name, tip["seq"])
    print(f"\nconversations: {dict(figures)}")
    assert figures == {
        "the chain": 82,
        "more chains": 37,
        "with examples in front": 1,
        "output_unknown": 26,  # smolagents and others write answers down in words of their own
        "output_edited": 10,  # repaired arguments, odd replies
        "output_gap": 10,  # the last context of a harness that compacts: earlier answers of its chain are gone
        "output_ambiguous": 4,  # what was asked for twice and answered alike, word for word
    }
