"""Errors of the replay engine, one class per choice a caller can make.

    ReplayError
    ├── UnknownQuery        no .sql file of that name is shipped
    ├── UnknownRule         no selection rule of that name and version
    ├── UnknownRollout      a filter names a rollout that the log does not hold
    ├── BadPosition         a text is not a position
    ├── PositionAhead       the log has not reached the position asked for
    ├── BadPolicy           a part of a history policy has a value that it cannot have
    ├── NothingToDraw       a history policy leaves nothing to draw from
    ├── BadRun              a part of a run has a value that it cannot have
    ├── BadPlan             a JSON value is no step plan
    ├── OtherRun            a saved place belongs to another run
    ├── StepRecorded        a step is in the log already, with other rows
    ├── UnknownRow          a row did not train in the step that is asked for
    ├── FileUnwritable      an export's file cannot be written
    ├── ArchiveUnavailable  the place of an archive cannot be reached, or nothing is sealed there
    ├── ArchiveDamaged      a file of an archive is missing, or not the one that was sealed
    ├── SealTaken           another run sealed at the same time
    ├── OtherLog            an archive holds the events of another log
    ├── WorkerLost          a process that made rows ended
    ├── NotArchived         what would be dropped from a log is not whole in its archive
    ├── PlanMismatch        rows and plan, or rows and advantages, do not belong together
    ├── NothingToTrain      a training step without one trained token
    └── TrainerSetup        the trainer is configured so that a step would not be what turnlog promises

What is wrong with recorded data is not an error but a counted `replay.chain.Refusal`: the other rollouts go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class ReplayError(Exception):
    """Base of every error that replay raises."""


class UnknownQuery(ReplayError):
    """No shipped query has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(f"no query is named {name!r}: use one of {', '.join(sorted(known))}")


class UnknownRule(ReplayError):
    """No selection rule has this name and version."""

    def __init__(self, rule: str, version: int, known: Iterable[str]) -> None:
        self.rule = rule
        self.version = version
        super().__init__(
            f"no selection rule is named {rule!r} version {version}: use one of {', '.join(sorted(known))}"
        )


class UnknownRollout(ReplayError):
    """A filter names a rollout that is not in the log at this position."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        super().__init__(
            f"rollout {rollout_id!r} is not in the log at this position: check its spelling and TURNLOG_URL"
        )


class BadPosition(ReplayError):
    """A text does not name a position."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text!r} is not a position: give the one that an earlier replay printed, such as 60.5.5.0")


class PositionAhead(ReplayError):
    """Rows were asked for as of a position that the log has not reached."""

    def __init__(self, *, asked: str, reached: str) -> None:
        self.asked = asked
        self.reached = reached
        super().__init__(
            f"rows as of {asked}, but the log has reached {reached}: ask for a position it has, or read the right log"
        )


class BadPolicy(ReplayError):
    """A part of a history policy has a value that it cannot have."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        self.part = part
        self.value = value
        super().__init__(f"the policy's {part} {value!r} {rule}")


class NothingToDraw(ReplayError):
    """A history policy leaves no rollout to draw."""

    def __init__(self, left_out: Mapping[str, int]) -> None:
        self.left_out = left_out
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "the log has no rows"
        super().__init__(f"the policy leaves no rollout to draw ({why}): widen it, or wait for new rollouts")


class BadRun(ReplayError):
    """A part of a run has a value that it cannot have."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        self.part = part
        self.value = value
        super().__init__(f"the run's {part} {value!r} {rule}")


class BadPlan(ReplayError):
    """A JSON value is no step plan."""

    def __init__(self, part: str, why: str) -> None:
        self.part = part
        super().__init__(f"{part or 'the value'} is not of a step plan ({why}): give what `StepPlan.as_json` wrote")


class OtherRun(ReplayError):
    """A place was saved by another run, or by another rank of it."""

    def __init__(self, part: str, saved: object, here: object) -> None:
        self.part = part
        self.saved = saved
        super().__init__(
            f"the place was saved with {part} {saved!r}, here it is {here!r}: batches would not be the ones that "
            "come next, so go on with the run as it was saved beside the checkpoint"
        )


class StepRecorded(ReplayError):
    """A training step is in the log already, with other rows."""

    def __init__(self, run: str, step: int, why: str) -> None:
        self.run = run
        self.step = step
        super().__init__(
            f"step {step} of run {run!r} is in the log already and {why}: a step is trained once, "
            "so go on with the step after the run's last, or give the run another name"
        )


class UnknownRow(ReplayError):
    """The log does not say that this row trained in this step."""

    def __init__(self, run: str, step: int, row_id: str) -> None:
        self.run = run
        self.step = step
        self.row_id = row_id
        super().__init__(
            f"row {row_id!r} did not train in step {step} of run {run!r}: list the rows that did with "
            '`turnlog sql "select run, step, row_id from trained_row"`'
        )


class FileUnwritable(ReplayError):
    """The file of an export cannot be written."""

    def __init__(self, file: str, cause: str) -> None:
        self.file = file
        super().__init__(f"{file!r} cannot be written ({cause}): name a file in a folder that exists and takes writes")


class ArchiveUnavailable(ReplayError):
    """The place of an archive cannot be reached, or holds none."""

    def __init__(self, url: str, cause: str) -> None:
        self.url = url
        super().__init__(
            f"archive {url!r} cannot be used ({cause}): check TURNLOG_ARCHIVE or --archive; "
            "`turnlog archive --before DATE --to URL` makes one"
        )


class ArchiveDamaged(ReplayError):
    """A file of the archive is missing, or is not the one that was sealed."""

    def __init__(self, url: str, path: str, why: str) -> None:
        self.url = url
        self.path = path
        super().__init__(f"{path!r} of archive {url!r} {why}: restore it from a copy of the archive")


class SealTaken(ReplayError):
    """Another run sealed into the same archive at the same time."""

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        super().__init__(
            f"{path!r} of archive {url!r} was written by another run meanwhile, so this one sealed nothing: "
            "run it again"
        )


class OtherLog(ReplayError):
    """The archive holds another event under a sequence of this log."""

    def __init__(self, url: str, table: str, sequence: int) -> None:
        self.url = url
        super().__init__(
            f"{table} {sequence} of the log is another event in archive {url!r}: an archive belongs to one log and its "
            "copies, so name another place"
        )


class WorkerLost(ReplayError):
    """A process of a pool ended while it was at work."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(
            f"a process that made rows ended with code {code}: if the system ended it for want of memory (code -9), "
            "use fewer processes"
        )


class NotArchived(ReplayError):
    """Events that would be dropped are not in the archive as they are in the log."""

    def __init__(self, what: str, url: str, why: str) -> None:
        self.what = what
        super().__init__(
            f"{what} stays: {why} in archive {url!r}; run `turnlog archive` with a later --before, "
            "and drop it when its rollouts are finished and sealed"
        )


class PlanMismatch(ReplayError):
    """Two values that must come from the same rows do not."""

    def __init__(self, what: str, why: str) -> None:
        self.what = what
        super().__init__(f"{what} {why}: build plan, packs and advantages from the same rows")


class NothingToTrain(ReplayError):
    """No rank's packs train a token."""

    def __init__(self) -> None:
        super().__init__("the packs of all ranks train no token: plan a step over rows that fit the token budget")


class TrainerSetup(ReplayError):
    """The trainer's configuration breaks a promise of the training step."""

    def __init__(self, setting: str, found: object, remedy: str) -> None:
        self.setting = setting
        self.found = found
        super().__init__(f"{setting} is {found!r}: {remedy}")
