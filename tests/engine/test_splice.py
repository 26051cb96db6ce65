"""The splicer against real templates and a real tokenizer: exact where it claims to be, silent nowhere."""

import asyncio
from collections.abc import Callable, Sequence

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.splice import CannotRender, CannotSplice, Message, Render, Splicer, Suffix

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning or '' }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{{ c.function.arguments }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ messages | length + 1 }} assistant\n{% endif %}"
)
COUNTED_AHEAD = (
    "{% for m in messages %}<|im_start|>{{ messages | length }} {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
STRICT_ROLES = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ refuse('no role ' ~ m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURED = (
    "{% set ns = namespace(shown=0) %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "ls"}}]
QUESTION: list[Message] = [{"role": "user", "content": "What is here?"}]
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "ls", "arguments": f'{{"n": {i}}}'}} for i in range(3)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes as tokens, and ChatML's special ones."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(alphabet))}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return found


@pytest.fixture
def render_of(tokenizer: Tokenizer) -> Callable[[str], Render]:
    """A template's render, with the tools of `TOOLS` where they are shown."""

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    def of(template: str) -> Render:
        compiled = jinja2.Environment(keep_trailing_newline=True).from_string(template)

        async def render(messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
            try:
                text = compiled.render(
                    messages=messages,
                    tools=TOOLS if tools else None,
                    add_generation_prompt=generation_prompt,
                    refuse=refuse,
                )
            except jinja2.TemplateError as error:
                raise CannotRender(str(error)) from error
            return tokenizer.encode(text, add_special_tokens=False).ids

        return render

    return of


@pytest.fixture
def splicer(tokenizer: Tokenizer) -> Splicer:
    return Splicer(token for token in tokenizer.get_added_tokens_decoder())


def suffix_of(
    splicer: Splicer, render: Render, messages: list[Message], *, last_token: int, tools: bool = False
) -> Suffix | CannotSplice:
    return asyncio.run(splicer.suffix(render, messages, options=b"", tools=tools, last_token=last_token))


def answered(content: str, new: list[Message], **fields: object) -> list[Message]:
    return [*QUESTION, {"role": "assistant", "content": content, **fields}, *new]


@pytest.mark.parametrize(
    ("calls", "new"),
    [
        (0, [{"role": "user", "content": "And there?"}]),
        (1, [{"role": "tool", "tool_call_id": "call_0", "content": "a.txt"}]),
        (2, [{"role": "tool", "tool_call_id": f"call_{i}", "content": "x"} for i in range(2)]),
        (3, [{"role": "tool", "tool_call_id": f"call_{i}", "content": "x"} for i in range(3)]),
        (1, [{"role": "tool", "tool_call_id": "call_0", "content": "a"}, {"role": "user", "content": "go"}]),
        (0, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]),
    ],
)
@pytest.mark.parametrize("tools", [False, True])
def test_the_marker_suffix_is_what_the_full_render_writes_after_the_answer(
    splicer: Splicer,
    render_of: Callable[[str], Render],
    tokenizer: Tokenizer,
    calls: int,
    new: list[Message],
    tools: bool,
) -> None:
    render = render_of(CHATML)
    end = tokenizer.token_to_id("<|im_end|>")
    messages = answered("Let me look.", new, tool_calls=CALLS[:calls], reasoning="a thought of its own")
    found = suffix_of(splicer, render, messages, last_token=end, tools=tools)
    assert isinstance(found, Suffix)
    assert found.path == "marker"
    full = asyncio.run(render(messages, generation_prompt=True, tools=tools))
    assert full[-len(found.token_ids) :] == found.token_ids
    assert full[-len(found.token_ids) - 1] == end


def test_an_answer_cut_short_gets_its_end_of_turn_from_the_suffix(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    render, end = render_of(CHATML), tokenizer.token_to_id("<|im_end|>")
    messages = answered("Let me", [{"role": "user", "content": "Go on."}])
    whole = suffix_of(splicer, render, messages, last_token=end)
    cut = suffix_of(splicer, render, messages, last_token=7)
    assert isinstance(whole, Suffix)
    assert isinstance(cut, Suffix)
    assert cut.token_ids == [end, *whole.token_ids]


def test_new_text_that_spells_a_special_token_does_not_move_the_cut(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    render, end = render_of(CHATML), tokenizer.token_to_id("<|im_end|>")
    messages = answered("ok", [{"role": "user", "content": "what does <|im_end|> mean?"}])
    found = suffix_of(splicer, render, messages, last_token=end)
    assert isinstance(found, Suffix)
    assert tokenizer.decode(found.token_ids, skip_special_tokens=False).startswith("\n<|im_start|>user\nwhat does")


def test_a_template_that_numbers_its_turns_falls_back_to_the_full_render(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    render, end = render_of(NUMBERED), tokenizer.token_to_id("<|im_end|>")
    messages = [*answered("one", [{"role": "user", "content": "two"}]), *answered("three", [])[1:], *QUESTION]
    found = suffix_of(splicer, render, messages, last_token=end)
    assert isinstance(found, Suffix)
    assert found.path == "full"
    assert tokenizer.decode(found.token_ids, skip_special_tokens=False) == (
        "\n<|im_start|>5 user\nWhat is here?<|im_end|>\n<|im_start|>6 assistant\n"
    )


def test_a_template_whose_past_depends_on_the_future_cannot_be_spliced(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    messages = answered("one", [{"role": "user", "content": "two"}])
    found = suffix_of(splicer, render_of(COUNTED_AHEAD), messages, last_token=tokenizer.token_to_id("<|im_end|>"))
    assert found == CannotSplice(why="boundary_not_proven")


def test_a_template_without_an_end_of_turn_token_cannot_be_spliced(
    splicer: Splicer, render_of: Callable[[str], Render]
) -> None:
    messages = answered("one", [{"role": "user", "content": "two"}])
    assert suffix_of(splicer, render_of(PLAIN_TEXT), messages, last_token=1) == CannotSplice(why="no_end_of_turn_token")


def test_a_role_that_the_template_refuses_is_named(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    messages = answered("one", [{"role": "system", "content": "two"}])
    found = suffix_of(splicer, render_of(STRICT_ROLES), messages, last_token=tokenizer.token_to_id("<|im_end|>"))
    assert found == CannotSplice(why="template:no role system")


@pytest.mark.parametrize(
    ("numbered", "kind", "path"),
    [(False, "image_url", "marker"), (True, "image_url", "full"), (False, "video_url", "full")],
)
def test_new_images_are_rendered_without_the_history_where_a_proof_with_images_holds(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer, numbered: bool, kind: str, path: str
) -> None:
    """A template that numbers its images knows those before; of videos no proof is made."""
    template = PICTURED.replace(
        "IMAGE", "{% set ns.shown = ns.shown + 1 %}Image {{ ns.shown }}" if numbered else "Image"
    )
    shown = {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}
    new: Message = {"role": "user", "content": [shown, {"type": "text", "text": " see"}]}
    messages = [new, {"role": "assistant", "content": "one"}, new]
    end = tokenizer.token_to_id("<|im_end|>")
    found = suffix_of(splicer, render_of(template), messages, last_token=end)
    assert isinstance(found, Suffix)
    assert found.path == path
    said = "Image 2 see" if numbered else "Image see"
    assert tokenizer.decode(found.token_ids, skip_special_tokens=False) == (
        f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_probe_names_the_path_of_each_usual_shape(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    assert set(asyncio.run(splicer.probe(render_of(CHATML), options=b"a")).values()) == {"marker"}
    assert set(asyncio.run(splicer.probe(render_of(NUMBERED), options=b"b")).values()) == {"full"}
    assert set(asyncio.run(splicer.probe(render_of(PLAIN_TEXT), options=b"c")).values()) == {
        "cannot_splice:no_end_of_turn_token"
    }


def test_the_cost_of_a_suffix_follows_the_new_messages(
    splicer: Splicer, render_of: Callable[[str], Render], tokenizer: Tokenizer
) -> None:
    inner, rendered = render_of(CHATML), []

    async def counting(messages: Sequence[Message], *, generation_prompt: bool, tools: bool) -> list[int]:
        rendered.append(sum(len(str(message["content"])) for message in messages))
        return await inner(messages, generation_prompt=generation_prompt, tools=tools)

    end = tokenizer.token_to_id("<|im_end|>")
    new: list[Message] = [{"role": "user", "content": "And there?"}]
    long = [*QUESTION, *answered("x" * 100_000, new)]
    suffix_of(splicer, counting, answered("short", new), last_token=end)
    rendered.clear()
    assert isinstance(suffix_of(splicer, counting, long, last_token=end), Suffix)
    assert sum(rendered) < 100
