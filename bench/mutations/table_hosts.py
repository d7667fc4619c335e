"""Mutations of what is believed of hosts: fencing, preflight, processes, directories."""

from bench.mutations.mutation import Area, Mutation, unit

_RULES = unit("fencing_rules")
_PROOF = unit("protect_proof")
_ENDING = unit("protect_ending")
_PREFLIGHT = unit("preflight")
_PROTECT = unit("protect_preflight")
_IDENTITY = unit("qemu_identity")
_HOSTDIRS = unit("hostdirs")

_FENCING = (
    Mutation(
        name="failed-off-counts", area=Area.FENCING, file="vmckpt/model/fencing.py",
        old="        if ran.status != 0:",
        new="        if ran.status is None:",
        suite=_RULES,
        breaks="A host counts as off although its fence device refused.",
    ),
    Mutation(
        name="unknown-power-is-off", area=Area.FENCING, file="vmckpt/model/fencing.py",
        old="        case 2:\n            return Power.OFF",
        new="        case 1 | 2:\n            return Power.OFF",
        suite=_RULES,
        breaks="A host counts as off because its fence device cannot be asked.",
    ),
    Mutation(
        name="off-without-look", area=Area.FENCING, file="vmckpt/model/fencing.py",
        old="    if not tried.looks or len(tried.looks) % count:\n",
        new="    if not tried.looks:\n        return Decision(Step.OFF)\n"
        "    if len(tried.looks) % count:\n",
        suite=_RULES,
        breaks="A host counts as off because its fence device took the order.",
    ),
    Mutation(
        name="reboot-option-passes", area=Area.FENCING, file="vmckpt/model/fencing.py",
        old='    if name.lower().replace("-", "_") in _OURS:',
        new='    if name in ("option",):',
        suite=_RULES,
        breaks="An inventory can turn `off` into `reboot`, after which the guest runs twice.",
    ),
    Mutation(
        name="answering-host-is-off", area=Area.FENCING, file="vmckpt/model/fencing.py",
        old="    if not answers:\n",
        new="    if not answers or answers:\n",
        suite=unit("fencing_agents"),
        breaks="Another machine is powered off, and the guest runs twice.",
    ),
    Mutation(
        name="hanging-agent-is-off", area=Area.FENCING, file="vmckpt/remote/fencing.py",
        old="    return Ran(process.returncode if ended else None, limit, said)",
        new="    return Ran(process.returncode if ended else 0, limit, said)",
        suite=unit("fencing_agents"),
        breaks="A host counts as off because its fence agent hangs.",
    ),
    Mutation(
        name="not-fenced-at-all", area=Area.FENCING, file="vmckpt/protect/ending.py",
        old="        if why is Proof.FENCE:\n            fenced",
        new="        if why is Proof.FENCE and fence:\n            fenced",
        suite=_ENDING,
        breaks="The standby runs while its primary, which is only cut off, runs as well.",
    ),
    Mutation(
        name="lost-journal-fails-over", area=Area.FENCING, file="vmckpt/protect/ending.py",
        old="            JournalDesk(recorder).check()",
        new="            JournalDesk(recorder)",
        suite=_ENDING,
        breaks="A controller that was replaced while it fenced starts a standby that is behind.",
    ),
    Mutation(
        name="heard-primary-is-silent", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old='        return bool(self.ours.get("silent")) and (heard is None or heard > LIVES)',
        new='        return bool(self.ours.get("silent"))',
        suite=_PROOF,
        breaks="A host that the backup still hears is powered off unasked.",
    ),
    Mutation(
        name="answering-primary-is-left", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old="    if runs and followed and not case.fence:",
        new="    if runs and followed and case.fence:",
        suite=_PROOF,
        breaks="A guest is failed over although its host says that it runs.",
    ),
    Mutation(
        name="word-against-evidence", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old='    if case.theirs.get("connected") and heard is not None and heard < LIVES:',
        new='    if case.theirs.get("connected") and heard is None:',
        suite=_PROOF,
        breaks="A person's wrong word starts a guest whose host is heard.",
    ),
    Mutation(
        name="fenced-for-nothing", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old='    _must_be_ready(case, f"{case.primary} is not fenced")\n',
        new="",
        suite=_PROOF,
        breaks="A host is powered off although the standby cannot take over.",
    ),
    Mutation(
        name="lone-guest-is-fenced", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old='    _must_be_ready(case, f"{case.primary} is not fenced")\n    if case.alone:',
        new='    _must_be_ready(case, f"{case.primary} is not fenced")\n    if not case.primary:',
        suite=_PROOF,
        breaks="A guest that went on alone is killed, and what it acknowledged since is lost.",
    ),
    Mutation(
        name="dead-outcome-ignores-alone", area=Area.FENCING, file="vmckpt/protect/proof.py",
        old='            return self.watched or not told.get("alone")',
        new="            return True",
        suite=_PROOF,
        breaks="A standby takes over and forgets what its guest acknowledged unprotected.",
    ),
    Mutation(
        name="failed-over-guest-is-primarys", area=Area.FENCING, file="vmckpt/protect/ending.py",
        old='    if theirs.get("outcome") == Fate.FAILED_OVER:\n        return True',
        new='    if theirs.get("outcome") == Fate.ENDED:\n        return True',
        suite=unit("protect_settling", "protect_ending"),
        breaks="Recovery lets out a copy that another host has taken over.",
    ),
)  # fmt: skip

_PREFLIGHTS = (
    Mutation(
        name="unsafe-cache-moves", area=Area.PREFLIGHT, file="vmckpt/migrate/preflight.py",
        old='    if disk.cache == "unsafe" and not disk.read_only:',
        new='    if disk.cache == "unsafe" and disk.read_only:',
        suite=_PREFLIGHT,
        breaks="A guest moves away from writes that are in its old host's memory only.",
    ),
    Mutation(
        name="other-file-is-the-disk", area=Area.PREFLIGHT, file="vmckpt/migrate/preflight.py",
        old="    elif same is False and not disk.read_only:",
        new="    elif same is False and disk.read_only:",
        suite=_PREFLIGHT,
        breaks="A guest continues on a file of the same name that is another disk.",
    ),
    Mutation(
        name="guest-arrives-twice", area=Area.PREFLIGHT, file="vmckpt/migrate/preflight.py",
        old="        elif same[1]:\n",
        new="        elif same[1] and not other.state.is_active:\n",
        suite=_PREFLIGHT,
        breaks="A guest moves to a host on which a copy of it runs.",
    ),
    Mutation(
        name="storage-proven-by-half", area=Area.PREFLIGHT, file="vmckpt/migrate/preflight.py",
        old="        and all(facts.same_file.get(path) is True for path in disk.below)",
        new="        and all(facts.same_file.get(path) is not False for path in disk.below)",
        suite=_PREFLIGHT,
        breaks="libvirt skips its check of disks of which nothing is known.",
    ),
    Mutation(
        name="shared-disk-protected", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old='        if disk["shareable"]:',
        new='        if disk["shareable"] and disk["node"] is None:',
        suite=_PROTECT,
        breaks="A failover takes back what other guests saw on a shared disk.",
    ),
    Mutation(
        name="outside-state-protected", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old="    for kind in sorted(set(seen.devices) & set(_OUTSIDE)):",
        new='    for kind in sorted(set(seen.devices) & {"hostdev"}):',
        suite=_PROTECT,
        breaks="A guest continues without the state of a device that no epoch has.",
    ),
    Mutation(
        name="other-qemu-protected", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old="    if ours != theirs:",
        new="    if ours[0] != theirs[0]:",
        suite=_PROTECT,
        breaks="A failover loads device state that another version of QEMU wrote.",
    ),
    Mutation(
        name="automatic-without-proof", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old="    if seen.automatic and not seen.has_lease and seen.fence is None:",
        new="    if seen.automatic and seen.has_lease and seen.fence is None:",
        suite=_PROTECT,
        breaks="A failover is promised that nothing could ever make sure of.",
    ),
    Mutation(
        name="standby-on-own-host", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old="    if seen.primary == seen.backup:",
        new="    if seen.primary == seen.guest:",
        suite=_PROTECT,
        breaks="A guest is protected by the host that it is protected from.",
    ),
    Mutation(
        name="name-taken-on-backup", area=Area.PREFLIGHT, file="vmckpt/protect/preflight.py",
        old="    elif seen.name_taken:",
        new="    elif seen.name_taken and seen.taken:",
        suite=_PROTECT,
        breaks="A standby is made where another guest has the name or UUID.",
    ),
)  # fmt: skip

_PROCESS_IDENTITY = (
    Mutation(
        name="any-user-is-qemu", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if known.user is not None and seen.users != {known.user}:",
        new="    if known.user is not None and not seen.users:",
        suite=_IDENTITY,
        breaks="A process of another user is given the guest's memory.",
    ),
    Mutation(
        name="one-of-its-users-is-enough", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if known.user is not None and seen.users != {known.user}:",
        new="    if known.user is not None and known.user not in seen.users:",
        suite=_IDENTITY,
        breaks="A setuid program that a local user started is taken for QEMU.",
    ),
    Mutation(
        name="any-program-is-qemu", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old='    if executable != known.emulator and not Path(executable).name.startswith("qemu"):',
        new="    if not executable:",
        suite=_IDENTITY,
        breaks="Another program with QEMU's old process ID is taken for it and killed.",
    ),
    Mutation(
        name="other-guest-is-it", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if not _names(seen.command, known.guest):",
        new="    if not seen.command:",
        suite=_IDENTITY,
        breaks="Another guest's QEMU is taken for this guest's.",
    ),
    Mutation(
        name="no-monitor-is-held", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if known.monitor not in seen.sockets:",
        new="    if known.monitor == \"\":",
        suite=_IDENTITY,
        breaks="A process is taken for QEMU that libvirt does not talk to.",
    ),
    Mutation(
        name="no-user-means-any", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="        trusted = known.user is not None or seen.users <= _trusted()",
        new="        trusted = known.user is None or seen.users <= _trusted()",
        suite=_IDENTITY,
        breaks="Where libvirt records no user any user's process can be QEMU.",
    ),
    Mutation(
        name="two-processes-are-one", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if len(found) == 1 and not strays:",
        new="    if found:",
        suite=_IDENTITY,
        breaks="Of two processes that can be the guest one is acted on and the other runs on.",
    ),
    Mutation(
        name="stray-is-no-guest", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="    if not found and not strays:",
        new="    if not found:",
        suite=_IDENTITY,
        breaks="A guest that libvirt lost counts as gone and is started elsewhere.",
    ),
    Mutation(
        name="imitation-hinders", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="        seen.users <= trusted\n        and Path",
        new="        not trusted.isdisjoint(seen.users)\n        and Path",
        suite=_IDENTITY,
        breaks="A local user makes the guest unknown by a setuid program with its UUID.",
    ),
    Mutation(
        name="anybodys-status-file", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="        _must_be_roots(file, os.fstat(opened))\n",
        new="",
        suite=_IDENTITY,
        breaks="A local user tells which process is the guest's QEMU.",
    ),
    Mutation(
        name="status-file-by-link", area=Area.PROCESS_IDENTITY,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC",
        new="os.O_RDONLY | os.O_CLOEXEC",
        suite=_IDENTITY,
        breaks="A link in the place of libvirt's file is followed.",
    ),
)  # fmt: skip

_HOST_DIRECTORIES = (
    Mutation(
        name="anybodys-directory", area=Area.HOST_DIRECTORIES, file="vmckpt/hostfiles.py",
        old="    if not is_ours(seen):\n        return",
        new="    if seen.st_uid < 0:\n        return",
        suite=_HOSTDIRS,
        breaks="Root keeps what it executes in a local user's directory.",
    ),
    Mutation(
        name="link-is-a-directory", area=Area.HOST_DIRECTORIES, file="vmckpt/hostdirs.py",
        old="        seen = one.lstat()",
        new="        seen = one.stat()",
        suite=_HOSTDIRS,
        breaks="A link leads root's files to where a local user wants them.",
    ),
    Mutation(
        name="open-directory", area=Area.HOST_DIRECTORIES, file="vmckpt/hostfiles.py",
        old="(last or not seen.st_mode & stat.S_ISVTX)",
        new="(not last and not seen.st_mode & stat.S_ISVTX)",
        suite=_HOSTDIRS,
        breaks="A directory is used in which everybody may exchange files.",
    ),
    Mutation(
        name="open-parent", area=Area.HOST_DIRECTORIES, file="vmckpt/hostfiles.py",
        old="(last or not seen.st_mode & stat.S_ISVTX)",
        new="last",
        suite=_HOSTDIRS,
        breaks="A directory is used that everybody may exchange for another one.",
    ),
    Mutation(
        name="parents-are-not-looked-at", area=Area.HOST_DIRECTORIES, file="vmckpt/hostdirs.py",
        old="    for one in (path, *path.parents):",
        new="    for one in (path,):",
        suite=_HOSTDIRS,
        breaks="A local user that has a parent directory exchanges what is in it.",
    ),
    Mutation(
        name="state-over-a-link", area=Area.HOST_DIRECTORIES, file="vmckpt/hostdirs.py",
        old="        Folder(path, only_ours=True).close()",
        new="        Folder(path.resolve(), only_ours=True).close()",
        suite=unit("hostile_users"),
        breaks="A local user moves root's link to an agent's state away, and puts its own there.",
    ),
    Mutation(
        name="hidden-is-ended", area=Area.HOST_DIRECTORIES,
        file="vmckpt/hypervisor/qemu_process/identity.py",
        old="        if exc.errno not in _ENDED:\n            process.close()",
        new="        if exc.errno < 0:\n            process.close()",
        suite=unit("qemu_identity"),
        breaks="A guest whose QEMU cannot be looked at counts as ended, and its standby runs too.",
    ),
    Mutation(
        name="verified-too-late", area=Area.HOST_DIRECTORIES, file="vmckpt/hostdirs.py",
        old="        verify(path)  # before anything is made in it\n",
        new="    verify(path)\n",
        suite=_HOSTDIRS,
        breaks="Root makes directories in what a local user made.",
    ),
    Mutation(
        name="memory-is-listed", area=Area.HOST_DIRECTORIES, file="vmckpt/hostdirs.py",
        old="            path.mkdir(mode=0o700)",
        new="            path.mkdir(mode=0o755)",
        suite=_HOSTDIRS,
        breaks="Local users see the copies of a guest's memory.",
    ),
    Mutation(
        name="planted-memory-is-used", area=Area.HOST_DIRECTORIES,
        file="vmckpt/replicate/facts.py",
        old="    if memory.exists():\n        hostdirs.verify(memory)",
        new="    if not memory.exists():\n        hostdirs.verify(memory)",
        suite=unit("replicate_facts"),
        breaks="A guest's memory is copied into a local user's directory.",
    ),
    Mutation(
        name="planted-session-is-read", area=Area.HOST_DIRECTORIES,
        file="vmckpt/replicate/facts.py",
        old="            hostdirs.verify(earlier)\n            return earlier",
        new="            return earlier",
        suite=unit("replicate_facts"),
        breaks="Root acts on a session that a local user wrote.",
    ),
)  # fmt: skip

HOSTS = (*_FENCING, *_PREFLIGHTS, *_PROCESS_IDENTITY, *_HOST_DIRECTORIES)
