"""The networks of a lab: a bridge for hosts, a bridge for guests, and veth pairs."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt.units import BytesPerSecond
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import GUEST_BRIDGE, LabPlan
from vmckpt_lab.shell import run


def subnets_in_use() -> set[int]:
    """Return the third byte of each network 198.18.x or 198.19.x with a route on this machine."""
    routes = json.loads(run(["ip", "-json", "route", "show"]) or "[]")
    found = set()
    for route in routes:
        parts = str(route.get("dst", "")).split(".")
        if parts[:2] in (["198", "18"], ["198", "19"]):
            found.add(int(parts[2]))
    return found


def _ip(command: str, namespace: str | None = None) -> None:
    """Run an ip command, here or in a namespace. The arguments must not contain spaces."""
    run(["ip", *(["-n", namespace] if namespace else []), *command.split()])


def build(plan: LabPlan) -> None:
    """Create all namespaces, links and addresses of a lab. Raises LabError."""
    _bridge(plan.bridge, f"{plan.controller_address}/24")
    _namespace(plan.observer_namespace)
    _bridge(GUEST_BRIDGE, f"{plan.observer_address}/24", plan.observer_namespace)
    for host in plan.hosts:
        _namespace(host.namespace)
        _plug(host.link, plan.bridge, host.namespace, f"{host.address}/24")
        _guest_cable(plan, host.name, host.namespace)
    if plan.witness:
        _namespace(plan.witness_namespace)
        link = plan.link_to("witness")
        _plug(link, plan.bridge, plan.witness_namespace, f"{plan.witness_address}/24")


def _bridge(name: str, address: str, namespace: str | None = None) -> None:
    _ip(f"link add {name} type bridge", namespace)
    _ip(f"addr add {address} dev {name}", namespace)
    _ip(f"link set {name} up", namespace)


def _namespace(name: str) -> None:
    _ip(f"netns add {name}")
    _ip("link set lo up", name)


def _plug(link: str, bridge: str, namespace: str, address: str) -> None:
    _ip(f"link add {link} type veth peer name eth0 netns {namespace}")
    _ip(f"link set {link} master {bridge} up")
    _ip(f"addr add {address} dev eth0", namespace)
    _ip("link set eth0 up", namespace)


def _guest_cable(plan: LabPlan, name: str, namespace: str) -> None:
    """Create a host's bridge for guests and connect it to the observer's bridge.

    This puts the guests of all hosts on one network, so that a migrated guest keeps its address.
    """
    observer = plan.observer_namespace
    _ip(f"link add {GUEST_BRIDGE} type bridge", namespace)
    _ip(f"link set {GUEST_BRIDGE} up", namespace)
    _ip(f"link add eth1 type veth peer name g-{name} netns {observer}", namespace)
    _ip(f"link set eth1 master {GUEST_BRIDGE} up", namespace)
    _ip(f"link set g-{name} master {GUEST_BRIDGE} up", observer)


def side_room(plan: LabPlan, namespace: str, link: str, address: str) -> None:
    """Create a namespace on the hosts' network that is not a host. Raises LabError.

    `namespace`: its name; `link`: names the network link; `address`: its address in the network.
    """
    _namespace(namespace)
    _plug(plan.link_to(link), plan.bridge, namespace, address)


def cut(plan: LabPlan, host: str, *, guests_too: bool = False) -> None:
    """Cut a host off from the network. Packets are lost silently, as with an unplugged cable.

    `guests_too`: also cut the network of its guests. Raises LabError.
    """
    _ip(f"link set {plan.host(host).link} down")
    if guests_too:
        _ip(f"link set g-{host} down", plan.observer_namespace)


_NOWHERE = "02:00:00:00:00:01"


def mute(namespace: str, address: str) -> None:
    """Silently drop packets from a namespace to an address; packets from the address arrive."""
    _ip(f"neigh replace {address} lladdr {_NOWHERE} dev eth0 nud permanent", namespace)


def unmute(namespace: str) -> None:
    """Stop dropping packets that a namespace sends; undoes `mute`."""
    _ip("neigh flush dev eth0 nud permanent", namespace)


def heal(plan: LabPlan, host: str) -> None:
    """Reconnect a host and its guests to the network; undoes `cut` and `mute`."""
    _ip(f"link set {plan.host(host).link} up")
    _ip(f"link set g-{host} up", plan.observer_namespace)
    unmute(plan.host(host).namespace)


def shape(plan: LabPlan, host: str, rate: BytesPerSecond | None) -> None:
    """Limit the bandwidth of a host in both directions; None removes the limit."""
    outer, inner = plan.host(host).link, plan.host(host).namespace
    for tc, device in ((["tc"], outer), (["tc", "-n", inner], "eth0")):
        run([*tc, *f"qdisc del dev {device} root".split()], check=False)
        if rate is not None:
            limit = f"qdisc add dev {device} root tbf rate {rate * 8}bit burst 256k latency 50ms"
            run([*tc, *limit.split()])


def namespaces(prefix: str) -> list[str]:
    """Return all network namespaces whose names begin with `prefix`."""
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"{prefix}*")) if folder.is_dir() else []


def processes_in(namespace: str) -> list[int]:
    """Return the IDs of all processes in a network namespace."""
    return [int(pid) for pid in run(["ip", "netns", "pids", namespace], check=False).split()]


def remove(prefix: str, bridge: str) -> None:
    """Kill all processes in a lab's namespaces, then remove the namespaces, links and the bridge.

    Only names are needed, so a lab that is incomplete or has lost its files can also be removed.
    Raises LabError if a process does not die.
    """
    found = namespaces(prefix)
    kill_all(found)
    for name in found:
        run(["ip", "netns", "del", name], check=False)
    links = json.loads(run(["ip", "-json", "link", "show"]) or "[]")
    for name in (str(link["ifname"]) for link in links):
        if name == bridge or name.startswith(f"{bridge}-"):
            run(["ip", "link", "del", name], check=False)


def kill_all(found: list[str], *, limit: float = 20.0) -> None:
    """Kill all processes in the namespaces and wait until they are gone.

    Raises LabError if they are not gone within `limit` seconds.
    """
    give_up = Deadline(limit)
    while pids := [pid for name in found for pid in processes_in(name)]:
        if give_up.passed():
            raise LabError(f"processes {pids} survive SIGKILL", hint="inspect them with ps")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
