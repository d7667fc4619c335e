"""A cell of docs/locking.md on real hosts: what is asked for while something is under way."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.lab.bench import SLOW, WHOLE, Bench, gathered, until
from tests.lab.locking_commands import ELSEWHERE, MOVE, OURS, PATIENT, VIRSH
from tests.lab.locking_words import Asked, Then, Under
from vmckpt.errors import VmckptError
from vmckpt.hypervisor import domains as hypervisor_domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.guest import Presence
from vmckpt.units import parse_rate
from vmckpt_lab import command_runner, guests, host, lab, network
from vmckpt_lab.command_runner import Controller, End
from vmckpt_lab.faults import inject
from vmckpt_lab.plan import HostPlan

Doing = Callable[["Scene"], object]


class Scene:
    """Something under way with web1 that goes on for as long as the scene is wanted."""

    def __init__(self, bench: Bench, under: Under, begin: Doing, finish: Doing) -> None:
        self.bench, self.under = bench, under
        self._begin, self._finish = begin, finish
        self.spent = True
        self.controller: Controller | None = None
        self._virsh: subprocess.Popen[str] | None = None
        self._stopped: int | None = None
        self._answers: dict[Asked, End] = {}
        self.uuid = self.job = ""

    # What is under way

    def begin(self) -> None:
        """Set it up, anew if an earlier cell has ended it."""
        if self.spent:
            self.clear()
            self.spent = False
            self._begin(self)
            active = self.bench.good("jobs", "--json").json
            self.job = str(active[0]["job"]) if active else ""

    def guest(self, wishes: Mapping[str, Any]) -> None:
        self.bench.guest(**wishes)
        shared = self.bench.plan.shared
        xml = self.bench.inside("alpha", "virsh", "dumpxml", "--inactive", "web1")
        self.uuid = xml.split("<uuid>")[1].split("</uuid>")[0]
        files = {
            "changed.xml": xml.replace("<vcpu", "<title>changed</title><vcpu", 1),
            "nic.xml": "<interface type='bridge'><source bridge='guests'/>"
            "<model type='virtio'/></interface>",
            "backup.xml": "<domainbackup><disks><disk name='vda' type='file'>"
            f"<target file='{shared}/web1-backup.qcow2'/><driver type='qcow2'/>"
            "</disk></disks></domainbackup>",
            # Goes on until somebody ends it, however fast the disk is.
            "pull.xml": "<domainbackup mode='pull'>"
            f"<server transport='unix' socket='{shared}/web1-backup.sock'/>"
            f"<disks><disk name='vda' type='file'><scratch file='{shared}/web1-scratch.qcow2'/>"
            "</disk></disks></domainbackup>",
            "p.yaml": PATIENT,
        }
        for name, text in files.items():
            (shared / name).write_text(text)
        with (shared / "extra.raw").open("wb") as extra:
            extra.truncate(8 << 20)

    def slow(self, rate: str | None = None) -> None:
        for name in ("alpha", "beta"):
            network.shape(self.bench.plan, name, parse_rate(rate) if rate else SLOW)

    def fast(self) -> None:
        for name in ("alpha", "beta"):
            network.shape(self.bench.plan, name, None)

    def move(self, *more: str) -> Controller:
        """A migration by vmckpt that is in its first pass."""
        self.controller = Controller(self.bench.plan, *self.filled((*MOVE, *more)))
        until(lambda: self.moving)
        return self.controller

    @property
    def moving(self) -> bool:
        """Whether its controller says that it is sending."""
        one = self.controller
        moments = command_runner.Moment.FIRST, command_runner.Moment.LATE
        return one is not None and any(one.is_at(moment) for moment in moments)

    def start(self, *args: str) -> None:
        """A virsh command that goes on."""
        entered = host.enter(self.bench.plan.host("alpha"), "virsh", *self.filled(args))
        self._virsh = subprocess.Popen(
            entered, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def hold(self, path: str) -> None:
        """Let libvirt's writer of a file stand still, so that what writes it goes on."""
        wanted = str(self.bench.plan.shared / path)
        until(lambda: self._stop_writer(wanted), limit=10.0)
        time.sleep(0.3)  # until what it had read already is written

    def _stop_writer(self, path: str) -> bool:
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = command.read_bytes().decode(errors="replace")
                if "libvirt_iohelper" in words and path in words:
                    self._stopped = int(command.parent.name)
                    os.kill(self._stopped, signal.SIGSTOP)
                    return True
        return False

    def release(self) -> None:
        """Let the writer go on; what virsh said in the end."""
        if self._stopped is not None:
            with suppress(ProcessLookupError):
                os.kill(self._stopped, signal.SIGCONT)
        self._stopped = None

    # What is asked for

    @property
    def home(self) -> str:
        """The host where virsh is used: where the guest runs."""
        post_copy = self.under in (Under.POSTCOPY, Under.BROKEN)
        return "beta" if post_copy else "alpha"

    @property
    def other(self) -> str:
        return {"alpha": "beta", "beta": "alpha"}[self.home]

    def filled(self, words: tuple[str, ...]) -> list[str]:
        to = self.bench.plan.host(self.other).address
        shared = str(self.bench.plan.shared)
        return [word.replace("{shared}", shared).replace("{other}", to) for word in words]

    def ask(self, asked: Asked, *, limit: float = 100.0) -> End:
        """Ask for it and wait for the answer."""
        if (self.under, asked) == (Under.ABANDONED, Asked.RECOVER):
            return self._adopted()
        if (ours := OURS.get(asked)) is not None:
            more = ELSEWHERE if asked is Asked.MIGRATE_ELSEWHERE else {}
            named = {name: self.filled((value,))[0] for name, value in more.items()}
            return command_runner.run(self.bench.plan, *self.filled(ours), limit=limit, more=named)
        at = self.other if asked is Asked.DESTROY_OTHER else self.home
        return self.virsh(*VIRSH[asked], at=at)

    def _adopted(self) -> End:
        """recover watches for as long as it goes on: it is cancelled, as any controller can be."""
        self.controller = Controller(self.bench.plan, *OURS[Asked.RECOVER])
        until(lambda: "unattended" not in self.bench.good("jobs").out)
        until(lambda: self.bench.run("cancel", "web1").code == 0)
        return self.ended()

    def virsh(self, *args: str, at: str | None = None) -> End:
        entered = host.enter(self.bench.plan.host(at or self.home), "virsh", *self.filled(args))
        with subprocess.Popen(
            entered, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as asked:  # fmt: skip
            out, err = gathered(asked, limit=100.0)
        return End(asked.returncode, out, err)

    def ask_together(self, many: list[Asked]) -> Mapping[Asked, End]:
        """Ask for all of these at once: each waits for libvirt's half minute."""
        missing = [asked for asked in many if asked not in self._answers]

        def one(asked: Asked) -> None:
            self._answers[asked] = self.ask(asked)

        threads = [threading.Thread(target=one, args=(asked,)) for asked in missing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._answers

    # What is true

    def presence(self, name: str) -> Presence:
        async def asked() -> Presence:
            async with Hypervisor(self.bench.inventory.host(name)) as hypervisor:
                return await hypervisor_domains.presence(hypervisor, self.uuid)

        return asyncio.run(asked())

    def running(self) -> list[str]:
        """The hosts on which its CPUs run."""
        return [name for name in ("alpha", "beta") if self.presence(name).runs]

    def goes_on(self) -> bool:
        """Whether what was under way still is."""
        match self.under:
            case Under.PRECOPY | Under.ABANDONED | Under.VIRSH_MIGRATE:
                ours = self.under is not Under.PRECOPY or self.moving
                return ours and self.presence("alpha").migrating
            case Under.POSTCOPY:
                running = self.controller is not None and self.controller.running
                return running and self.presence("beta").post_copy
            case Under.BROKEN:
                return self.presence("alpha").post_copy
            case Under.UNSETTLED:
                return "unattended" in self.bench.good("jobs").out
            case Under.PROTECTED:
                return self.protected() == "whole"
            case _:
                return self._libvirts_job_goes_on()

    def _must_go_on(self) -> None:
        if self.under is Under.PROTECTED:
            # libvirtd 9.0 crashes in about half of all `backup-begin` of a protected guest. On a
            # host systemd starts it again; the protection must go on then.
            for one in self.bench.plan.hosts:
                inject.start_libvirtd(self.bench.plan, one.name)
            # Nor may a busy host be unable to answer, or to keep up, for longer than this.
            until(self.goes_on)
        else:
            assert self.goes_on()

    def _libvirts_job_goes_on(self) -> bool:
        match self.under:
            case Under.BACKUP:
                return "Backup" in self.virsh("domjobinfo", "web1").out
            case Under.BLOCKCOPY:
                return "Block Copy" in self.virsh("blockjob", "web1", "vda").err
            case Under.DISK_SNAPSHOT:
                return "s1" in self.virsh("snapshot-list", "web1", "--name").out
            case _:
                return self._virsh is not None and self._virsh.poll() is None

    def protected(self) -> str:
        """Its protection: "whole", or the phase of the guest's agent; "": there is none; "?": a
        busy host did not answer in time."""
        told = self.bench.run("status", "web1", "--json").json
        if not told:
            return ""
        says = {name: one or {} for name, one in told[0]["says"].items()}
        if any("error" in one for one in says.values()):
            return "?"
        phase = str(says["alpha"].get("phase", ""))
        return "whole" if phase == "protecting" and says["beta"].get("ready") else phase

    def came_of(self, then: Then) -> None:
        """See that this is what came of a request."""
        if then.goes_on:
            self._must_go_on()
            still = then.stands or self.under in (Under.SAVE, Under.DUMP, Under.BROKEN)
            # A protected guest stands still for moments of each epoch.
            until(lambda: len(self.running()) == (0 if still else 1), limit=5.0)
            if then.transient:
                assert "web1" not in self.virsh("list", "--name", "--persistent").out
            return
        self.release()
        if then.alone:
            until(lambda: self.protected() == "alone")
        if then.outcome is not None:
            assert self.outcome() == then.outcome
        if then.on is not None:
            self.whole()
            assert self.running() == [then.on]
        else:
            until(lambda: self.bench.where() == ([then.left] if then.left else []))

    def outcome(self) -> str:
        """How the job of vmckpt has ended, by its own word; recover says it if nobody else can."""
        if self.under in (Under.PRECOPY, Under.POSTCOPY):
            return str(self.ended().outcome)
        until(lambda: not self.presence("alpha").migrating, limit=60.0)
        self.bench.good("recover")
        return str(self.bench.good("job", self.job, "--json").json["outcome"])

    # How it ends

    def finish(self) -> None:
        """Bring what is under way to its usual end, and see that nothing is lost."""
        self._must_go_on()
        self.spent = True
        self._finish(self)
        self.whole()

    def whole(self) -> None:
        """Exactly one copy, it runs, and all three ledgers agree."""
        until(lambda: len(self.running()) == 1 and len(self.bench.where()) == 1)
        assert self.bench.ledgers() == WHOLE

    def ended(self) -> End:
        """How the migration under way ended, by its own word."""
        assert self.controller is not None
        return self.controller.end(limit=90.0)

    def virsh_ended(self) -> str:
        self.release()
        assert self._virsh is not None
        return gathered(self._virsh, limit=90.0)[0]

    def _end_if_libvirt_hangs(self, one: HostPlan) -> None:
        """libvirt 9.0 was seen to crash, and to hang, after many commands: the next scene would
        find no libvirt."""
        asked = host.enter(one, "timeout", "20", "virsh", "-q", "list")
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            told = subprocess.run(
                host.enter(one, "sh", "-c", "ps -eLo pid,stat,wchan:32,comm | grep libvirtd"),
                capture_output=True, text=True, check=False,
            ).stdout  # fmt: skip
            sys.stderr.write(f"{one.name}: libvirt does not answer: {done.stderr}\n{told}")
            host.power_off(one)

    def clear(self) -> None:
        """Nothing of the scene stays."""
        self.release()
        plan = self.bench.plan
        self.fast()
        for one in plan.hosts:
            self._end_if_libvirt_hangs(one)
            lab.heal(plan, one.name)
        if self.controller is not None and self.controller.running:
            self.controller.kill()
        if self.under is Under.PROTECTED:
            command_runner.run(plan, "unprotect", "web1", limit=60.0)
        for name in ("alpha", "beta"):
            self.virsh("destroy", "web1", at=name)
            gone = self.virsh("undefine", "web1", "--managed-save", "--snapshots-metadata", at=name)
            if "Timed out" in gone.err:
                # libvirt 9.0 never lets go of a guest whose source was destroyed in post-copy.
                host.power_off(plan.host(name))
                lab.heal(plan, name)
                self.virsh("undefine", "web1", "--managed-save", "--snapshots-metadata", at=name)
        if self._virsh is not None:
            gathered(self._virsh, limit=60.0)
        for guest in guests.stored(plan):
            guests.remove(plan, guest.name)
        with suppress(VmckptError):
            command_runner.run(plan, "recover", limit=60.0)
        for path in plan.shared.iterdir():
            if path.is_file():
                path.unlink()
        self._virsh = self.controller = None
