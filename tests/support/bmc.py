"""A management controller: OpenIPMI's simulator, which speaks the real IPMI over a real network."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.paths import ROOT
from vmckpt.model.fencing import FenceDevice, FenceTopology
from vmckpt.model.host import Host

_TOOLS = ROOT / ".tools/usr/bin"
USER, SECRET = "operator", "hunter2-is-it"
_LAN = """\
name "bmc"
set_working_mc 0x20
startlan 1
  addr 127.0.0.1 {port}
  priv_limit admin
  allowed_auths_admin md5
  guid a123456789abcdefa123456789abcdef
endlan
chassis_control "{folder}/chassis"
user 1 true "" "" user 10 none
user 2 true "{user}" "{secret}" admin 10 md5
"""
_CONTROLLER = """\
mc_setbmc 0x20
mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr
mc_enable 0x20
"""
# The wires from the controller to the power supply.
_CHASSIS = """\
#!/bin/sh
case "$1 $2" in
"get power") echo "power:$(cat {folder}/power)" ;;
"set power") [ -e {folder}/stuck ] || echo "$3" >{folder}/power ;;
esac
"""
_PING = bytes.fromhex("0600ff06000011be80000000")
"""Presence ping of the Alert Standard Format, which a controller answers without a login."""


class Bmc:
    """A host's controller in a folder, and the power that it controls; stop it in the end."""

    def __init__(self, folder: Path) -> None:
        for program in (_TOOLS / "ipmi_sim", Path("/usr/sbin/fence_ipmilan")):
            assert program.exists(), f"{program} is missing; ./check --install fetches it"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._folder = folder
        (folder / "state").mkdir(parents=True)
        words = {"port": self.port, "folder": folder, "user": USER, "secret": SECRET}
        (folder / "lan.conf").write_text(_LAN.format(**words))
        (folder / "controller").write_text(_CONTROLLER)
        (folder / "chassis").write_text(_CHASSIS.format(**words))
        (folder / "chassis").chmod(0o755)
        (folder / "power").write_text("1\n")
        self._process = subprocess.Popen(
            [_TOOLS / "ipmi_sim", "-n", "-c", "lan.conf", "-f", "controller", "-s", "state"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def is_on(self) -> bool:
        return (self._folder / "power").read_text() == "1\n"

    def switch_on(self) -> None:
        """As somebody does it at the machine."""
        (self._folder / "power").write_text("1\n")

    def stick(self) -> None:
        """From now on it accepts orders and the power stays as it is."""
        (self._folder / "stuck").touch()

    def host(self, **more: str) -> Host:
        """A host of the inventory that is fenced by it with fence_ipmilan."""
        return Host(
            name="alpha", uri="qemu+tcp://alpha/system",
            fence=FenceTopology(((self.device(**more),),)),
        )  # fmt: skip

    def device(self, **more: str) -> FenceDevice:
        """This controller as a device of the inventory, asked by fence_ipmilan."""
        options: Mapping[str, str] = {
            "ip": "127.0.0.1", "ipport": str(self.port), "username": USER, "password": SECRET,
            # The simulator cannot tell which ciphers it has; ipmitool would ask for 14 seconds.
            "lanplus": "1", "cipher": "3", "ipmitool_path": str(_TOOLS / "ipmitool"), **more,
        }  # fmt: skip
        return FenceDevice(agent="fence_ipmilan", options=MappingProxyType(options))

    def _wait(self) -> None:
        until = time.monotonic() + 30
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(("127.0.0.1", self.port))
            asking.settimeout(0.1)
            while self._process.poll() is None and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    asking.send(_PING)
                    asking.recv(1024)
                    return
                time.sleep(0.02)
        raise RuntimeError("ipmi_sim does not answer")
