"""The commands that the cells of docs/locking.md are tried with."""

from collections.abc import Mapping
from typing import Any

from tests.lab.locking_words import Asked

PATIENT = """version: vmckpt/v1
name: patient
mode: hybrid
limits: {max_downtime: 20ms}
on_failure: stop
on_postcopy_broken: recover for 8s, then ask
converge: {rules: [{when: {iteration: 1000}, do: start_postcopy}]}
"""
"""Goes on until somebody ends it."""
COPIED = {"disk_format": "qcow2"}
HOT = {"memory": "224MiB", "dirty": "96MiB@60MiB/s"}
QCOW2 = {"memory": "192MiB", "dirty": "64MiB@20MiB/s", "disk_format": "qcow2"}
PROTECTED: Mapping[str, Any] = {
    "memory": "128MiB", "dirty": "16MiB@8MiB/s", "disk": "32MiB", "shared_memory": True,
}  # fmt: skip
LARGE = {**QCOW2, "disk": "800MiB", "written": "390MiB"}
MOVE = ("migrate", "web1", "--to", "beta", "--json", "--tls", "off", "--policy", "{shared}/p.yaml")
SNAPSHOT = (
    "snapshot-create-as", "web1", "s2", "--live", "--memspec", "file={shared}/web1-s2.mem",
    "--diskspec", "vda,file={shared}/web1-s2.qcow2",
)  # fmt: skip
DISK_SNAPSHOT = (
    "snapshot-create-as", "web1", "s1", "--disk-only",
    "--diskspec", "vda,file={shared}/web1-s1.qcow2",
)  # fmt: skip
COPY = (
    "blockcopy", "web1", "vda", "{shared}/web1-copy.raw", "--transient-job", "--bandwidth", "1",
)  # fmt: skip
DUMP = ("dump", "web1", "{shared}/web1.core", "--live", "--memory-only")
SAVE = ("save", "web1", "{shared}/web1.save")
ELSEWHERE = {"VMCKPT_STATE": "{shared}/elsewhere"}

TO = "qemu+tcp://{other}/system"

OURS: Mapping[Asked, tuple[str, ...]] = {
    Asked.MIGRATE: MOVE,
    Asked.MIGRATE_ELSEWHERE: MOVE,
    Asked.PLAN: ("plan", "web1", "--to", "beta"),
    Asked.RESUME_JOB: ("resume", "web1"),
    Asked.RECOVER: ("recover",),
    Asked.CANCEL: ("cancel", "web1"),
    Asked.SET: ("set", "web1", "--bandwidth", "64MiB/s"),
    Asked.LABEL: ("label", "web1", "tier=gold"),
    Asked.GUESTS: ("guests",),
}
VIRSH: Mapping[Asked, tuple[str, ...]] = {
    Asked.VIRSH_MIGRATE: ("migrate", "--live", "--p2p", "--unsafe", "web1", TO),
    Asked.SNAPSHOT: SNAPSHOT,
    Asked.DISK_SNAPSHOT: DISK_SNAPSHOT,
    Asked.BACKUP: ("backup-begin", "web1", "{shared}/backup.xml"),
    Asked.ATTACH_DISK: ("attach-disk", "web1", "{shared}/extra.raw", "vdb", "--live"),
    Asked.ATTACH_NIC: ("attach-device", "web1", "{shared}/nic.xml", "--live"),
    Asked.SETMEM: ("setmem", "web1", "150M", "--live"),
    Asked.SETVCPUS: ("setvcpus", "web1", "1", "--live"),
    Asked.SUSPEND: ("suspend", "web1"),
    Asked.RESUME: ("resume", "web1"),
    Asked.SHUTDOWN: ("shutdown", "web1", "--mode", "acpi"),
    Asked.REBOOT: ("reboot", "web1", "--mode", "acpi"),
    Asked.DESTROY: ("destroy", "web1"),
    Asked.DESTROY_OTHER: ("destroy", "web1"),
    Asked.UNDEFINE: ("undefine", "web1"),
    Asked.DEFINE: ("define", "{shared}/changed.xml"),
    Asked.MANAGEDSAVE: ("managedsave", "web1"),
    Asked.DUMP: DUMP,
    Asked.BLOCKCOPY: COPY,
    Asked.ABORT: ("domjobabort", "web1"),
}
