"""Turn the answers of a target into findings, one for each device and kind of resource. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from vmckpt.definition.host_resources import CHECKS, Kind
from vmckpt.definition.needs import Answer, Answers, Resource
from vmckpt.errors import some
from vmckpt.model.finding import Finding, Severity

_MOST = 8
"""Maximum number of resources that one finding names."""
_START = {
    Kind.POOL: "run virsh pool-start {name} on {target}",
    Kind.NETWORK: "run virsh net-start {name} on {target}",
}
_NO_VALUE_HINT = "run virsh secret-set-value {name} --file FILE on {target}"
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def missing(
    wanted: Iterable[Resource], answers: Answers, *, guest: str, source: str, target: str
) -> tuple[Finding, ...]:
    """Return a finding for each device and kind of resource that the target cannot provide.

    A resource without an answer is not reported, because libvirt decides, unless its kind is
    UNCHECKED. A resource that a file on the target replaces is not reported either.
    """
    lacking: dict[tuple[Kind, str | None, Answer], list[Resource]] = {}
    for one in wanted:
        answer = answers.get(one, Answer.PRESENT)
        if one.kind is Kind.UNCHECKED:
            answer = Answer.ABSENT
        if answer is not Answer.PRESENT and not _replaced(one, answers):
            lacking.setdefault((one.kind, one.device, answer), []).append(one)
    hosts = {"guest": guest, "source": source, "target": target}
    return tuple(_finding(found, answer, hosts) for (*_, answer), found in lacking.items())


def _replaced(wanted: Resource, answers: Answers) -> bool:
    """Return whether a file on the target makes the resource unnecessary."""
    return wanted.unless is not None and any(
        one.kind is Kind.FILE and one.name == wanted.unless and answer is Answer.PRESENT
        for one, answer in answers.items()
    )


def _finding(found: Sequence[Resource], answer: Answer, hosts: Mapping[str, str]) -> Finding:
    first = found[0]
    check, guest = CHECKS[first.kind], hosts["guest"]
    hint = check.hint
    if answer is Answer.INACTIVE:
        hint = _START.get(first.kind, hint)
    elif answer is Answer.NO_VALUE:
        hint = _NO_VALUE_HINT
    pool, _, volume = first.name.partition("/")
    name = volume if first.kind is Kind.VOLUME else first.name
    if answer is Answer.NO_VALUE and not _UUID.fullmatch(name):
        name = "UUID"  # a definition may name a secret by its usage, which virsh does not accept
    return Finding(
        code=check.code, severity=first.severity, where=hosts["target"],
        text=_text(found, answer, hosts),
        hint=hint.format(name=quote(name), pool=quote(pool), **{**hosts, "guest": quote(guest)}),
    )  # fmt: skip


_LACKS = {
    Kind.PORT: "which {is_} in use there",
    Kind.VSOCK_CID: "which another guest has there",
    Kind.HUGE_PAGES: "of which too few are free there",
    Kind.UNCHECKED: "which {was} not checked",
}
_SAYS = {
    Answer.INACTIVE: "which {is_} not active there",
    Answer.NO_VALUE: "which {has} no value there",
}


def _text(found: Sequence[Resource], answer: Answer, hosts: Mapping[str, str]) -> str:
    first = found[0]
    guest = hosts["guest"]
    what = guest if first.device is None else f"{first.device} of {guest}"
    names = some((_shown(one) for one in found), _MOST)
    lacks = _SAYS.get(answer) or _LACKS.get(first.kind, "which {is_} missing there")
    check = CHECKS[first.kind]
    noun, verbs = check.noun, {"is_": "is", "was": "was", "has": "has"}
    if len(found) > 1:
        noun = noun and (check.plural or f"{noun}s")
        verbs = {"is_": "are", "was": "were", "has": "have"}
    parts = (what, "needs", noun, f"{names},", lacks.format(**verbs))
    return " ".join(part for part in parts if part)


def _shown(wanted: Resource) -> str:
    if wanted.kind is Kind.HUGE_PAGES:
        return f"of {wanted.name} KiB" if wanted.name else "of the default size"
    return wanted.name


def refused(reason: str, *, guest: str, target: str) -> Finding:
    """Return the finding about a guest that the target's libvirt refuses to start."""
    return Finding(
        code="definition-refused", severity=Severity.BLOCKER, where=target,
        text=f"libvirt on {target} would not start {guest}: {reason}",
        hint=f"choose another host, upgrade libvirt and QEMU on {target}, or change the definition"
        f" with virsh edit {quote(guest)} and restart the guest",
    )  # fmt: skip
