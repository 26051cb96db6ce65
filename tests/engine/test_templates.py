"""The splicer against families of chat templates, each with a real tokenizer: what is spliced is what is rendered.

The truth is taken from the text: a word that stands nowhere else ends each answer, the family says what text ends the
turn after it, and what the tokenizer makes of the rest of the full render is the suffix that must come out.
"""

import argparse
import asyncio
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import mistral_common
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.conversations import unthought
from engine.splice import CannotRender, CannotSplice, Message, Render, Splicer, Suffix

TEMPLATES = Path(__file__).parent / "templates"
DOCS = Path(__file__).parents[2] / "docs" / "templates.md"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "<a tool>", "parameters": {"type": "object"}}}
    for name in ("ls", "python")
]
LAST = "zqlastwordzq"
"""The last word of each answer that is looked at; nothing that is said before it holds it."""
ORDINARY = 7
"""A token that ends no turn."""


@dataclass(frozen=True)
class Family:
    """A template, its tokenizer's control tokens and text marks, and what it takes.

    `syntax` is what a tool call's syntax still needs after its last argument's last word, before the turn ends.
    """

    template: str
    control: tuple[str, ...]
    syntax: str
    marks: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    metaspace: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    refuses: frozenset[str] = frozenset()


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
INST = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")
DEEPSEEK_MARKS = (
    "<think>", "</think>", "<|tool_calls_begin|>", "<|tool_calls_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_sep|>", "<|tool_outputs_begin|>", "<|tool_outputs_end|>", "<|tool_output_begin|>", "<|tool_output_end|>",
)  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_MARKS = (*CHATML_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
OURS = ("<|turn|>", "<|end|>", "<|call|>", "<|endoftext|>")

QWEN3 = Family("qwen3", CHATML, '"}}\n</tool_call>', CHATML_MARKS, eos="<|im_end|>")
LLAMA3 = Family(
    "llama3", LLAMA, '"}}', bos="<|begin_of_text|>", eos="<|eot_id|>", refuses=frozenset({"parallel calls"})
)
MISTRAL_V3 = Family(
    "mistral_v3", INST, '"}, "id": "{id}"}]', bos="<s>", eos="</s>", metaspace="always",
    refuses=frozenset({"late system"}),
)  # fmt: skip
FAMILIES = {
    "qwen3": QWEN3,
    "qwen3, thinking off": replace(QWEN3, kwargs={"enable_thinking": False}),
    "llama3": LLAMA3,
    "llama3, built-in tools": replace(
        LLAMA3, syntax='")', kwargs={"builtin_tools": ["ls", "python", "look_up", "find", "other_up"]}
    ),
    "mistral": replace(
        MISTRAL_V3, template="mistral", metaspace="never",
        refuses=frozenset({"late system", "users in a row", "user after results"}),
    ),
    "mistral_v3": MISTRAL_V3,
    "gemma": Family(
        "gemma", GEMMA, "", ("\n", "\n\n"), bos="<bos>", eos="<eos>", metaspace="never",
        refuses=frozenset({"system", "late system", "users in a row", "calls", "parallel calls"}),
    ),
    "deepseek": Family(
        "deepseek", DEEPSEEK, '"}\n```<|tool_call_end|><|tool_calls_end|>', DEEPSEEK_MARKS,
        bos="<|begin_of_sentence|>", eos="<|end_of_sentence|>",
    ),
    "glm": Family("glm", GLM, "</arg_value>\n</tool_call>", GLM_MARKS, eos="<|endoftext|>"),
    "merged_results": Family("merged_results", OURS, '"}'),
    "merged_users": Family("merged_users", OURS, '"}'),
    "switched": Family("switched", OURS, '"}', ("<think>", "</think>")),
    "counted_ahead": Family("counted_ahead", OURS, '"}'),
    "plain_text": Family("plain_text", ("<s>", "</s>"), '"}}'),
}  # fmt: skip


@cache
def trained(metaspace: str | None) -> str:
    """A BPE with merges, trained on some of Python's own source: on bytes, or on words as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE())
    if metaspace is None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(
                    Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated"
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if metaspace is None else []
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    texts = [Path(str(module.__file__)).read_text() for module in (argparse, textwrap, json)]
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    if metaspace is not None:
        vocabulary = state["model"]["vocab"]
        vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
        state["model"]["byte_fallback"] = True
        state["pre_tokenizer"]["prepend_scheme"] = metaspace
    return json.dumps(state)


class Model:
    """A family's template and tokenizer, rendering as vLLM's renderer does."""

    def __init__(self, family: Family, source: str | None = None) -> None:
        self.family = family
        self.renders = 0
        self.source = source or (TEMPLATES / f"{family.template}.jinja").read_text()
        self.tokenizer = Tokenizer.from_str(trained(family.metaspace))
        self.tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in family.control])
        self.tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.marks])
        self.template = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, bos_token=family.bos, eos_token=family.eos
        )
        self.splicer = Splicer(self.tokenizer.get_added_tokens_decoder())

    def text(self, messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> str:
        try:
            return self.template.apply_chat_template(  # type: ignore[no-any-return]
                as_vllm_parses(messages, self.source),
                tools=TOOLS if tools else None,
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.family.kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise CannotRender(str(error)) from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True, tools: bool = False) -> list[int]:
        self.renders += 1
        text = self.text(messages, generation_prompt=generation_prompt, tools=tools)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def asked(self, *, tools: bool) -> Render:
        """The render of a request that offers tools or not."""
        offered = tools

        async def render(messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
            return self.render(messages, generation_prompt=generation_prompt, tools=tools and offered)

        return render

    def found(
        self, messages: Sequence[Message], *, tools: bool = False, last: str = "an ordinary one"
    ) -> Suffix | CannotSplice:
        """What the splicer finds for a request that offers tools or not, whose parent's chain ends in that token."""
        token = self.tokenizer.token_to_id(last)
        last_token = ORDINARY if token is None else token
        render = self.asked(tools=tools)
        return asyncio.run(self.splicer.suffix(render, messages, options=b"", tools=tools, last_token=last_token))

    def after(self, messages: Sequence[Message], *, tools: bool = False) -> list[int]:
        """What the full render writes from the last answer's end-of-turn token on."""
        answer = next(message for message in reversed(messages) if message["role"] == "assistant")
        calls: Any = answer.get("tool_calls")
        syntax = self.family.syntax.replace("{id}", calls[-1]["id"]) if calls else ""
        text = self.text(messages, generation_prompt=True, tools=tools)
        cut = text.index(LAST) + len(LAST)
        if not calls:
            cut += len(text[cut:]) - len(text[cut:].lstrip())
        assert text[cut : cut + len(syntax)] == syntax
        cut += len(syntax)
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return [token for token, (start, _) in zip(found.ids, found.offsets, strict=True) if start >= cut]


def as_vllm_parses(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template whose contents are strings."""
    parsed: list[dict[str, Any]] = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        turn: dict[str, Any] = {"role": message["role"], "content": content or ""}
        calls: Any = message.get("tool_calls")
        if calls:
            turn["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in calls
            ]
        if (thought := message.get("reasoning")) is not None:
            turn |= {"reasoning": thought, "reasoning_content": thought}
        if message["role"] == "tool":
            turn["tool_call_id"] = message.get("tool_call_id")
        parsed.append(turn)
    if "'developer'" not in template and any(turn["role"] == "developer" for turn in parsed):
        front = [turn["content"] for turn in parsed if turn["role"] in ("system", "developer") and turn["content"]]
        rest = [turn for turn in parsed if turn["role"] not in ("system", "developer")]
        parsed = [{"role": "system", "content": "\n\n".join(front)}, *rest]
    return parsed


@cache
def model_of(name: str) -> Model:
    return Model(FAMILIES[name])


def user(content: str = "And there?") -> Message:
    return {"role": "user", "content": content}


def system(content: str = "Be brief.") -> Message:
    return {"role": "system", "content": content}


def tool(place: int = 0, content: str = "a.txt") -> Message:
    return {"role": "tool", "tool_call_id": f"call{place:05}", "content": content}


def answer(
    text: str | None = LAST, *, calls: int = 0, thought: str | None = None, first: int = 0, word: str = LAST
) -> Message:
    """An answer; its last tool call's arguments end in the word."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call{first + place:05}",
                "type": "function",
                "function": {
                    "name": ("ls", "python")[place % 2],
                    "arguments": json.dumps({"path": f"/{word if place == calls - 1 else place}"}),
                },
            }
            for place in range(calls)
        ]
    return message


SHAPES: dict[str, tuple[list[Message], bool]] = {
    "question": ([answer(), user()], False),
    "question, tools offered": ([answer(), user()], True),
    "tool result": ([answer("", calls=1), tool()], True),
    "tool result after text": ([answer("Let me look.", calls=1), tool()], True),
    "parallel results": ([answer("", calls=3), tool(0), tool(1), tool(2)], True),
    "result, then question": ([answer("", calls=1), tool(), user()], True),
    "two questions": ([answer(), user(), user("And?")], False),
    "late system, then question": ([answer(), system(), user()], False),
}
"""What a call may look like: its parent's answer and the new messages, and whether tools are offered."""
HISTORIES: list[list[Message]] = [
    [user("What is here?")],
    [user("What is here?"), answer("Nothing.", thought="hm"), user("Sure?")],
    [user("What is here?"), answer("", calls=1, first=8, thought="hm", word="x"), tool(8)],
    [system(), user("What is here?"), answer("Nothing."), user("Sure?")],
]


def path(model: Model, messages: Sequence[Message], *, tools: bool = False) -> str:
    """The path of a call, once what it gives is what the full render writes; what stock refuses must not be spliced."""
    try:
        expected = model.after(messages, tools=tools)
    except CannotRender:
        assert isinstance(model.found(messages, tools=tools), CannotSplice)
        return "refused"
    found = model.found(messages, tools=tools, last=model.tokenizer.id_to_token(expected[0]))
    if isinstance(found, CannotSplice):
        return f"cannot_splice:{found.why}"
    assert found.token_ids == expected[1:]
    assert before_answer(model, messages, tools=tools) == before_answer(model, said_nothing(messages), tools=tools)
    # A chain that ends otherwise gets the end of turn as well, where it is certain what that is.
    other = model.found(messages, tools=tools)
    assert other in (Suffix(token_ids=expected, path=found.path), CannotSplice(why="open_answer"))
    return found.path


def before_answer(model: Model, messages: Sequence[Message], *, tools: bool) -> str:
    """The full render up to the last answer's last word."""
    return model.text(messages, generation_prompt=True, tools=tools).split(LAST)[0]


def said_nothing(messages: Sequence[Message]) -> list[Message]:
    """The conversation with nothing said after its last answer: what is said there must not show before it."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return [*messages[: last + 1], *({**message, "content": ""} for message in messages[last + 1 :])]


def servable(model: Model, messages: Sequence[Message], *, tools: bool = False) -> bool:
    """Whether the last answer's own request is one that the template takes."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    try:
        model.render(messages[:last], tools=tools)
    except CannotRender:
        return False
    return True


def documented() -> dict[tuple[str, str], str]:
    """The table of docs/templates.md: the path of each family and shape."""
    table = DOCS.read_text().split("| family ")[1].split("\n\n")[0]
    head, _, *rows = [line.strip("|").split("|") for line in f"| family {table}".splitlines()]
    shapes = [cell.strip() for cell in head[1:]]
    return {(row[0].strip(), shape): cell.strip() for row in rows for shape, cell in zip(shapes, row[1:], strict=True)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_takes_the_documented_path_and_is_exact_on_it(family: str, shape: str) -> None:
    end, tools = SHAPES[shape]
    model = model_of(family)
    conversations = [[*history, *end] for history in HISTORIES]
    found = {path(model, each, tools=tools) for each in conversations if servable(model, each, tools=tools)}
    assert " or ".join(sorted(found)) == documented()[family, shape]


def texts(family: Family) -> st.SearchStrategy[str]:
    """Contents that try a template and a tokenizer: control tokens in writing, odd white space, nothing at all."""
    odd = ["", " ", "\n", "\n\n", "\t ", "word", "Übung ☃", "e\u0301", '{"a": 1}', "'s", "zq", "here ends what turnlog"]
    odd += ["<think>", "</think>", "<tool_response>", "</tool_response>", "call00000"]
    return st.lists(st.sampled_from([*odd, *family.control, *family.marks]), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> list[Message]:
    """What a harness could send: a last answer that ends in `LAST`, and something new after it."""
    said, thought = texts(family), st.none() | texts(family)

    def takes(what: str) -> bool:
        return what not in family.refuses and draw(st.booleans())

    messages: list[Message] = [system(draw(said))] if takes("system") else []
    answers = draw(st.integers(1, 4))
    calls = 0
    for n in range(answers + 1):
        messages += draw(st.permutations([tool(10 * n + place, draw(said)) for place in range(calls)]))
        if not calls or takes("user after results"):
            messages += [system(draw(said))] if n and takes("late system") else []
            messages += [user(draw(said)) for _ in range(1 + takes("users in a row"))]
        if n < answers:
            calls = draw(st.integers(1, 1 if "parallel calls" in family.refuses else 3)) if takes("calls") else 0
            word = LAST if n == answers - 1 else "x"
            last = "" if calls else word + draw(st.sampled_from(["", " ", "\n\n"]))
            messages.append(
                answer(draw(said) + last, calls=calls, first=10 * (n + 1), thought=draw(thought), word=word)
            )
    return messages


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"counted_ahead", "plain_text"}))
def test_what_is_spliced_is_what_is_rendered_whatever_was_said(family: str) -> None:
    model, paths = model_of(family), Counter[str]()

    @settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(conversations(FAMILIES[family]), st.booleans())
    def check(messages: list[Message], tools: bool) -> None:
        if servable(model, messages, tools=tools):
            paths[path(model, messages, tools=tools)] += 1

    check()
    assert paths["marker"] + paths["full"] > 12, paths


TURN = Family("", (*CHATML, "<|eom|>"), '"}</tool_call>', (*CHATML_MARKS, "</answer>"))


def chatml(
    *,
    head: str = "",
    role: str = "{{ m.role }}",
    said: str = "{{ m.content }}",
    end: str = "<|im_end|>\n",
    prompt: str = "<|im_start|>assistant\n",
) -> str:
    """A template in the manner of ChatML, with one thing changed."""
    calls = "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    return (
        head
        + "{% for m in messages %}<|im_start|>"
        + f"{role}\n{said}{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}{end}{{% endfor %}}"
        + f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def results(what: str) -> str:
    """A template whose tool results show more than they say; `i` is the result's place."""
    return chatml(said="{% set i = loop.index0 %}{% if m.role == 'tool' %}" + what + ": {% endif %}{{ m.content }}")


CALLS = "(messages | selectattr('tool_calls', 'defined') | map(attribute='tool_calls') | sum(start=[]))"
PLAIN, OFFERED, RESULT, LATE = "question", "question, tools offered", "tool result", "late system, then question"
NOT_PROVEN = "cannot_splice:boundary_not_proven"
SUBTLE: dict[str, tuple[str, dict[str, str]]] = {
    "nothing": (chatml(), {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: "marker"}),
    "turns are numbered": (
        chatml(role="{{ loop.index }} {{ m.role }}"),
        {PLAIN: "full", OFFERED: "full", RESULT: "full", LATE: "full"},
    ),
    "the turns that remain are shown": (
        chatml(prompt="<|im_start|>assistant, {{ 60 - messages | length }} left\n"),
        {PLAIN: "full", RESULT: "full"},
    ),
    "few turns that remain are shown": (
        chatml(prompt="{{ '<hurry>' if messages | length > 30 }}<|im_start|>assistant\n"),
        {PLAIN: "full", RESULT: "full"},
    ),
    "few turns that remain are shown where tools are": (
        chatml(prompt="{{ '<hurry>' if tools and messages | length > 30 }}<|im_start|>assistant\n"),
        {PLAIN: "marker", OFFERED: "full", RESULT: "full"},
    ),
    "few turns that remain are shown, to those who are told how to be": (
        chatml(
            prompt="{{ '<hurry>' if messages[0].role == 'system' and messages | length > 20 }}<|im_start|>assistant\n"
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "few turns that remain are shown, and no system message is taken": (
        chatml(
            head="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            prompt="{{ '<hurry>' if messages | length > 30 }}<|im_start|>assistant\n",
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "a first message that says nothing is remarked upon": (
        chatml(prompt="{{ '<silence>' if not messages[0].content }}<|im_start|>assistant\n"),
        {PLAIN: "full", RESULT: "full"},
    ),
    "what was said first is not written again": (
        chatml(said="{{ m.content if loop.first or m.content != messages[0].content else 'as before' }}"),
        {PLAIN: "full", RESULT: "marker"},
    ),
    "a second system message is remarked upon": (
        chatml(
            prompt="{{ '<again>' if messages | selectattr('role', 'equalto', 'system') | list | length > 1 }}"
            "<|im_start|>assistant\n"
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "tools are taken from those who ask what": (
        chatml(head="{% if tools and 'What' not in messages[0].content %}{{ raise_exception('what?') }}{% endif %}"),
        {PLAIN: "marker", OFFERED: "full"},
    ),
    "every second turn differs": (
        chatml(prompt="<|im_start|>assistant{{ '!' if messages | length % 4 > 1 }}\n"),
        {PLAIN: "full", RESULT: "full"},
    ),
    "long conversations get a reminder after each answer": (
        chatml(
            end="<|im_end|>\n{% if m.role == 'assistant' and not loop.last and messages | length > 20 %}"
            "<|im_start|>system\nKeep going.<|im_end|>\n{% endif %}"
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "the date stands in the head": (
        chatml(head="{{ strftime_now('%d %B %Y') }}\n"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: "marker"},
    ),
    "a last answer is not ended": (
        chatml(end="{% if not loop.last or m.role != 'assistant' %}<|im_end|>\n{% endif %}"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: "marker"},
    ),
    "a last answer is ended otherwise": (
        chatml(end="{{ '<|eom|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\n"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: "marker"},
    ),
    "white space is trimmed": (
        chatml(said="{{ m.content | trim }}"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: "marker"},
    ),
    "questions mention tools if there are any": (
        chatml(said="{{ m.content }}{{ ' Use the tools.' if tools and m.role == 'user' }}"),
        {PLAIN: "marker", OFFERED: "full", RESULT: "marker", LATE: "marker"},
    ),
    "results are refused where no tools are offered": (
        chatml(
            head="{% if not tools and messages | selectattr('role', 'equalto', 'tool') | list %}"
            "{{ raise_exception('no tools, no results') }}{% endif %}"
        ),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "full"},
    ),
    "system messages go to the front": (
        chatml(
            head="{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}",
            said="{{ m.content if m.role != 'system' }}",
        ),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: NOT_PROVEN},
    ),
    "system messages join the one in front": (
        chatml(
            head="{% if messages[0].role == 'system' %}"
            "{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}{% endif %}",
            said="{{ m.content if m.role != 'system' or messages[0].role != 'system' }}",
        ),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: f"{NOT_PROVEN} or full"},
    ),
    "system messages are left out unless one is in front": (
        chatml(
            head="{% if messages[0].role == 'system' %}"
            "{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}{% endif %}",
            said="{{ m.content if m.role != 'system' }}",
        ),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker", LATE: f"{NOT_PROVEN} or full"},
    ),
    "the system message stands before the last question": (
        chatml(
            said="{% if m.role == 'user' and messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user')"
            " | list | length == 0 and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
            "{{ m.content if m.role != 'system' }}"
        ),
        {PLAIN: f"{NOT_PROVEN} or full", RESULT: "marker", LATE: f"{NOT_PROVEN} or full"},
    ),
    "the answer's last words are quoted back": (
        chatml(
            prompt="<|im_start|>system\nBefore: "
            "{{ (messages | selectattr('role', 'equalto', 'assistant') | list)[-1].content[-12:] }}<|im_end|>\n"
        ),
        {PLAIN: "full", OFFERED: "full"},
    ),
    "results show the arguments of their call": (
        results(
            "{{ (" + CALLS + " | selectattr('id', 'equalto', m.tool_call_id) | list)[-1].function.arguments | tojson }}"
        ),
        {PLAIN: "marker", RESULT: "full"},
    ),
    "results show the name of the last call of their id": (
        results("{{ (" + CALLS + " | selectattr('id', 'equalto', m.tool_call_id) | list)[-1].function.name }}"),
        {PLAIN: "marker", RESULT: "marker"},
    ),
    "results show the name of the first call of their id": (
        results("{{ (" + CALLS + " | selectattr('id', 'equalto', m.tool_call_id) | list)[0].function.name }}"),
        {PLAIN: "marker", RESULT: "full"},
    ),
    "results are numbered through the conversation": (
        results("{{ messages[:i] | selectattr('role', 'equalto', 'tool') | list | length }}"),
        {PLAIN: "marker", RESULT: "full"},
    ),
    "a fourth result is remarked upon where tools are offered": (
        results("{{ 'enough' if tools and messages[:i] | selectattr('role', 'equalto', 'tool') | list | length > 2 }}"),
        {OFFERED: "marker", RESULT: "full"},
    ),
    "results are numbered, and calls come one at a time": (
        "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
        + results("{{ messages[:i] | selectattr('role', 'equalto', 'tool') | list | length }}"),
        {PLAIN: "marker", RESULT: "full"},
    ),
    "the fifth question is remarked upon": (
        chatml(
            prompt="{{ '<fifth>' if messages | selectattr('role', 'equalto', 'user') | list | length == 5 }}"
            "<|im_start|>assistant\n"
        ),
        {PLAIN: "full"},
    ),
    "thinking goes on where there was any": (
        chatml(
            prompt="<|im_start|>assistant\n"
            "{% for m in messages if m.reasoning %}{{ '<think>' if loop.last }}{% endfor %}"
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "thinking goes on where the answer was thought about": (
        chatml(
            prompt="<|im_start|>assistant\n"
            "{{ '<think>' if (messages | selectattr('role', 'equalto', 'assistant') | list)[-1].reasoning }}"
        ),
        {PLAIN: "full", RESULT: "full"},
    ),
    "the generation prompt depends on the last role": (
        chatml(prompt="<|im_start|>assistant{{ ' on results' if messages[-1].role == 'tool' }}\n"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker"},
    ),
    "tool calls end a turn otherwise": (
        chatml(end="{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}\n"),
        {PLAIN: "marker", OFFERED: "marker", RESULT: "marker"},
    ),
    "no turn has an end": (chatml(end="\n\n"), {PLAIN: "cannot_splice:no_end_of_turn_token"}),
    "turns are parted by plain text in front": (
        "{% for m in messages %}\n### {{ m.role }}:\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}\n### assistant:{% endif %}",
        {PLAIN: NOT_PROVEN},
    ),
    "text stands before the end of a turn": (
        chatml(end="{{ '\n' }}<|im_end|>\n").replace("{{ m.content }}", "{{ m.content | trim }}"),
        {PLAIN: "marker"},
    ),
    "calls that nothing follows end in more": (
        chatml(end="{{ '<|eom|>' if loop.last and m.tool_calls }}<|im_end|>"),
        {PLAIN: "marker", RESULT: NOT_PROVEN},
    ),
    "answers are left out": (
        chatml().replace("for m in messages", "for m in messages if m.role != 'assistant'"),
        {},
    ),
    "the first message must be a system message": (
        chatml(head="{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"),
        {PLAIN: "cannot_splice:template:system first"},
    ),
}
LONG = [user("1"), *(turn for n in range(20) for turn in (answer(f"answer {n}"), user(f"question {n}")))]


@pytest.mark.parametrize("template", SUBTLE)
def test_a_template_that_looks_elsewhere_is_found_out(template: str) -> None:
    source, expected = SUBTLE[template]
    model = Model(TURN, source)
    for shape, paths in expected.items():
        end, tools = SHAPES[shape]
        conversations = [[*history, *end] for history in (*HISTORIES, LONG)]
        found = {path(model, each, tools=tools) for each in conversations if servable(model, each, tools=tools)}
        assert " or ".join(sorted(found)) == paths, shape


def of_role(role: str) -> str:
    return f"(messages | selectattr('role', 'equalto', '{role}') | list)"


WITH_CALLS = "(messages | selectattr('tool_calls', 'defined') | list)"
LOOKS = [
    "messages | length % 2", "messages | length % 3", "messages | length > 4", "messages | length > 9",
    "messages | length > 30", "messages | length < 4", f"{of_role('user')} | length", f"{of_role('user')} | length > 3",
    f"{of_role('tool')} | length", f"{of_role('tool')} | length > 2", f"{of_role('system')} | length > 1",
    f"{of_role('assistant')} | length > 1", "messages[0].role", "messages[1].role", "messages[-1].role",
    "messages[-2].role", "messages[-1].role == 'tool'", f"{WITH_CALLS} | length", "tools is not none",
    f"{of_role('assistant')}[0].tool_calls is defined", f"{of_role('assistant')}[-1].tool_calls is defined",
    f"{of_role('assistant')}[-1].reasoning is defined", f"{of_role('assistant')}[-1].content | length > 0",
    f"{of_role('user')}[0].content | length > 20", "messages[0].content | length > 0",
]  # fmt: skip
"""What a template may look at, anywhere in it."""
LOOKS_AROUND = [*LOOKS, "loop.index", "loop.index0 % 3", "loop.first", "loop.last", f"m == {of_role('user')}[0]"]
"""What it may look at while it writes one message."""


@st.composite
def looking_templates(draw: st.DrawFn) -> str:
    """A template in which one or two places show, or are shown by, something else of the conversation."""
    places = {
        "head": "",
        "role": "{{ m.role }} ",
        "said": "{{ m.content }}",
        "end": "<|im_end|>\n",
        "prompt": "<|im_start|>",
    }
    for place in draw(st.lists(st.sampled_from(sorted(places)), min_size=1, max_size=2, unique=True)):
        looks = draw(st.sampled_from(LOOKS if place in ("head", "prompt") else LOOKS_AROUND))
        shown = draw(st.sampled_from([f"({looks})", f"'<|eom|>' if ({looks})", f"'no' if not ({looks})"]))
        unless = " if m.role != 'assistant'" if place == "said" else ""
        places[place] += f"{{{{ ({shown}){unless} }}}}"
    return chatml(**places)


def test_templates_that_look_anywhere_are_spliced_exactly_or_not_at_all() -> None:
    paths = Counter[str]()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(looking_templates(), st.lists(conversations(TURN), min_size=4, max_size=4), st.booleans())
    def check(source: str, talks: list[list[Message]], tools: bool) -> None:
        model = Model(TURN, source)
        for messages in talks:
            if servable(model, messages, tools=tools):
                paths[path(model, messages, tools=tools)] += 1

    check()
    assert min(paths[each] for each in ("marker", "full", NOT_PROVEN)) > 4, paths


def suffix_after(model: Model, messages: Sequence[Message], last: str, *, tools: bool = False) -> str:
    """What is done to a chain that ends in that token: `ended`, `gets the end`, or why it cannot be spliced."""
    whole = model.after(messages, tools=tools)
    found = model.found(messages, tools=tools, last=last)
    if isinstance(found, CannotSplice):
        return found.why
    assert found.token_ids in (whole, whole[1:])
    return "gets the end" if found.token_ids == whole else "ended"


@pytest.mark.parametrize(
    ("family", "shape", "last", "outcome"),
    [
        ("qwen3", PLAIN, "<|im_end|>", "ended"),
        ("qwen3", PLAIN, "<|endoftext|>", "gets the end"),
        ("qwen3", PLAIN, "a length stop", "gets the end"),
        ("qwen3", RESULT, "<|im_end|>", "ended"),
        ("qwen3", RESULT, "</tool_call>", "gets the end"),
        ("llama3", PLAIN, "<|eot_id|>", "ended"),
        ("llama3", PLAIN, "<|end_of_text|>", "gets the end"),
        ("llama3", PLAIN, "<|start_header_id|>", "gets the end"),
        ("llama3", RESULT, "<|eot_id|>", "ended"),
        ("llama3", RESULT, "<|eom_id|>", "gets the end"),
        ("llama3, built-in tools", PLAIN, "<|eom_id|>", "gets the end"),
        ("llama3, built-in tools", RESULT, "<|eom_id|>", "ended"),
        ("llama3, built-in tools", RESULT, "<|eot_id|>", "ended"),
        ("llama3, built-in tools", RESULT, "<|end_of_text|>", "open_answer"),
        ("mistral", RESULT, "</s>", "ended"),
        ("mistral", RESULT, "a length stop", "gets the end"),
        ("gemma", PLAIN, "<end_of_turn>", "ended"),
        ("gemma", PLAIN, "<eos>", "gets the end"),
        ("gemma", PLAIN, "\n\n", "gets the end"),
        ("gemma", PLAIN, "\n", "open_answer"),
        ("deepseek", RESULT, "<|end_of_sentence|>", "ended"),
        ("deepseek", RESULT, "<|tool_calls_end|>", "gets the end"),
        ("glm", PLAIN, "<|user|>", "ended"),
        ("glm", PLAIN, "<|observation|>", "gets the end"),
        ("glm", PLAIN, "<|endoftext|>", "gets the end"),
        ("glm", RESULT, "<|observation|>", "ended"),
        ("glm", RESULT, "<|endoftext|>", "gets the end"),
    ],
)
def test_how_an_answer_stopped_decides_what_the_suffix_starts_with(
    family: str, shape: str, last: str, outcome: str
) -> None:
    end, tools = SHAPES[shape]
    assert suffix_after(model_of(family), [*HISTORIES[1], *end], last, tools=tools) == outcome


def test_the_token_that_ends_a_last_answer_ends_an_answer() -> None:
    model = Model(TURN, SUBTLE["a last answer is ended otherwise"][0])
    messages = [*HISTORIES[0], answer(), user()]
    assert suffix_after(model, messages, "<|eom|>") == suffix_after(model, messages, "<|im_end|>") == "ended"


def test_where_more_than_a_token_ends_a_turn_only_an_ended_answer_is_spliced() -> None:
    model = Model(TURN, SUBTLE["text stands before the end of a turn"][0])
    messages = [*HISTORIES[0], answer(), user()]
    assert suffix_after(model, messages, "<|im_end|>") == "ended"
    assert suffix_after(model, messages, "a length stop") == "open_answer"
    calling = [*HISTORIES[0], answer("", calls=1), tool()]
    assert isinstance(model.found(calling, last="<|im_end|>"), Suffix)
    assert model.found(calling) == CannotSplice(why="open_answer")


def test_an_end_of_two_control_tokens_is_not_written_twice() -> None:
    model = Model(TURN, chatml(end="{{ '</answer>' if m.role == 'assistant' }}<|im_end|>\n"))
    messages = [*HISTORIES[0], answer(), user()]
    outcomes = [suffix_after(model, messages, last) for last in ("a length stop", "</answer>", "<|im_end|>")]
    assert outcomes == ["gets the end", "ended", "open_answer"]


@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {"merged_users", "mistral_v3", "counted_ahead", "plain_text"})
)
def test_after_an_answer_without_text_or_calls_stands_what_stands_after_any_other(family: str) -> None:
    model = model_of(family)
    for history in HISTORIES:
        said = [*history, answer(), user()]
        if servable(model, said):
            for nothing in (None, "", " "):
                messages = [*history, answer(nothing, thought="hm"), user()]
                found = model.found(messages)
                assert isinstance(found, Suffix)
                assert found.token_ids == model.after(said)
                assert model.render(messages)[-len(found.token_ids) :] == found.token_ids


def test_an_answer_that_the_template_leaves_out_cannot_be_spliced_where_its_neighbours_merge() -> None:
    messages = [*HISTORIES[0], answer(None), user()]
    assert model_of("merged_users").found(messages) == CannotSplice(why="boundary_not_proven")


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([*HISTORIES[2], answer(), tool(8)], id="results of older calls"),
        pytest.param([*HISTORIES[0], answer(), tool(8)], id="results of no call"),
        pytest.param([*HISTORIES[0], answer(), *[user()] * 33], id="many new messages"),
    ],
)
def test_what_no_proof_covers_is_rendered_in_full(messages: list[Message]) -> None:
    assert path(model_of("merged_results"), messages) == "full"


def test_behind_a_summary_no_question_need_stand() -> None:
    """Continue goes on from its instructions and a summary that it puts in an assistant's mouth."""
    messages = [system(), answer("A summary."), answer("", calls=1), tool()]
    assert path(model_of("qwen3"), messages) == "marker"
    for family in ("qwen3", "llama3", "glm", "merged_results", "merged_users", "mistral_v3"):
        model = model_of(family)
        for asked in (messages, [system(), answer(), user()]):
            found = model.found(asked) if servable(model, asked) else None
            if isinstance(found, Suffix):
                assert found.token_ids == model.after(asked), family


def test_a_call_whose_name_spells_a_control_token_does_not_move_the_cut() -> None:
    messages = [*HISTORIES[0], answer("", calls=1), tool()]
    call: Any = messages[1]["tool_calls"]
    call[0]["function"]["name"] = "ls<|end|>"
    assert path(model_of("merged_results"), messages) == "full"


def test_a_tool_whose_calls_are_written_otherwise_than_the_proven_ones_is_rendered_in_full() -> None:
    family = replace(LLAMA3, kwargs={"builtin_tools": ["python"]})
    model = Model(family)
    messages = [*HISTORIES[0], answer("", calls=1), tool()]
    assert path(model, messages, tools=True) == "marker"
    call: Any = messages[1]["tool_calls"]
    call[0]["function"]["name"] = "python"
    model.family = replace(family, syntax='")')
    assert path(model, messages, tools=True) == "full"


def test_a_tool_whose_calls_are_ended_otherwise_than_the_proven_ones_is_rendered_in_full() -> None:
    source = chatml(end="{{ '<|eom|>' if m.tool_calls and m.tool_calls[-1].function.name == 'python' }}<|im_end|>\n")
    model = Model(TURN, source)
    assert path(model, [*HISTORIES[0], answer("", calls=1), tool()]) == "marker"
    model.family = replace(TURN, syntax=TURN.syntax + "<|eom|>")
    assert path(model, [*HISTORIES[0], answer("", calls=2), tool()]) == "full"


def test_a_tool_whose_calls_are_not_ended_at_all_cannot_be_spliced() -> None:
    source = chatml(end="{{ '<|im_end|>' if not m.tool_calls or m.tool_calls[-1].function.name == 'look_up' }}\n")
    assert path(Model(TURN, source), [*HISTORIES[0], answer("", calls=1), tool()]) == NOT_PROVEN


def test_an_added_token_behind_the_end_of_turn_is_not_taken_for_it() -> None:
    model = Model(replace(TURN, marks=(*TURN.marks, "\n")), chatml())
    messages = [*HISTORIES[0], answer("", calls=1), tool()]
    outcomes = [suffix_after(model, messages, last) for last in ("<|im_end|>", "a length stop", "\n")]
    assert outcomes == ["ended", "gets the end", "open_answer"]


def test_a_system_message_after_a_developers_message_is_not_left_where_it_stands() -> None:
    model = model_of("qwen3")
    developer: Message = {"role": "developer", "content": "Be brief."}
    assert path(model, [developer, *HISTORIES[0], answer(), user()]) == "marker"
    assert path(model, [developer, *HISTORIES[0], answer(), system(), user()]) == NOT_PROVEN
    assert path(model, [*HISTORIES[0], answer(), developer, user()]) == NOT_PROVEN


def test_what_a_template_moves_to_the_front_for_what_it_says_cannot_be_spliced() -> None:
    model = Model(TURN, chatml(head="{% for m in messages if '[pin]' in m.content %}{{ m.content }}{% endfor %}"))
    assert path(model, [*HISTORIES[0], answer(), user()]) == "marker"
    assert path(model, [*HISTORIES[0], answer(), user("[pin] this")]) == NOT_PROVEN
    assert path(model, [user("[pin] this"), answer(), user()]) == "marker"


def test_a_clock_in_the_head_does_not_end_a_proof() -> None:
    clock = {"now": "Monday"}
    model = Model(replace(TURN, kwargs=clock), chatml(head="{{ now }}\n"))
    messages = [*HISTORIES[0], answer(), user()]
    assert path(model, messages) == "marker"
    clock["now"] = "Tuesday"
    assert path(model, messages) == "marker"
    model.renders = 0
    assert isinstance(model.found(messages), Suffix)
    assert model.renders == 1


def test_new_messages_that_the_template_leaves_out_altogether_are_no_suffix() -> None:
    model = Model(
        TURN, chatml(end="<|im_end|>", prompt="").replace("for m in messages", "for m in messages if m.content")
    )
    assert path(model, [*HISTORIES[0], answer(), user()]) == "marker"
    assert path(model, [*HISTORIES[0], answer(), user("")]) == NOT_PROVEN


def test_an_answer_with_text_is_not_taken_for_one_without() -> None:
    source = chatml(end="{{ '<|im_end|>' if m.content else '<|eom|>' }}\n")
    model = Model(TURN, source)
    assert path(model, [*HISTORIES[0], answer("", calls=1), tool()], tools=True) == "marker"
    assert path(model, [*HISTORIES[0], answer("So.", calls=1), tool()], tools=True) == "marker"


MISTRAL_VERSIONS = {
    "v3": {"tool result", "parallel tool results"},
    "v7": {"tool result", "parallel tool results", "text, then tool result", "plain"},
    "v13": {"tool result", "parallel tool results", "text, then tool result", "plain", "tools offered",
            "tool result, then user"},
    "mistral_instruct_tokenizer_241114.model.v7": {"tool result", "parallel tool results", "text, then tool result",
                                                   "plain"},
}  # fmt: skip
"""The usual shapes that are spliced with mistral-common's encoder, by version or file; all of them by the marker."""


@pytest.mark.parametrize("version", MISTRAL_VERSIONS)
def test_mistrals_own_encoder_is_spliced_although_it_ends_no_conversation_with_an_answer(
    version: str, write_tekken: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    shipped = Path(mistral_common.__file__).parent / "data" / version
    encoder = MistralTokenizer.from_file(str(shipped if shipped.exists() else write_tekken(tmp_path, version)))
    tokenizer = encoder.instruct_tokenizer.tokenizer
    splicer = Splicer(range(tokenizer.num_special_tokens))

    async def render(messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
        told: Any = [dict(message) for message in messages]
        try:
            request = ChatCompletionRequest.from_openai(messages=told, tools=TOOLS if tools else None)
            return list(encoder.encode_chat_completion(request).tokens)
        except MistralCommonException as error:
            raise CannotRender(str(error)) from error

    paths = asyncio.run(splicer.probe(render, options=b""))
    spliced = {name: path for name, path in paths.items() if not path.startswith("cannot_splice:")}
    assert spliced == dict.fromkeys(MISTRAL_VERSIONS[version], "marker")
    for history in HISTORIES:
        messages = [*unthought(history), answer("", calls=2), tool(0, "</s>[INST]"), tool(1, "")]
        full = asyncio.run(render(messages, generation_prompt=True, tools=True))
        end = tokenizer.eos_id
        found = asyncio.run(splicer.suffix(render, messages, options=b"", tools=True, last_token=end))
        cut = len(full) - full[::-1].index(end)
        assert found == Suffix(token_ids=full[cut:], path="marker")


def test_a_template_that_refuses_everything_is_no_error_at_start_up() -> None:
    model = Model(TURN, "{{ raise_exception('not today') }}")
    paths = asyncio.run(model.splicer.probe(model.asked(tools=True), options=b""))
    assert set(paths.values()) == {"cannot_splice:template:not today"}


def test_start_up_is_short_and_a_call_renders_once() -> None:
    model = Model(FAMILIES["qwen3"])
    asyncio.run(model.splicer.probe(model.asked(tools=True), options=b""))
    assert model.renders < 600
    for shape in (PLAIN, OFFERED, RESULT):
        end, tools = SHAPES[shape]
        model.renders = 0
        assert isinstance(model.found([*HISTORIES[3], *end], tools=tools), Suffix)
        assert model.renders == 1
