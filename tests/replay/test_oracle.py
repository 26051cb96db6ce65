"""The rows of a log train what its calls, taken one by one, would: in double precision, on a model whose state depends
on all that came before.

The oracle knows events only. Each model call is a sequence of its own: the prompt as the model saw it, then what was
sampled; the gradient flows through the sampled tokens. The loss is summed over all calls and divided by their sampled
tokens. What is under test is everything between the log and the loss: rows, shared calls, plan, packs and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from replay.advantage import advantages
from replay.loss import Targets, policy_loss
from replay.objective import Clip, Correction
from replay.pack import Pack, packs
from replay.plan import plan
from replay.row import Row
from replay.rowset import RowSet, build
from store.events import CallCompleted, Event, RolloutOpened, RolloutScored, logprob_array, logprob_bytes, uuid7
from store.events import token_array as tokens_of

Remember = Callable[[Engine, Iterable[Event]], None]
CLIP = Clip(low=0.2, high=0.3)
NONE, TOKEN = Correction(), Correction(kind="token", cap=1.1)
CPU = torch.device("cpu")


class Recurrent:
    """A tiny recurrent language model in double precision; a token is known to it by its remainder."""

    vocabulary, width = 13, 6

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.double).div(2).requires_grad_()

        self.parameters = [weights(13, 6), weights(6, 6), weights(6, 13)]

    def logprobs(self, token_ids: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        """Log-probability of every token but the first, given those before: [T - 1]."""
        embedding, recurrence, output = self.parameters
        known = torch.from_numpy(token_ids.astype(np.int64) % self.vocabulary)
        state = torch.zeros(self.width, dtype=torch.double)
        states = []
        for vector in embedding[known[:-1]]:
            state = torch.tanh(vector + state @ recurrence)
            states.append(state)
        return (torch.stack(states) @ output).log_softmax(-1).gather(1, known[1:, None])[:, 0]

    def gradient(self, loss: torch.Tensor) -> npt.NDArray[np.float64]:
        parts = torch.autograd.grad(loss, self.parameters)
        return torch.cat([part.flatten() for part in parts]).numpy()


Step = tuple[float, npt.NDArray[np.float64]]


def oracle(
    model: Recurrent, calls: Sequence[CallCompleted], rewards: Mapping[str, float], correction: Correction
) -> Step:
    """Loss and gradient of the calls one by one, written out in full."""
    baseline = sum(rewards.values()) / len(rewards)
    whole: dict[object, npt.NDArray[np.int32]] = {None: np.empty(0, np.int32)}
    total = torch.zeros((), dtype=torch.double)
    for call in calls:
        whole[call.call_id] = np.concatenate([whole[call.parent_id], tokens_of(call.token_ids)])
        own = model.logprobs(whole[call.call_id])[call.prompt_len - 1 :]
        advantage = float(np.float32(rewards[call.rollout_id] - baseline))  # a pack's advantages are float32
        for logprob, behaviour in zip(own, logprob_array(call.logprobs), strict=True):
            ratio = (logprob - float(behaviour)).exp()
            if correction.kind == "none":
                total -= torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP.low, 1 + CLIP.high) * advantage)
            else:
                weight = min(float(ratio.detach()), correction.cap)
                total -= weight * advantage * ratio / ratio.detach()
    loss = total / sum(call.sampled_len for call in calls)
    return float(loss.detach()), model.gradient(loss)


def step(
    model: Recurrent,
    rows: Sequence[Row],
    by_rollout: Mapping[str, float],
    *,
    budget: int = 40,
    correction: Correction = NONE,
    count: int | None = None,
) -> Step:
    """Loss and gradient of the rows as the trainer computes them; `count` is a denominator to corrupt it with."""
    largest = max(budget, *(row.length for row in rows))
    feed = packs(plan(rows, seed=0, step=0, token_budget=largest), rows, by_rollout)
    losses = [policy_loss(_over(model, each), Targets.of(each, CPU), clip=CLIP, correction=correction) for each in feed]
    total = torch.stack([loss.total for loss in losses]).sum()
    tokens = sum(int(loss.tokens) for loss in losses)
    loss = total / (count or tokens)
    return float(loss.detach()), model.gradient(loss)


def _over(model: Recurrent, packed: Pack) -> torch.Tensor:
    pieces = []
    for start, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        pieces.append(model.logprobs(np.append(packed.tokens[start:end], packed.labels[end - 1])))
    return torch.cat(pieces)


def recorded(
    database: Engine, remember: Remember, model: Recurrent, forests: Sequence[list[CallCompleted]]
) -> tuple[list[CallCompleted], dict[str, float], RowSet]:
    """A group of rollouts in a log, with log-probabilities of a policy that is near the model: calls, rewards, rows."""
    source = np.random.default_rng(7)
    calls: list[CallCompleted] = []
    whole: dict[object, npt.NDArray[np.int32]] = {None: np.empty(0, np.int32)}
    for call in (call for forest in forests for call in forest):
        whole[call.call_id] = np.concatenate([whole[call.parent_id], tokens_of(call.token_ids)])
        own = model.logprobs(whole[call.call_id]).detach().numpy()[call.prompt_len - 1 :]
        drifted = own + 0.3 * source.standard_normal(call.sampled_len)
        calls.append(call.model_copy(update={"logprobs": logprob_bytes(drifted.astype(np.float32))}))
    rewards = {forest[0].rollout_id: [0.0, 2.0, 10.0][number] for number, forest in enumerate(forests)}
    opened = [RolloutOpened(rollout_id=name, group_id="g", opened_at=at) for at, name in enumerate(rewards)]
    scored = [
        RolloutScored(outcome_id=uuid7(0, name.encode().ljust(10)), rollout_id=name, reward=reward, at=0)
        for name, reward in rewards.items()
    ]
    remember(database, [*opened, *calls, *scored])
    return calls, rewards, build(database)


def apart(found: Step, expected: Step) -> tuple[float, float]:
    """Largest difference of the loss and of the gradient, relative to the largest that is expected."""
    loss = abs(found[0] - expected[0]) / max(abs(expected[0]), 1e-12)
    gradient = np.abs(found[1] - expected[1]).max() / max(np.abs(expected[1]).max(), 1e-12)
    return float(loss), float(gradient)


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[list[int | None], list[tuple[int, int]]]]:
    """Up to three rollouts of up to six calls: roots anywhere (rewrites), several children of one call (branches)."""
    lengths = st.tuples(st.integers(1, 4), st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(2, 3))):
        size = draw(st.integers(1, 6))
        above = [draw(st.none() | st.integers(0, index - 1)) if index else None for index in range(size)]
        found.append((above, draw(st.lists(lengths, min_size=size, max_size=size))))
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=forests(), budget=st.integers(1, 60), correction=st.sampled_from([NONE, TOKEN]))
def test_rows_train_what_the_calls_one_by_one_do(
    fresh_log: Any,
    remember: Remember,
    grow: Any,
    make_chain_maker: Any,
    shapes: list[tuple[list[int | None], list[tuple[int, int]]]],
    budget: int,
    correction: Correction,
) -> None:
    model = Recurrent()
    grown = [
        grow(make_chain_maker(number), parents, lengths=lengths, rollout_id=f"r{number}")
        for number, (parents, lengths) in enumerate(shapes)
    ]
    with fresh_log() as database:
        calls, rewards, found = recorded(database, remember, model, grown)
    assert found.refusals.by_reason() == {}
    ours = step(model, found.rows, advantages(found.scores), budget=budget, correction=correction)
    expected = oracle(model, calls, rewards, correction)
    assert abs(ours[0] - expected[0]) < 1e-9
    assert np.abs(ours[1] - expected[1]).max() < 1e-9


@pytest.fixture
def example(
    sqlite_database: Engine, remember: Remember, grow: Any, make_chain_maker: Any
) -> tuple[Recurrent, list[CallCompleted], dict[str, float], RowSet]:
    """A fork and a rewrite, a rewrite, a single call: 3 + 2 + 1 rows, the first of calls 1 and 2."""
    model = Recurrent()
    shapes: list[list[int | None]] = [[None, 0, 0, None, 3], [None, 0, None], [None]]
    grown = [grow(make_chain_maker(n), parents, rollout_id=f"r{n}") for n, parents in enumerate(shapes)]
    return model, *recorded(sqlite_database, remember, model, grown)


def reordered(rows: Sequence[Row], calls: Sequence[CallCompleted]) -> list[Row]:
    """The first row's two deltas the wrong way round, with their masks and log-probabilities."""
    cut = calls[0].chain_len
    arrays = {name: getattr(rows[0], name) for name in ("token_ids", "loss_mask", "logprobs")}
    return [replace(rows[0], **{name: np.roll(array, -cut) for name, array in arrays.items()}), *rows[1:]]


def twice(rows: Sequence[Row], calls: Sequence[CallCompleted]) -> list[Row]:
    """The call that the first two rows share trains in both."""
    mask = rows[1].loss_mask.copy()
    mask[calls[0].prompt_len : calls[0].chain_len] = True
    return [rows[0], replace(rows[1], loss_mask=mask), *rows[2:]]


def test_each_corruption_changes_loss_and_gradient(
    example: tuple[Recurrent, list[CallCompleted], dict[str, float], RowSet],
) -> None:
    model, calls, rewards, found = example
    rows, by_rollout = found.rows, advantages(found.scores)
    assert [row.call_numbers for row in rows] == [(1, 2), (1, 3), (4, 5), (1, 2), (3,), (1,)]
    expected = oracle(model, calls, rewards, NONE)
    of_rollout = {name: sum(row.rollout_id == name for row in rows) for name in rewards}
    shared = {name: advantage / of_rollout[name] for name, advantage in by_rollout.items()}
    differences = {
        "rows": apart(step(model, rows, by_rollout), expected),
        "history reordered": apart(step(model, reordered(rows, calls), by_rollout), expected),
        "call trained twice": apart(step(model, twice(rows, calls), by_rollout), expected),
        "advantage scaled by row count": apart(step(model, rows, shared), expected),
        "rows as the denominator": apart(step(model, rows, by_rollout, count=len(rows)), expected),
    }
    print({name: f"loss {loss:.1e} gradient {gradient:.1e}" for name, (loss, gradient) in differences.items()})
    assert max(differences.pop("rows")) < 1e-9
    assert {name: min(changed) > 1e-3 for name, changed in differences.items()} == dict.fromkeys(differences, True)
