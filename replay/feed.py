"""The micro-batches of a run in their order, and the place in it as two numbers.

Knows steps and micro-batches by their numbers; does not know what a micro-batch is, nor what consumes it.
Law: what is handed out next is a pure function of (the function given, step, micro-batch). A feed resumed from a state
hands out what the feed that gave the state would have, and nothing else has to be kept.

    feed = Feed(lambda step: packs(plans[step], rows, advantages, rank=rank), steps=len(plans))
    while feed.step < len(plans):
        train_step(model, optimizer, feed.take_step())
        save(model, optimizer, feed.state_dict())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from replay.errors import PlanMismatch

Item = TypeVar("Item")


class Feed(Generic[Item]):
    """Iterates over the micro-batches of all steps; `take_step` hands out a step at once.

    >>> feed = Feed(lambda step: [f"{step}a", f"{step}b"], steps=2)
    >>> next(feed), feed.state_dict()
    ('0a', {'step': 0, 'micro_batch': 1})
    >>> resumed = Feed(lambda step: [f"{step}a", f"{step}b"], steps=2)
    >>> resumed.load_state_dict(feed.state_dict())
    >>> resumed.take_step(), list(resumed)
    (['0b'], ['1a', '1b'])
    """

    def __init__(self, micro_batches: Callable[[int], Sequence[Item]], *, steps: int) -> None:
        """A feed at the start of its run.

        Args:
            micro_batches: the micro-batches of a step, from its number: the same ones whenever it is asked.
            steps: of the run; the first is step 0.
        """
        self._micro_batches = micro_batches
        self._steps = steps
        self._step = 0
        self._micro_batch = 0
        self._at_hand: Sequence[Item] | None = None

    @property
    def step(self) -> int:
        """The step that the next micro-batch belongs to; the number of steps once all are handed out."""
        return self._step

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        step = self._current()
        if not step:
            raise StopIteration
        item = step[self._micro_batch]
        self._micro_batch += 1
        if self._micro_batch == len(step):
            self._turn()
        return item

    def take_step(self) -> list[Item]:
        """What is left of the current step, all at once; nothing at the end of the run."""
        rest = list(self._current()[self._micro_batch :])
        self._turn()
        return rest

    def state_dict(self) -> dict[str, int]:
        """Which micro-batch comes next."""
        return {"step": self._step, "micro_batch": self._micro_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where the feed that gave this state stood."""
        step, micro_batch = state["step"], state["micro_batch"]
        if not 0 <= step <= self._steps or micro_batch < 0:
            raise PlanMismatch(
                f"the state of step {step}, micro-batch {micro_batch},", f"is not of {self._steps} steps"
            )
        self._step, self._micro_batch, self._at_hand = step, micro_batch, None

    def _current(self) -> Sequence[Item]:
        """The micro-batches of the first step from here that has any; none at the end of the run."""
        while self._step < self._steps:
            if self._at_hand is None:
                self._at_hand = self._micro_batches(self._step)
            if self._micro_batch < len(self._at_hand):
                return self._at_hand
            if self._micro_batch:
                raise PlanMismatch(
                    f"micro-batch {self._micro_batch} of step {self._step}",
                    f"was next when the state was saved, and the step has {len(self._at_hand)} now",
                )
            self._turn()
        return ()

    def _turn(self) -> None:
        self._step, self._micro_batch, self._at_hand = min(self._step + 1, self._steps), 0, None
