"""The decision, rule by rule: keys, the choice among hits, and the reason of each kind of root."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decide import Continuation, Root, candidate_keys, choose, decide, explain
from engine.items import Item, answer_key, reasoning_digest, traces
from store import hashing
from store.events import ReasoningPolicy
from store.lineage import KnownCall, TracedCall

RENDER, TOOLS = b"render", b"tools"
SYSTEM, TASK = Item.message("system", ["Be brief."]), Item.message("user", ["Count the files."])


def says(text: str) -> Item:
    return Item.message("assistant", [text])


def asks(text: str) -> Item:
    return Item.message("user", [text])


def calls(number: int, arguments: str = "{}") -> Item:
    return Item.tool_call(f"c{number}", "ls", arguments)


def gives(number: int, text: str = "a.txt") -> Item:
    return Item.tool_result(f"c{number}", [text])


def thinks(text: str) -> Item:
    return Item.reasoning(text)


@dataclass
class Log:
    """What the store would know of one rollout: completed calls in order, found by summary hash."""

    known: list[KnownCall] = field(default_factory=list)
    traced: list[TracedCall] = field(default_factory=list)
    policy: ReasoningPolicy = "strict"

    def decide(self, request: Sequence[Item], *, render: bytes = RENDER, tools: bytes = TOOLS) -> Root | Continuation:
        return decide(
            request,
            render,
            tools,
            self.policy,
            look_up=lambda keys: [call for call in self.known if call.summary_hash in keys],
            recent=lambda: self.traced,
        )

    def serve(
        self, request: Sequence[Item], *answer: Item, render: bytes = RENDER, tools: bytes = TOOLS
    ) -> Root | Continuation:
        """Decide a request, then complete its call with the answer; its sequence counts from 1."""
        decision = self.decide(request, render=render, tools=tools)
        parent = decision.parent if isinstance(decision, Continuation) else None
        sequence = len(self.known) + 1
        self.known.append(
            KnownCall(
                call_id=UUID(int=sequence),
                rollout_id="r",
                parent_id=None if parent is None else parent.call_id,
                root_id=UUID(int=sequence) if parent is None else parent.root_id,
                depth=0 if parent is None else parent.depth + 1,
                sequence=sequence,
                chain_len=0,
                hash_version=hashing.HASH_VERSION,
                summary_hash=hashing.summary_hash(candidate_keys(request, render).request_hash, answer_key(answer)),
                chain_hash=b"",
                reasoning_digest=reasoning_digest(answer),
                response_id=None,
                answer_item_ids=tuple(item.item_id for item in answer if item.item_id is not None),
            )
        )
        self.traced.append(
            TracedCall(
                call_id=UUID(int=sequence),
                sequence=sequence,
                render_hash=render,
                tools_digest=tools,
                request=traces(request),
                answer=traces(answer),
            )
        )
        return decision


def parent(decision: Root | Continuation) -> int:
    """The sequence of the call that is continued."""
    assert isinstance(decision, Continuation), decision
    return decision.parent.sequence


def root(decision: Root | Continuation, reason: str) -> dict[str, object]:
    """The evidence of a root, which must have this reason and be JSON."""
    assert isinstance(decision, Root), decision
    assert decision.reason == reason, decision
    assert json.loads(json.dumps(dict(decision.evidence))) == dict(decision.evidence)
    return dict(decision.evidence)


# Keys


def test_keys_cover_every_start_in_the_last_run_of_model_items() -> None:
    items = [SYSTEM, says("old"), TASK, says("summary"), thinks("Hm."), calls(1), calls(2), gives(1), gives(2)]
    keys = candidate_keys(items, RENDER)
    expected = {
        hashing.summary_hash(
            hashing.request_hash(RENDER, [item.digest for item in items[:start]]), answer_key(items[start:7])
        ): start
        for start in (3, 4, 5, 6)
    }
    assert keys.starts == expected
    assert keys.last == 6
    assert keys.request_hash == hashing.request_hash(RENDER, [item.digest for item in items])


def test_a_request_without_model_items_or_ending_in_one_has_no_keys() -> None:
    assert candidate_keys([], RENDER).starts == {}
    assert candidate_keys([SYSTEM, TASK], RENDER).last is None
    ends = candidate_keys([SYSTEM, TASK, says("x")], RENDER)
    assert (ends.starts, ends.last) == ({}, 2)


def test_the_chain_of_request_hashes_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [SYSTEM, *(item for i in range(200) for item in (calls(i), gives(i)))]
    steps: list[bytes] = []
    real = hashing.extend_request_hash

    def counted(request_hash: bytes, next_item: bytes) -> bytes:
        steps.append(next_item)
        return real(request_hash, next_item)

    monkeypatch.setattr(hashing, "extend_request_hash", counted)
    candidate_keys(items, RENDER)
    assert len(steps) == len(items)


# Continuations


def test_an_answer_that_comes_back_with_more_behind_it_is_continued() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], says("I look.\n"), calls(1, '{"a": 1}'))
    decision = log.decide([SYSTEM, TASK, says("I look."), calls(1, '{ "a":1.0 }'), gives(1)])
    assert isinstance(decision, Continuation)
    assert (parent(decision), decision.start, decision.suffix) == (1, 2, 4)
    assert (decision.candidates, decision.flags, decision.reason) == (1, (), "answer_echoed")


@pytest.mark.parametrize(
    "new", [asks("go on"), gives(1), Item.message("system", ["x"]), Item.message("developer", ["x"])]
)
def test_anything_that_no_model_writes_may_follow_the_answer(new: Item) -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    assert parent(log.decide([SYSTEM, TASK, calls(1), new])) == 1


def test_a_summary_put_before_the_answer_belongs_to_the_request() -> None:
    log = Log()
    log.serve([SYSTEM, says("summary so far")], says("Done."))
    decision = log.decide([SYSTEM, says("summary so far"), says("Done."), asks("More.")])
    assert isinstance(decision, Continuation)
    assert (decision.start, decision.suffix) == (2, 3)


def test_any_earlier_call_may_be_the_parent() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    other = [SYSTEM, asks("subagent")]
    log.serve(other, calls(7))
    assert parent(log.serve([SYSTEM, TASK, calls(1), gives(1)], calls(2))) == 1
    assert parent(log.serve([*other, calls(7), gives(7)], says("b"))) == 2
    assert parent(log.serve([SYSTEM, TASK, calls(1), gives(1), calls(2), gives(2)], says("a"))) == 3
    assert parent(log.decide([SYSTEM, TASK, calls(1), asks("a fork from far back")])) == 1


def test_a_dropped_answer_leaves_its_parent_to_be_continued_again() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    log.serve([SYSTEM, TASK, calls(1), gives(1)], thinks("only thoughts"))
    assert parent(log.decide([SYSTEM, TASK, calls(1), gives(1)])) == 1
    assert parent(log.decide([SYSTEM, TASK, calls(1), gives(1), asks("No tool call found.")])) == 1


def test_an_answer_of_reasoning_alone_is_known_by_its_empty_echo() -> None:
    log = Log(policy="restore")
    log.serve([SYSTEM, TASK], thinks("only thoughts"))
    decision = log.decide([SYSTEM, TASK, says(""), asks("Go on.")])
    assert isinstance(decision, Continuation)
    assert (parent(decision), decision.flags) == (1, ("reasoning_dropped",))


def test_of_several_hits_the_deepest_then_the_latest_is_the_parent() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], says("same"))
    log.serve([SYSTEM, TASK], says("same"))
    request = [SYSTEM, TASK, says("same"), asks("Go on.")]
    decision = log.decide(request)
    assert isinstance(decision, Continuation)
    assert (parent(decision), decision.candidates) == (2, 2)
    log.known[0] = replace(log.known[0], depth=3)
    assert parent(log.decide(request)) == 1


def named(text: str, item_id: str | None) -> Item:
    return Item.message("assistant", [text], item_id=item_id)


def test_of_several_hits_those_whose_item_ids_come_back_are_preferred() -> None:
    log = Log()
    for item_id in ("msg_1", "msg_2", "msg_3"):
        log.serve([SYSTEM, TASK], named("same", item_id))
    log.known[2] = replace(log.known[2], depth=3)
    for item_id, expected in (("msg_1", 1), ("msg_2", 2), (None, 3), ("msg_of_another_rollout", 3)):
        decision = log.decide([SYSTEM, TASK, named("same", item_id), asks("Go on.")])
        assert isinstance(decision, Continuation)
        assert (parent(decision), decision.candidates) == (expected, 3)


def test_an_id_that_stands_before_the_answer_prefers_nothing() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], named("same", "msg_1"))
    log.serve([SYSTEM, TASK], named("same", "msg_2"))
    before = [SYSTEM, TASK, named("same", "msg_2"), asks("Again.")]
    log.serve(before, named("same", "msg_3"))
    log.serve(before, named("same", "msg_2"))  # an id that is used twice names nothing
    assert parent(log.decide([*before, named("same", "msg_3"), asks("More.")])) == 3
    assert parent(log.decide([*before, named("same", None), asks("More.")])) == 4


def test_item_ids_help_no_call_whose_reasoning_was_edited() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], thinks("one"), named("same", "msg_1"))
    log.serve([SYSTEM, TASK], thinks("two"), named("same", "msg_2"))
    assert parent(log.decide([SYSTEM, TASK, thinks("two"), named("same", "msg_1"), asks("Go on.")])) == 2


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_request_with_a_hosted_item_is_a_root_that_names_it(place: int) -> None:
    log = Log(policy="restore")
    log.serve([SYSTEM, TASK], calls(1))
    request = [SYSTEM, TASK, calls(1), gives(1)]
    request.insert(place, Item.hosted("web_search_call", {"id": "ws_1"}))
    decision = log.decide(request)
    evidence = root(decision, "hosted_item:web_search_call")
    assert (decision.candidates, evidence["first_difference"], evidence["role_here"]) == (0, place, "hosted")
    assert candidate_keys(request, RENDER).starts == {}
    log.serve(request, calls(2))
    assert root(log.decide([*request, calls(2), gives(2)]), "hosted_item:web_search_call")
    assert parent(log.decide([SYSTEM, TASK, calls(1), gives(1)])) == 1


def test_an_answer_with_a_hosted_item_is_continued_by_nothing() -> None:
    log = Log(policy="restore")
    searched = Item.hosted("web_search_call", {"id": "ws_1"})
    log.serve([SYSTEM, TASK], searched, says("Found."))
    assert root(log.decide([SYSTEM, TASK, searched, says("Found."), asks("More.")]), "hosted_item:web_search_call")


def test_a_hit_of_another_hash_version_never_counts() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], says("same"))
    request = [SYSTEM, TASK, says("same"), asks("Go on.")]
    keys = candidate_keys(request, RENDER)
    (hit,) = log.known
    assert isinstance(choose(request, keys, [hit], "strict"), Continuation)
    assert choose(request, keys, [replace(hit, hash_version=hashing.HASH_VERSION + 1)], "strict") is None


def test_a_hit_that_was_not_asked_for_never_counts() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], says("same"))
    request = [SYSTEM, TASK, says("other"), asks("Go on.")]
    assert choose(request, candidate_keys(request, RENDER), log.known, "strict") is None


def test_other_tools_or_options_are_another_context() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    request = [SYSTEM, TASK, calls(1), gives(1)]
    assert isinstance(log.decide(request), Continuation)
    assert isinstance(log.decide(request, render=b"other"), Root)


def test_a_decision_says_how_it_was_spliced_or_why_not() -> None:
    log = Log(policy="restore")
    log.serve([SYSTEM, TASK], thinks("Hm."), calls(1))
    decision = log.decide([SYSTEM, TASK, calls(1), gives(1)])
    assert isinstance(decision, Continuation)
    assert decision.spliced("marker", 7).evidence == {
        "flags": ["reasoning_dropped"],
        "path": "marker",
        "suffix_tokens": 7,
    }
    evidence = root(decision.unspliced("media"), "cannot_splice:media")
    assert evidence == {"nearest_call": str(UUID(int=1)), "first_difference": 2}
    assert decision.unspliced("media").candidates == 1


# Reasoning


def served_with_reasoning(policy: ReasoningPolicy) -> Log:
    log = Log(policy=policy)
    log.serve([SYSTEM, TASK], thinks("Files first.\n"), says("I look."), calls(1))
    return log


@pytest.mark.parametrize("policy", ["strict", "restore"])
@pytest.mark.parametrize("echo", ["Files first.\n", "Files first.", "  Files first. "])
def test_reasoning_that_comes_back_is_continued(policy: ReasoningPolicy, echo: str) -> None:
    decision = served_with_reasoning(policy).decide([SYSTEM, TASK, thinks(echo), says("I look."), calls(1), gives(1)])
    assert isinstance(decision, Continuation)
    assert (decision.start, decision.flags) == (2, ())


def test_reasoning_that_does_not_come_back_is_a_root_or_restored() -> None:
    request = [SYSTEM, TASK, says("I look."), calls(1), gives(1)]
    restored = served_with_reasoning("restore").decide(request)
    assert isinstance(restored, Continuation)
    assert restored.flags == ("reasoning_dropped",)
    strict = served_with_reasoning("strict").decide(request)
    evidence = root(strict, "reasoning_dropped")
    assert (strict.candidates, evidence["nearest_call"], evidence["first_difference"]) == (1, str(UUID(int=1)), 2)
    assert evidence["reasoning_here"] is None
    assert evidence["reasoning_there"] == (reasoning_digest([thinks("Files first.")]) or b"").hex()


@pytest.mark.parametrize("policy", ["strict", "restore"])
def test_edited_or_invented_reasoning_is_a_root(policy: ReasoningPolicy) -> None:
    log = served_with_reasoning(policy)
    edited = log.decide([SYSTEM, TASK, thinks("Files later."), says("I look."), calls(1), gives(1)])
    evidence = root(edited, "reasoning_edited")
    assert (evidence["role_here"], evidence["role_there"]) == ("reasoning", "reasoning")
    plain = Log(policy=policy)
    plain.serve([SYSTEM, TASK], calls(1))
    assert (
        root(plain.decide([SYSTEM, TASK, thinks("new"), calls(1), gives(1)]), "reasoning_edited")["role_there"] is None
    )


def test_among_hits_those_with_edited_reasoning_are_dropped_first() -> None:
    log = Log(policy="strict")
    log.serve([SYSTEM, TASK], thinks("one"), calls(1))
    log.serve([SYSTEM, TASK], thinks("two"), calls(1))
    log.serve([SYSTEM, TASK], calls(1))
    assert parent(log.decide([SYSTEM, TASK, thinks("one"), calls(1), gives(1)])) == 1
    decision = log.decide([SYSTEM, TASK, calls(1), gives(1)])
    assert parent(decision) == 3
    assert decision.candidates == 3
    log.known.pop()
    assert root(log.decide([SYSTEM, TASK, calls(1), gives(1)]), "reasoning_dropped")["nearest_sequence"] == 2
    log.policy = "restore"
    assert parent(log.decide([SYSTEM, TASK, calls(1), gives(1)])) == 2


def test_a_root_names_the_call_whose_reasoning_was_dropped_not_one_whose_reasoning_was_edited() -> None:
    log = Log()
    log.serve([SYSTEM, thinks("one")], thinks("two"), says("a"))
    log.serve([SYSTEM], thinks("three"), says("a"))
    decision = log.decide([SYSTEM, thinks("one"), says("a"), asks("Go on.")])
    evidence = root(decision, "reasoning_dropped")
    assert (decision.candidates, evidence["nearest_sequence"], evidence["first_difference"]) == (2, 1, 2)


def test_reasoning_left_out_of_an_older_item_is_an_edit_whatever_the_policy() -> None:
    log = Log(policy="restore")
    log.serve([SYSTEM, TASK], thinks("one"), calls(1))
    log.serve([SYSTEM, TASK, thinks("one"), calls(1), gives(1)], calls(2))
    evidence = root(log.decide([SYSTEM, TASK, calls(1), gives(1), calls(2), gives(2)]), "item_removed")
    assert (evidence["first_difference"], evidence["role_there"], evidence["items_gone"]) == (2, "reasoning", 1)


# Roots and their reasons


def test_the_first_call_of_a_rollout() -> None:
    assert root(Log().decide([SYSTEM, TASK]), "first_call") == {"items": 2}
    assert root(Log().decide([SYSTEM, TASK, says("from elsewhere"), asks("Go on.")]), "first_call") == {"items": 4}


def test_a_fresh_context_names_the_nearest_call() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    evidence = root(log.decide([SYSTEM, asks("Another task.")], render=b"r2", tools=b"t2"), "fresh_context")
    assert evidence == {
        "nearest_call": str(UUID(int=1)),
        "nearest_sequence": 1,
        "items": 2,
        "nearest_items": 2,
        "items_shared": 1,
        "same_tools": False,
        "same_options": False,
    }


def test_the_first_request_sent_again_is_a_fresh_context_that_repeats_a_call() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], calls(1))
    assert root(log.decide([SYSTEM, TASK]), "fresh_context")["repeats_call"] == str(UUID(int=1))


def test_a_request_that_ends_with_a_model_item() -> None:
    log = Log()
    log.serve([SYSTEM, TASK], says("Done."))
    evidence = root(log.decide([SYSTEM, TASK, says("Done.")]), "ends_with_model_item")
    assert (evidence["first_difference"], evidence["role_here"], evidence["items"]) == (2, "assistant", 3)


def history(rounds: int) -> list[Item]:
    return [SYSTEM, TASK, *(item for i in range(1, rounds + 1) for item in (calls(i), gives(i)))]


def grown(rounds: int) -> Log:
    """A rollout of that many calls; call n answers with tool call n."""
    log = Log()
    for number in range(rounds):
        log.serve(history(number), calls(number + 1))
    assert [call.depth for call in log.known] == list(range(rounds))
    return log


def test_an_old_tool_result_that_was_hidden_is_an_edit() -> None:
    request = history(5)
    request[5] = gives(2, "[hidden]")
    evidence = root(grown(5).decide(request), "item_edited")
    assert evidence == {
        "nearest_call": str(UUID(int=5)),
        "nearest_sequence": 5,
        "items": 12,
        "nearest_items": 10,
        "items_shared": 10,
        "same_tools": True,
        "same_options": True,
        "first_difference": 5,
        "role_here": "tool_result",
        "digest_here": gives(2, "[hidden]").digest.hex(),
        "role_there": "tool_result",
        "digest_there": gives(2).digest.hex(),
        "items_new": 1,
        "items_gone": 1,
    }


def test_a_changed_system_prompt_is_an_edit_of_the_first_item() -> None:
    request = [Item.message("system", ["Be brief. Rules: none."]), *history(3)[1:]]
    evidence = root(grown(3).decide(request), "item_edited")
    assert (evidence["first_difference"], evidence["role_here"], evidence["nearest_sequence"]) == (0, "system", 3)


def test_the_nearest_call_is_the_own_conversation_not_one_that_shares_the_new_system_prompt() -> None:
    log = grown(3)
    prompt = Item.message("system", ["Be brief. Rules: none."])
    log.serve([prompt, asks("title?")], says("Files"))
    evidence = root(log.decide([prompt, *history(3)[1:]]), "item_edited")
    assert (evidence["nearest_sequence"], evidence["first_difference"]) == (3, 0)


def test_every_round_rewritten_in_its_place_is_an_edit() -> None:
    rounds = [item for i in (1, 2, 3) for item in (calls(i, '{"hidden": true}'), gives(i, "[hidden]"))]
    evidence = root(grown(4).decide([SYSTEM, TASK, *rounds, calls(4), gives(4)]), "item_edited")
    assert (evidence["first_difference"], evidence["items_new"], evidence["items_gone"]) == (2, 6, 6)


def test_of_two_ways_to_go_on_alike_the_edit_in_place_is_told() -> None:
    log = Log()
    log.serve([SYSTEM, asks("Do it."), says("Ok."), asks("Go on."), says("Sure."), asks("And then?")], calls(1))
    request = [SYSTEM, asks("Go on."), says("Ok."), asks("Go further."), says("Sure."), asks("And then?"), calls(1)]
    evidence = root(log.decide([*request, gives(1)]), "item_edited")
    assert (evidence["first_difference"], evidence["items_new"], evidence["items_gone"]) == (1, 1, 1)


def test_the_shortest_way_to_go_on_alike_is_told() -> None:
    log = Log()
    log.serve([SYSTEM, asks("Do it."), asks("Go on."), says("Ok."), asks("Go on."), says("Sure."), TASK], calls(1))
    request = [SYSTEM, asks("Go on."), says("Ok."), asks("Go on."), says("Sure."), TASK, calls(1), gives(1)]
    evidence = root(log.decide(request), "item_removed")
    assert (evidence["first_difference"], evidence["items_gone"]) == (1, 1)


def test_dropped_rounds_are_items_removed() -> None:
    request = [*history(1)[:2], *history(5)[6:]]
    evidence = root(grown(5).decide(request), "item_removed")
    assert (evidence["first_difference"], evidence["items_new"], evidence["items_gone"]) == (2, 0, 4)


def test_a_message_put_into_the_middle_is_an_item_inserted() -> None:
    request = history(4)
    request.insert(4, asks("Remember the rules."))
    evidence = root(grown(4).decide(request), "item_inserted")
    assert (evidence["first_difference"], evidence["items_new"], evidence["items_gone"]) == (4, 1, 0)
    assert (evidence["role_here"], evidence["role_there"]) == ("user", "tool_call")


def test_a_message_put_before_the_answer_is_an_item_inserted() -> None:
    request = history(4)
    request.insert(8, asks("Some rounds are hidden."))
    evidence = root(grown(4).decide(request), "item_inserted")
    assert (evidence["first_difference"], evidence["role_here"], evidence["role_there"]) == (8, "user", "tool_call")


def test_an_exchange_that_no_call_served_is_an_item_inserted() -> None:
    request = [*history(3), says("As agreed."), asks("Go on.")]
    evidence = root(grown(3).decide(request), "item_inserted")
    assert (evidence["first_difference"], evidence["role_here"], evidence["role_there"]) == (8, "assistant", None)


@pytest.mark.parametrize(
    ("echo", "difference", "here", "there"),
    [
        ([says("I look."), calls(2, '{"fixed": true}')], 5, "tool_call", "tool_call"),
        ([says("I looked."), calls(2)], 4, "assistant", "assistant"),
        ([says("I look.")], 5, "user", "tool_call"),
        ([calls(2)], 4, "tool_call", "assistant"),
        ([says("I look."), calls(2), calls(3)], 6, "tool_call", None),
        ([thinks("edited"), says("I look"), calls(2)], 5, "assistant", "assistant"),
    ],
)
def test_an_answer_that_came_back_otherwise_is_an_edited_answer(
    echo: list[Item], difference: int, here: str, there: str | None
) -> None:
    log = grown(1)
    log.serve(history(1), thinks("Hm."), says("I look."), calls(2))
    evidence = root(log.decide([*history(1), *echo, asks("Go on.")]), "answer_edited")
    assert evidence["first_difference"] == difference
    assert (evidence["role_here"], evidence["role_there"], evidence["nearest_sequence"]) == (here, there, 2)


def test_a_changed_tool_list_is_named_when_the_items_go_on() -> None:
    evidence = root(grown(3).decide(history(3), render=b"r2", tools=b"t2"), "tools_changed")
    assert (evidence["same_tools"], evidence["same_options"], evidence["nearest_sequence"]) == (False, False, 3)
    assert "first_difference" not in evidence


def test_changed_options_are_named_when_the_items_and_tools_go_on() -> None:
    evidence = root(grown(3).decide(history(3), render=b"r2"), "options_changed")
    assert (evidence["same_tools"], evidence["same_options"]) == (True, False)


def test_of_two_equally_near_calls_the_one_with_the_same_options_is_compared() -> None:
    log = grown(2)
    log.serve(history(1), says("other"), render=b"r2", tools=b"t2")
    log.known.pop()
    evidence = root(log.decide([*history(1), says("edited"), asks("Go on.")]), "answer_edited")
    assert evidence["nearest_sequence"] == 2


def test_the_same_request_with_other_tools_is_no_repeat() -> None:
    log = Log()
    log.serve(history(2), says("Done."))
    assert "repeats_call" not in root(log.decide(history(2), render=b"r2", tools=b"t2"), "tools_changed")
    assert root(log.decide(history(2)), "fresh_context")["repeats_call"] == str(UUID(int=1))


def test_edited_items_come_before_changed_tools() -> None:
    request = history(3)
    request[3] = gives(1, "[hidden]")
    assert root(grown(3).decide(request, render=b"r2", tools=b"t2"), "item_edited")["same_tools"] is False


@pytest.mark.parametrize(
    ("request_items", "new", "gone"),
    [
        ([SYSTEM, asks("Summary."), *history(6)[-2:]], 1, 11),
        ([SYSTEM, asks("What did we do?"), says("We counted."), asks("Go on.")], 3, 12),
        ([Item.message("system", ["New."]), asks("Summary."), says("Ok."), asks("Go on.")], 4, 13),
        ([SYSTEM, *[asks("Old prompt.")] * 10, says("Summary."), asks("Go on.")], 12, 12),
    ],
)
def test_a_compaction_is_a_replaced_context(request_items: list[Item], new: int, gone: int) -> None:
    evidence = root(grown(6).decide(request_items), "context_replaced")
    assert (evidence["nearest_sequence"], evidence["items_new"], evidence["items_gone"]) == (6, new, gone)


def test_a_hidden_first_state_is_an_edit_even_when_reasoning_did_not_come_back() -> None:
    log = Log()
    log.serve([SYSTEM, asks("state 1")], thinks("Hm."), calls(1))
    evidence = root(log.decide([SYSTEM, asks("[hidden]"), calls(1), gives(1), asks("state 2")]), "item_edited")
    assert (evidence["first_difference"], evidence["items_new"], evidence["items_gone"]) == (1, 1, 1)


def test_a_rewritten_request_sent_again_keeps_its_reason_and_names_the_repeat() -> None:
    log = grown(4)
    request = history(4)
    request[3] = gives(1, "[hidden]")
    log.serve(request, says("useless"))
    for again in (request, [*request, asks("Use a tool.")]):
        evidence = root(log.decide(again), "item_edited")
        assert (evidence["nearest_sequence"], evidence["repeats_call"]) == (4, str(UUID(int=5)))


def test_an_answer_that_the_log_did_not_have_in_time_is_told_apart() -> None:
    log = grown(2)
    assert explain(history(2), RENDER, TOOLS, log.traced).reason == "answered_meanwhile"


# Laws


def qualifies(
    request: Sequence[Item], earlier: Sequence[Item], answer: Sequence[Item], policy: ReasoningPolicy
) -> bool:
    """The rule as a person would check it: the earlier request, its answer, then at least one item, none a model's."""
    behind = list(request[len(earlier) :])
    echo = list(takewhile(lambda item: item.model_authored, behind))
    new = behind[len(echo) :]
    if (
        list(request[: len(earlier)]) != list(earlier)
        or not echo
        or not new
        or any(item.model_authored for item in new)
    ):
        return False

    def thoughts(items: Sequence[Item]) -> list[str]:
        return [item.text.strip() for item in items if item.kind == "reasoning"]

    def said(items: Sequence[Item]) -> tuple[str, list[object]]:
        text = "".join(item.text for item in items if item.kind == "message").strip()
        return text, [item.call for item in items if item.call is not None]

    kept = thoughts(echo) == thoughts(answer) or (policy == "restore" and not thoughts(echo))
    return kept and said(echo) == said(answer)


turns = st.lists(
    st.sampled_from(["go on", "fork", "retry", "edit", "insert", "drop", "compact"]), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(turns, st.sampled_from(["strict", "restore"]), st.booleans(), st.data())
def test_a_call_is_continued_exactly_when_its_request_and_answer_come_first(
    plan: list[str], policy: ReasoningPolicy, echoes_reasoning: bool, data: st.DataObject
) -> None:
    log = Log(policy=policy)
    served: list[tuple[bytes, list[Item], list[Item]]] = []
    for number, turn in enumerate(["first", *plan]):
        render = data.draw(st.sampled_from([RENDER, RENDER, RENDER, b"r2"]))
        request = [SYSTEM, TASK]
        if served:
            _, before, answer = data.draw(st.sampled_from(served)) if turn == "fork" else served[-1]
            echo = [item for item in answer if echoes_reasoning or item.kind != "reasoning"]
            request = [*before, *echo, asks(f"turn {number}")]
            position = data.draw(st.integers(0, len(request) - 1))
            if turn == "retry":
                request = [*before]
            elif turn == "edit":
                request[position] = data.draw(st.sampled_from([asks("edited"), says("edited")]))
            elif turn == "insert":
                request.insert(position, data.draw(st.sampled_from([asks("more"), says("more")])))
            elif turn == "drop":
                del request[position]
            elif turn == "compact":
                request = [SYSTEM, asks("summary"), *echo, asks("go on")]
        reply = data.draw(
            st.sampled_from(
                [[thinks("Hm. "), says("same")], [says("same\n")], [calls(number)], [thinks("t"), calls(1)]]
            )
        )
        fit = [
            call
            for call, (other_render, earlier, answer) in zip(log.known, served, strict=True)
            if other_render == render and qualifies(request, earlier, answer, policy)
        ]
        expected = max(fit, key=lambda call: (call.depth, call.sequence), default=None)
        decision = log.serve(request, *reply, render=render)
        assert (decision.parent if isinstance(decision, Continuation) else None) == expected
        served.append((render, request, reply))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_root_has_a_reason_and_json_evidence_whatever_the_items(data: st.DataObject) -> None:
    pool = [SYSTEM, TASK, asks("x"), says("a"), says("b"), calls(1), calls(2), gives(1), gives(2), thinks("t")]
    sequences = st.lists(st.sampled_from(pool), max_size=8)
    log = Log()
    for _ in range(data.draw(st.integers(0, 4))):
        log.serve(data.draw(sequences), *data.draw(st.lists(st.sampled_from(pool[3:7]), max_size=3)))
    request = data.draw(sequences)
    found = explain(request, data.draw(st.sampled_from([RENDER, b"r2"])), TOOLS, log.traced)
    evidence = root(found, found.reason)
    position = evidence.get("first_difference")
    if isinstance(position, int) and position < len(request):
        assert evidence["digest_here"] == request[position].digest.hex()
        assert evidence["digest_here"] != evidence["digest_there"]


def test_the_log_keeps_a_key_of_the_echo_for_each_place_that_is_looked_up() -> None:
    served = [Item.reasoning("Hm."), Item.message("assistant", ["Done.\n"]), Item.tool_call("c1", "ls", "{}")]
    items = [Item.message("user", ["Go."]), *served, Item.tool_result("c1", ["a.txt"])]
    keys = candidate_keys(items, b"render")
    kept: list[list[object]] = [list(each) for each in keys.echo]  # type: ignore[arg-type]
    assert [each[0] for each in kept] == sorted(keys.starts.values()) == [1, 2, 3]
    thoughts = reasoning_digest(served)
    assert thoughts is not None
    assert kept[0][1:] == [answer_key(served)[:8].hex(), thoughts[:8].hex()]
    assert [each[2] for each in kept[1:]] == [None, None]
    # Nothing is looked up for a request that ends with a model's item.
    assert candidate_keys(items[:-1], b"render").echo == candidate_keys(items[:1], b"render").echo == []
