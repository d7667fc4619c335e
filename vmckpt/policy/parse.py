"""Parse a policy's YAML text into a `Policy`, or report all problems in the text. Pure."""

from pathlib import Path
from typing import assert_never

from vmckpt.errors import PolicyError
from vmckpt.model.migration import AutoConverge
from vmckpt.policy import calendar, validate
from vmckpt.policy.calendar import Interval
from vmckpt.policy.converge_schema import CostForm, DoForm, RuleForm, WhenForm
from vmckpt.policy.model import (
    Auto,
    Compress,
    CopyTo,
    Do,
    GiveUp,
    Keep,
    MoveLimits,
    Pause,
    Policy,
    Proof,
    Protection,
    RaiseDowntime,
    Retries,
    Rule,
    RuleCondition,
    Schedule,
    Select,
    Stall,
    StartPostcopy,
    Storage,
    SwitchCost,
    Throttle,
    Transport,
    period,
)
from vmckpt.policy.schedule_schema import KeepForm, ScheduleForm
from vmckpt.policy.schema import PolicyForm, SelectForm
from vmckpt.policy.values import Plain, TimeUsed
from vmckpt.units import Bytes, Seconds
from vmckpt.util import config_file
from vmckpt.util.config_file import Problem


def examine(
    text: str, path: Path, *, shipped: bool = False
) -> tuple[Policy | None, tuple[Problem, ...]]:
    """Parse a policy's text. Returns the policy without problems, or None and the problems.

    `path` is for messages; nothing is read from it. `shipped`: the policy is shipped with vmckpt.
    """
    reading = config_file.examine(text, PolicyForm, empty_values=False)
    if reading.value is None:
        return None, reading.problems
    given = tuple(reading.lines.all().items())
    policy = _policy(reading.value, str(path), given, shipped=shipped)
    senseless = [
        Problem(reading.lines.of(*one.keys), one.text) for one in validate.complaints(policy)
    ]
    if senseless:
        return None, tuple(sorted(senseless, key=lambda one: one.line))
    return policy, ()


def parse(text: str, path: Path, *, shipped: bool = False) -> Policy:
    """Parse a policy's text; arguments as for `examine`.

    Raises PolicyError with the first problem.
    """
    policy, problems = examine(text, path, shipped=shipped)
    if policy is None:
        raise PolicyError(config_file.first(problems, path))
    return policy


def _policy(
    form: PolicyForm, file: str, given: tuple[tuple[str, int], ...], *, shipped: bool
) -> Policy:
    limits, retries, stall = form.limits, form.retries, form.converge.stall
    transport, storage = form.transport, form.storage
    return Policy(
        name=form.name,
        file=file,
        description=form.description,
        select=_select(form.select),
        mode=form.mode,
        limits=MoveLimits(
            max_downtime=limits.max_downtime,
            bandwidth=limits.bandwidth,
            postcopy_bandwidth=limits.postcopy_bandwidth,
            time=limits.time,
            time_per_gib=limits.time_per_gib,
        ),
        retries=Retries(
            times=retries.times,
            first_wait=retries.first_wait,
            factor=retries.factor,
            longest_wait=retries.longest_wait,
        ),
        stall=Stall(
            window=stall.window,
            margin=stall.margin,
            smoothing=stall.smoothing,
            patience=stall.patience,
        ),
        rules=tuple(_rule(number, rule) for number, rule in enumerate(form.converge.rules, 1)),
        transport=Transport(
            tls=transport.tls,
            connections=transport.connections,
            zero_copy=transport.zero_copy,
            compression=transport.compression,
            compression_level=transport.compression_level,
        ),
        storage=Storage(
            copy=storage.copy_,
            disks=tuple(storage.disks),
            pool=storage.pool,
            left_behind=storage.left_behind,
        ),
        on_failure=form.on_failure,
        recover_for=form.on_postcopy_broken,
        probe=form.forecast.probe,
        protection=Protection(
            interval=form.protect.interval,
            slowdown=form.protect.slowdown,
            max_pause=form.protect.max_pause,
            hold=form.protect.hold,
            failover=form.protect.failover,
            lease=form.protect.lease,
        ),
        evacuation=form.evacuate.read(),
        snapshots=tuple(map(_schedule, form.snapshots)),
        shipped=shipped,
        given=given,
    )


def _select(form: SelectForm | None) -> Select:
    if form is None:
        return Select(by_name_only=True)
    return Select(
        guests=tuple(form.guests or ()),
        guest_labels=tuple(sorted((form.guest_labels or {}).items())),
        host_labels=tuple(sorted((form.host_labels or {}).items())),
        at_least=form.memory.at_least if form.memory else None,
        below=form.memory.below if form.memory else None,
    )


def _schedule(form: ScheduleForm) -> Schedule:
    when: Auto | calendar.When
    if form.at is not None:
        when, text = form.at.when, form.at.text
    elif form.every is not None:
        when, text = Interval(form.every), f"every {period(form.every)}"
    else:
        when, text = Auto(Seconds(form.failure)), "every auto"
    verify = form.verify
    return Schedule(
        name=form.name,
        when=when,
        text=text,
        keep=_keep(form.keep),
        memory=form.memory,
        group=form.group,
        store=form.store,
        copies=tuple(CopyTo(store=one.to, keep=_keep(one.keep)) for one in form.copies),
        verify=None if verify is None else Proof(every=verify.every, depth=verify.depth),
    )


def _keep(form: KeepForm | None) -> Keep:
    return Keep() if form is None else Keep(**form.model_dump())


def _rule(number: int, form: RuleForm) -> Rule:
    return Rule(name=form.name or f"rule {number}", when=_when(form.when), do=_do(form.do))


def _when(form: WhenForm) -> RuleCondition:
    used = form.time_used or TimeUsed()
    return RuleCondition(
        iteration=form.iteration,
        stalled_for=form.stalled_for,
        dirty_over_bandwidth=form.dirty_over_bandwidth,
        precopy_excess=form.precopy_excess,
        lowest_cost=_cost(form.lowest_cost),
        expected_downtime_above=form.expected_downtime_above,
        expected_downtime_below=form.expected_downtime_below,
        time_used=used.time,
        time_share=used.share,
        remaining_above=form.remaining_above,
        remaining_below=form.remaining_below,
    )


def _cost(form: CostForm | None) -> SwitchCost | None:
    return None if form is None else SwitchCost(**form.model_dump())


def _do(form: Plain | DoForm) -> Do:
    match form:
        case Plain.START_POSTCOPY:
            return StartPostcopy()
        case Plain.PAUSE:
            return Pause()
        case Plain.ABORT:
            return GiveUp()
        case DoForm(raise_downtime=raised) if raised is not None:
            return RaiseDowntime(by=raised.by, to=raised.to)
        case DoForm(auto_converge=how) if how is not None:
            return Throttle(
                AutoConverge(initial=how.initial, increment=how.increment, at_most=how.at_most)
            )
        case DoForm(compress=how) if how is not None:
            return Compress(Bytes(how.cache))
        case DoForm():  # the form refuses an empty action
            raise AssertionError(form)
        case _:
            assert_never(form)
