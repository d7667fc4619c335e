"""Decide what to do next about a running migration. Pure.

`decide` is called at every sample. The first item that applies wins:

1. after the switch to post-copy: nothing; `postcopy_recovery` handles a broken stream
2. the operator's request to stop
3. once the guest is paused: nothing, since stopping would make the pause pointless; if no data
   moves for 10 s, the migration is aborted
4. the time limit: the migration is aborted and the guest stays on the source
5. mode post-copy: the switch, as soon as memory is being sent, so that each page is sent once
6. the policy's rules, in order. Each rule acts once, `raise_downtime` once per pass. A refused
   action is repeated after a short wait; later rules are evaluated meanwhile

Rules neither switch nor pause while no data is moving: the guest would have to fetch its memory
over a link that may be dead.
"""

from dataclasses import dataclass, field, replace

from vmckpt.migration.forecast.dirty_curve import course
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetDowntime,
    SetThrottle,
    SetXbzrleCache,
    Stop,
    SwitchToPostcopy,
)
from vmckpt.migration.run.progress import PassHistory
from vmckpt.migration.run.switch_moment import Network, PassNow, best_now
from vmckpt.model.migration import JobPhase, Mode
from vmckpt.policy.model import (
    Compress,
    Do,
    GiveUp,
    Pause,
    Policy,
    RaiseDowntime,
    Rule,
    RuleCondition,
    StartPostcopy,
    SwitchCost,
    Throttle,
)
from vmckpt.units import GIB, Bytes, Seconds, show_bytes, show_seconds

# No data for this long means a dead link, not a slow one.
_SILENT = Seconds(2.0)
# A guest that was paused for the switchover waits at most this long for a dead link.
_STANDS_IN_VAIN = Seconds(10.0)
# A refused action is not tried again sooner than this.
_REFUSED = Seconds(2.0)

Numbers = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """The limits of a migration: its policy, and what the guest and the hosts support."""

    policy: Policy
    mode: Mode
    """Never AUTO, which the plan replaces with another mode."""
    memory: Bytes
    """Memory of the guest; 0 for a resumed post-copy."""
    post_copy: bool
    """Whether the migration was started with post-copy enabled."""
    time_limit: Seconds | None
    """Time after which the migration is aborted; None if there is no limit."""
    max_downtime: Seconds
    """Downtime limit at the start; rules may raise this limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedActions:
    """The actions taken so far."""

    max_downtime: Seconds
    fired: frozenset[str] = field(default_factory=frozenset)
    raised_in: int = 0
    """The pass in which the downtime limit was last raised; 0: never."""
    waits: str | None = None
    """The rule that has been waiting for a good moment to switch since `waits_since`, or None."""
    waits_since: Seconds = Seconds(0.0)
    switched: bool = False
    paused: bool = False
    refused: tuple[tuple[str, Seconds], ...] = ()
    """Rules whose action was refused, each with the time of the refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An action, with its rule, its reason and the numbers on which the decision is based."""

    action: Action
    rule: str
    reason: str
    """One or more clauses; shown after "because"."""
    numbers: Numbers


def time_limit(policy: Policy, memory: Bytes) -> Seconds | None:
    """Return the policy's shortest time limit for a guest of this size; None if there is no limit.

    A guest of less than one GiB counts as one GiB.
    """
    limits = [policy.limits.time] if policy.limits.time is not None else []
    if policy.limits.time_per_gib is not None:
        limits.append(Seconds(policy.limits.time_per_gib * max(1.0, memory / GIB)))
    return min(limits, default=None)


def decide(
    terms: RunTerms, track: PassHistory, done: AppliedActions, *, now: Seconds, operator_stops: bool
) -> tuple[Verdict | None, AppliedActions]:
    """Return the next action (None: do nothing), and the applied actions after it succeeds.

    `now`: the time on the clock of the samples.
    """
    if done.switched or (track.last is not None and track.last.phase is JobPhase.POST_COPY):
        return None, done
    numbers = _numbers(track, done, now)
    ends = _ends(terms, track, done, now, operator_stops)
    if ends is not None:
        return _verdict(*ends, numbers), done
    if track.last is None or done.paused:
        return None, done
    if terms.mode is Mode.POSTCOPY and track.iteration > 0 and _could("mode", track, done, now):
        reason = "the mode is postcopy, and memory is being sent"
        return _verdict(SwitchToPostcopy(), "mode", reason, numbers), replace(done, switched=True)
    for rule in terms.policy.rules:
        if not _may(rule, terms, track, done, now):
            continue
        why = _holds(rule.when, terms, track, done, now)
        if why is None:
            continue
        if _waits(rule, terms, track, done, now):
            return None, _waiting(done, rule, now)
        action, after = _act(rule.do, rule.name, track, done)
        return _verdict(action, rule.name, why, numbers), after
    return None, replace(done, waits=None)


def _ends(
    terms: RunTerms, track: PassHistory, done: AppliedActions, now: Seconds, operator_stops: bool
) -> tuple[Abort, str, str] | None:
    """Return action, rule and reason if the migration must be stopped regardless of the rules.

    None if it need not be stopped.
    """
    if operator_stops:
        return Abort(Stop.OPERATOR), "operator", "the operator stopped the migration"
    begun = track.last is not None and track.last.iteration > 0
    if done.paused or (terms.mode is Mode.STOP_AND_COPY and begun):
        # The time limit does not apply to a paused guest, but a dead link aborts the migration.
        if track.silent_for(now) < _STANDS_IN_VAIN:
            return None
        return Abort(Stop.RULE), "pause", "the guest is paused and no data is moving"
    limit = terms.time_limit
    if limit is None or now - track.began < limit:
        return None
    reason = f"the migration was not complete within the time limit of {show_seconds(limit)}"
    return Abort(Stop.TIME_LIMIT), "time limit", reason


def _verdict(action: Action, rule: str, reason: str, numbers: Numbers) -> Verdict:
    return Verdict(action=action, rule=rule, reason=reason, numbers=numbers)


def _may(
    rule: Rule, terms: RunTerms, track: PassHistory, done: AppliedActions, now: Seconds
) -> bool:
    """Return whether the rule could act now."""
    switching = track.last is not None and track.last.phase is JobPhase.SWITCHOVER
    if _held(rule.name, done, now) or (switching and not isinstance(rule.do, GiveUp)):
        return False
    match rule.do:
        case RaiseDowntime():
            return track.iteration > done.raised_in and done.max_downtime < rule.do.to
        case StartPostcopy():
            return terms.post_copy and _could(rule.name, track, done, now)
        case Pause():
            return rule.name not in done.fired and _could(rule.name, track, done, now)
        case Throttle() | Compress() | GiveUp():
            return rule.name not in done.fired


def _could(rule: str, track: PassHistory, done: AppliedActions, now: Seconds) -> bool:
    """Return whether a rule may switch to post-copy or pause the guest now.

    It may not if no data has moved since the previous sample, or if its action was refused a short
    time ago.
    """
    lately = track.last is not None and track.moved_at == track.last.at
    return lately and track.silent_for(now) < _SILENT and not _held(rule, done, now)


def _held(rule: str, done: AppliedActions, now: Seconds) -> bool:
    return any(name == rule and now - at < _REFUSED for name, at in done.refused)


def refused(done: AppliedActions, rule: str, now: Seconds) -> AppliedActions:
    """Return the state after the action of the rule named `rule` was refused at `now`."""
    others = tuple(one for one in done.refused if one[0] != rule)
    return replace(done, refused=(*others, (rule, now)))


def _waits(
    rule: Rule, terms: RunTerms, track: PassHistory, done: AppliedActions, now: Seconds
) -> bool:
    """Return whether a switch after a stall should wait for a pass that begins with less data."""
    if rule.when.stalled_for is None or not isinstance(rule.do, StartPostcopy | Pause):
        return False
    stall = terms.policy.stall
    since = done.waits_since if done.waits == rule.name else now
    return now - since < stall.patience and not track.at_a_low(stall.margin)


def _waiting(done: AppliedActions, rule: Rule, now: Seconds) -> AppliedActions:
    return done if done.waits == rule.name else replace(done, waits=rule.name, waits_since=now)


def _act(
    do: Do, name: str, track: PassHistory, done: AppliedActions
) -> tuple[Action, AppliedActions]:
    fired = replace(done, fired=done.fired | {name}, waits=None)
    match do:
        case RaiseDowntime():
            limit = Seconds(min(do.to, round(done.max_downtime + do.by, 3)))
            return SetDowntime(limit), replace(fired, max_downtime=limit, raised_in=track.iteration)
        case Throttle():
            return SetThrottle(do.how), fired
        case Compress():
            return SetXbzrleCache(do.cache), fired
        case StartPostcopy():
            return SwitchToPostcopy(), replace(fired, switched=True)
        case Pause():
            return PauseGuest(), replace(fired, paused=True)
        case GiveUp():
            return Abort(Stop.RULE), fired


def excess(track: PassHistory, done: AppliedActions) -> float | None:
    """Return how much more data is sent by completing pre-copy than by switching now.

    As a fraction of the first pass; infinite if pre-copy does not converge; None before the second
    pass, or if the bandwidth is unknown.
    """
    if len(track.passes) < 2 or not track.bandwidth:
        return None
    ahead = course(track.curve, track.passes[-1].size, track.bandwidth, done.max_downtime)
    if not ahead.converges:
        return float("inf")
    return ahead.resent / track.sent_in(0)


def _holds(
    when: RuleCondition, terms: RunTerms, track: PassHistory, done: AppliedActions, now: Seconds
) -> str | None:
    """Return why all conditions hold, as clauses that follow "because"; None if one does not."""
    words: list[str] = []
    for holds in _conditions(when, terms, track, done, now):
        if holds is None:
            return None
        words.append(holds)
    if len(words) < 2:
        return words[0] if words else "the rule has no conditions"
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def _conditions(
    when: RuleCondition, terms: RunTerms, track: PassHistory, done: AppliedActions, now: Seconds
) -> list[str | None]:
    """Return, for each condition in `when`, a description if it holds, otherwise None."""
    found: list[str | None] = []
    if when.iteration is not None:
        found.append(_least(track.iteration, when.iteration, f"pass {track.iteration} has begun"))
    if when.stalled_for is not None:
        stood = track.stalled_for(now, terms.policy.stall)
        held = stood > 0 and stood >= when.stalled_for
        found.append(f"there was no progress for {show_seconds(stood)}" if held else None)
    if when.dirty_over_bandwidth is not None:
        ratio = track.shrink
        found.append(
            _least(
                ratio, when.dirty_over_bandwidth, f"a pass leaves {ratio or 0:.0%} of what it sent"
            )
        )
    if when.precopy_excess is not None:
        found.append(_excess(when.precopy_excess, track, done))
    if when.lowest_cost is not None:
        found.append(_lowest_cost(when.lowest_cost, terms, track, done))
    if when.expected_downtime_above is not None or when.expected_downtime_below is not None:
        found.append(_expected(when, track))
    if when.time_used is not None:
        used = Seconds(now - track.began)
        found.append(_least(used, when.time_used, f"{show_seconds(used)} have elapsed"))
    if when.time_share is not None:
        share = 0.0 if terms.time_limit is None else (now - track.began) / terms.time_limit
        found.append(_least(share, when.time_share, f"{share:.0%} of the time limit is used"))
    if when.remaining_above is not None or when.remaining_below is not None:
        found.append(_remaining(when, track))
    return found


def _least(value: float | None, bound: float, words: str) -> str | None:
    return words if value is not None and value >= bound else None


def _excess(bound: float, track: PassHistory, done: AppliedActions) -> str | None:
    more = excess(track, done)
    if more is None or more < bound:
        return None
    if more == float("inf"):
        return f"pre-copy never reaches a downtime of {show_seconds(done.max_downtime)}"
    return f"completing pre-copy would resend {more:.0%} of the first pass"


def _lowest_cost(
    weights: SwitchCost, terms: RunTerms, track: PassHistory, done: AppliedActions
) -> str | None:
    """Return why a switch to post-copy now costs least; None if it does not, or this is unknown.

    Without a measurement of the guest's writes, the cost is unknown in the first pass.
    """
    if track.last is None or not track.passes or not track.bandwidth or not track.curve.points:
        return None
    here, allowed = track.passes[-1], terms.policy.limits.postcopy_bandwidth
    # Zero pages count as remaining, but cost almost nothing. All of them are in the first pass.
    used = min(1.0, track.curve.in_use / max(1, here.size)) if here.number == 1 else 1.0
    now = best_now(
        track.curve,
        PassNow(
            size=used * here.size, left=used * track.last.remaining,
            elapsed=Seconds(track.last.at - here.began),
        ),
        Network(precopy=track.bandwidth, postcopy=min(track.bandwidth, allowed or track.bandwidth)),
        done.max_downtime,
        weights,
    )  # fmt: skip
    if now is None:
        return None
    return (
        f"a switch now costs least: {show_seconds(now.postcopy)} in post-copy,"
        f" {show_seconds(now.lost)} of the guest's work lost"
    )


def _expected(when: RuleCondition, track: PassHistory) -> str | None:
    expected = track.downtime
    if expected is None:
        return None
    above, below = when.expected_downtime_above, when.expected_downtime_below
    if (above is not None and expected < above) or (below is not None and expected > below):
        return None
    return f"the expected downtime is {show_seconds(expected)}"


def _remaining(when: RuleCondition, track: PassHistory) -> str | None:
    if track.last is None or not track.last.iteration:
        return None
    left, above, below = track.last.remaining, when.remaining_above, when.remaining_below
    if (above is not None and left < above) or (below is not None and left > below):
        return None
    return f"{show_bytes(left)} remain to be sent"


def _numbers(track: PassHistory, done: AppliedActions, now: Seconds) -> Numbers:
    """Return the numbers behind a decision, for the journal and for reports."""
    last = track.last
    ratio, expected, more = track.shrink, track.downtime, excess(track, done)
    return {
        "elapsed_s": round(now - track.began, 3),
        "iteration": track.iteration,
        "remaining": last.remaining if last else None,
        "bandwidth": track.bandwidth,
        "dirty_rate": last.dirty_rate if last else None,
        "dirty_over_bandwidth": None if ratio is None else round(ratio, 3),
        "expected_downtime_ms": None if expected is None else round(expected * 1000, 1),
        "max_downtime_ms": round(done.max_downtime * 1000, 1),
        "precopy_excess": None if more is None else (round(more, 3) if more < 1e9 else "endless"),
    }


def after(done: AppliedActions, action: Action) -> AppliedActions:
    """Return the state after the operator's action was taken."""
    match action:
        case SetDowntime(limit):
            return replace(done, max_downtime=limit)
        case SwitchToPostcopy():
            return replace(done, switched=True)
        case PauseGuest():
            return replace(done, paused=True)
        case SetThrottle() | SetXbzrleCache() | LimitBandwidth() | Abort():
            return done
