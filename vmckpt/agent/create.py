"""Taking one snapshot, on the guest's host: capture, store, publish."""

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt.agent import spool, telling, ways
from vmckpt.agent.orders import CreateOrder
from vmckpt.agent.regions import DiskRegion, RamRegion
from vmckpt.agent.talk import Talk
from vmckpt.checkpoint.background import Captured, Hooks
from vmckpt.checkpoint.disk_capture import DiskCapture
from vmckpt.checkpoint.disk_plan import Parent
from vmckpt.checkpoint.image import FrozenImage
from vmckpt.checkpoint.quiet import Quiet
from vmckpt.hypervisor.agent import GuestAgent
from vmckpt.hypervisor.backups import Backups
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.model.findings import Severity
from vmckpt.store import ingest, line, manifest, wraps
from vmckpt.store.compact import compacted
from vmckpt.store.facts import Part
from vmckpt.store.ingest import Counts, Ingest, Table
from vmckpt.store.inside import Private, RegionMap
from vmckpt.store.line import Draft
from vmckpt.store.manifest import Keys, Signer
from vmckpt.store.places import backend_of
from vmckpt.store.regions import Kind, Region
from vmckpt.store.store import Store
from vmckpt.store.writer import Writer, Written
from vmckpt.units import Bytes, Seconds

_STANDS_STILL = Seconds(10.0)
"""How long a guest's file systems may be held still."""


def create(order: CreateOrder, talk: Talk) -> dict[str, Any]:
    """Take a snapshot; what is told of it. Raises VmckptError; the guest is then as it was."""
    with (
        spool.held(order.folder, patience=Seconds(0.0)),
        Monitor(order.guest, host=order.host, uri=order.uri) as monitor,
        ExitStack() as stack,
    ):
        store = Store.open(backend_of(order.store.url), cache=Path(order.state) / "cache")
        return _Making(order, talk, store, monitor).run(stack)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Signs by asking the controller: no host can sign what another one wrote."""

    talk: Talk
    public: bytes

    def sign(self, message: bytes) -> bytes:
        return bytes.fromhex(str(self.talk.ask("sign", message=message.hex())))


class _Making:
    """One snapshot."""

    def __init__(self, order: CreateOrder, talk: Talk, store: Store, monitor: Monitor) -> None:
        self._order, self._talk, self._store, self._monitor = order, talk, store, monitor
        self._past = line.load(order.line)
        self._maps: list[RegionMap] = []
        self._warnings: list[str] = []
        self._pause = self._made_at = 0.0
        salt = bytes.fromhex(order.salt) if order.salt is not None else None
        signer: Signer = _Asked(talk, bytes.fromhex(order.signer))
        self._keys = Keys(signer, salt, secrets.token_bytes(32) if salt is not None else None)

    def run(self, stack: ExitStack) -> dict[str, Any]:
        order, began = self._order, time.monotonic()
        writer = stack.enter_context(self._store.writer(self._keys.sealing()))
        draft = stack.enter_context(Draft(order.line))
        disks = stack.enter_context(self._disks())
        image = self._instant(disks)
        table = Table(self._past.chunks if self._past is not None else ())
        work = Ingest(writer, table, stop=self._talk.stop, progress=self._progress)
        stream: tuple[Part, ...] = ()
        if image is not None:
            try:
                self._memory(image, work, draft)
                stream = _stream(image, writer, table)
            finally:
                image.remove()
        described = telling.facts(self._monitor.xml(), disks.facts, image)
        self._read(disks, work, draft)
        written = writer.finish()
        facts = replace(described, stream=stream, warnings=tuple(self._warnings))
        private = compacted(
            Private(facts=facts, chunks=table.digests(), regions=tuple(self._maps), files={})
        )
        self._publish(private, written, writer)
        self._keep(draft, private, disks)
        return {
            "pause": self._pause,
            "took": time.monotonic() - began,
            "read": work.counts.read,
            "zero": work.counts.zero,
            "same": work.counts.same,
            "written": written.bytes_new,
            "warnings": self._warnings,
        }

    def _disks(self) -> DiskCapture:
        order = self._order
        folder = Path(order.state) / "scratch"
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        return DiskCapture(
            Backups(self._monitor),
            guest=order.guest,
            host=order.host,
            snapshot=order.snapshot,
            folder=folder,
        )

    def _instant(self, disks: DiskCapture) -> FrozenImage | None:
        """Everything of the guest, as it is at one moment."""
        past = self._past
        parent = None
        if past is not None:
            sizes = {name: Bytes(size) for name, size in past.extra.get("disks", {}).items()}
            parent = Parent(
                id=past.snapshot, made_at=int(past.extra.get("made_at", 0)), sizes=sizes
            )
        undo = disks.prepare(parent, self._others())
        assert disks.plan is not None
        if disks.plan.captured:
            self._intend("backup", undo.to_json())
            disks.make_room()
        if self._order.memory:
            captured = self._capture(disks)
            self._pause = captured.pause
            return captured.image
        with Quiet(
            GuestAgent(self._monitor),
            guest=self._order.guest,
            limit=_STANDS_STILL,
            note=lambda facts: self._intend("freeze", facts.to_json()),
        ) as quiet:
            self._made_at = time.time()
            disks.begin()
            quiet.release()
        found = quiet.finding(self._monitor.name)
        if found is not None:
            self._warnings.append(found.text)
        return None

    def _intend(self, step: str, facts: str) -> None:
        """Whatever has to be put back is written down by the controller first."""
        self._talk.ask("intend", step=step, facts=facts)

    def _capture(self, disks: DiskCapture) -> Captured:
        talk = self._talk
        assert disks.plan is not None

        def taken() -> None:
            self._made_at = time.time()

        hooks = Hooks(
            note=lambda undo: self._intend("capture", undo.to_json()),
            barrier=disks.begin if disks.plan.captured else None,
            captured=taken,
            progress=lambda done, total: talk.progress(phase="capture", done=done, total=total),
        )
        return ways.capture(self._monitor, self._order, hooks, talk.stop)

    def _others(self) -> list[str]:
        """Snapshots in other stores that the guest's lines there go on from."""
        mine = self._order.line
        folders = [one for one in mine.parent.glob(f"{self._order.guest}-*") if one != mine]
        return [one for one in map(line.snapshot_of, folders) if one is not None]

    def _memory(self, image: FrozenImage, work: Ingest, draft: Draft) -> None:
        for number in range(len(image.blocks)):
            with RamRegion(image, number) as region:
                self._region(region, work, draft)

    def _read(self, disks: DiskCapture, work: Ingest, draft: Draft) -> None:
        for disk in disks.disks:
            with disks.reader(disk) as reader:
                self._region(DiskRegion(reader), work, draft)
        disks.end()
        assert disks.plan is not None
        self._warnings += [
            one.text
            for one in disks.plan.findings(self._monitor.name)
            if one.severity is not Severity.INFO
        ]

    def _region(self, region: Region, work: Ingest, draft: Draft) -> None:
        past = self._past.regions.get(region.name) if self._past is not None else None
        prints = None
        if region.kind is Kind.RAM:
            prints = draft.prints(region.name, region.kind, region.size)
        map_ = work.region(region, past, prints)
        self._maps.append(RegionMap(name=region.name, kind=region.kind, size=region.size, map=map_))

    def _progress(self, counts: Counts) -> None:
        self._talk.progress(phase="store", done=counts.read + counts.same, new=counts.new)

    def _publish(self, private: Private, written: Written, writer: Writer) -> None:
        order = self._order
        public = telling.public(
            order,
            private,
            made_at=self._made_at,
            qemu=telling.qemu_version(self._monitor),
            parent=None if self._past is None else self._past.snapshot,
            epoch=self._epoch,
            new=written.bytes_new,
        )
        wrapped = None
        if self._keys.data_key is not None:
            admins = [bytes.fromhex(one) for one in order.admins]
            wrapped = wraps.wrap(self._keys.data_key, order.snapshot, admins)
        encoded = manifest.encode(public, private, self._keys)
        self._store.publish(order.snapshot, encoded, wrapped, writer=writer)

    @property
    def _epoch(self) -> int:
        return int(self._past.extra.get("epoch", 0)) + 1 if self._past is not None else 0

    def _keep(self, draft: Draft, private: Private, disks: DiskCapture) -> None:
        """From here the next snapshot goes on."""
        maps = {region.name: region.map for region in private.regions}
        sizes = {one.name: one.size for one in private.regions if one.kind is Kind.DISK}
        extra = {"epoch": self._epoch, "made_at": int(self._made_at), "disks": sizes}
        draft.keep(self._order.snapshot, list(private.chunks), maps, extra)
        line.sweep(self._order.line.parent, now=time.time())
        disks.keep(self._others())


def _stream(image: FrozenImage, writer: Writer, table: Table) -> tuple[Part, ...]:
    """What of QEMU's stream is not memory, as chunks."""
    parts = {"head": image.head_bytes, "tail": image.tail()}
    return tuple(
        Part(name=name, size=len(blob), chunks=tuple(ingest.stored(writer, table, blob)))
        for name, blob in parts.items()
    )
