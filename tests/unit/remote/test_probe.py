import base64
import subprocess
from pathlib import Path

import pytest

from tests.support.shell import Shell
from vmckpt.capture.memory import soft_dirty
from vmckpt.errors import RemoteError
from vmckpt.model.host import NoTrace
from vmckpt.remote import probe
from vmckpt.remote.ssh import Answer

ANSWER = f"""\
clock 1000.500000000
link lo
link br0
kvm yes
uffd there
uffd usable
backing /dev/shm/ram
backing-kind tmpfs
room 12345 /srv/with space
pem /etc/pki/CA/cacert.pem {base64.b64encode(b"PEM").decode()}
"""


def test_the_answer_of_a_host_is_read() -> None:
    seen = probe.parse(ANSWER, asked=1000.0, answered=1000.2, host="alpha")

    # The host's clock showed 1000.5 at some time between 1000.0 and 1000.2.
    assert seen.clock_skew == pytest.approx(0.4)
    assert seen.clock_uncertainty == pytest.approx(0.1)
    assert seen.links == {"lo", "br0"}
    assert seen.storage_free == {"/srv/with space": 12345}
    assert seen.certificates == {"/etc/pki/CA/cacert.pem": "PEM"}
    assert (seen.kvm_device, seen.userfaultfd, seen.post_copy_by_root_only) == (True, True, False)


def test_userfaultfd_may_be_there_and_not_be_for_qemu() -> None:
    seen = probe.parse(ANSWER.replace("uffd usable\n", ""), asked=0, answered=0, host="a")
    assert (seen.userfaultfd, seen.post_copy_by_root_only) == (True, True)


TRACING = "machine x86_64\nyama 1\ndeny-ptrace 0\ncaps 000001ffffffffff\nsystemd yes\n"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "", None),
        ("x86_64", "riscv64", NoTrace.PROCESSOR),
        ("x86_64", "aarch64", None),
        ("yama 1", "yama 3", NoTrace.YAMA),
        ("yama 1", "yama ", None),  # a kernel without it
        ("deny-ptrace 0", "deny-ptrace 1", NoTrace.SELINUX),
        ("caps 000001ffffffffff", "caps 000001fffff7ffff", NoTrace.CAPABILITY),
        ("caps 000001ffffffffff", "caps 0000000000000000", NoTrace.CAPABILITY),
        ("caps 000001ffffffffff", "caps ", None),
    ],
)
def test_what_keeps_agents_from_tracing_qemu(old: str, new: str, why: NoTrace | None) -> None:
    seen = probe.parse(ANSWER + TRACING.replace(old, new), asked=0, answered=0, host="a")
    assert (seen.no_trace, seen.systemd) == (why, True)
    seen = probe.parse(ANSWER, asked=0, answered=0, host="a")
    assert (seen.no_trace, seen.systemd) == (None, False)


def test_soft_dirty_bits_are_looked_for() -> None:
    script = probe._SOFT_DIRTY + "soft_dirty && echo yes"
    told = subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, check=False)
    assert (told.stdout == "yes\n") == soft_dirty.is_supported()
    assert told.stderr == ""
    seen = probe.parse(f"{ANSWER}soft-dirty yes\n", asked=0, answered=0, host="a")
    assert seen.soft_dirty


def test_an_architecture_on_which_nothing_was_tested_is_known() -> None:
    for machine, untested in (("x86_64", False), ("aarch64", True)):
        answer = ANSWER + TRACING.replace("x86_64", machine)
        assert probe.parse(answer, asked=0, answered=0, host="a").untested == untested


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.12.9+bpo-amd64", (6, 12)), ("6.7.0", (6, 7)), ("5.14.0-362.el9.x86_64", (5, 14)),
     ("6.7-rc1", (6, 7)), ("", None), ("six.7", None), ("6", None), ("6.77777", None)],
)  # fmt: skip
def test_the_kernel_is_told_by_its_version(release: str, version: tuple[int, int] | None) -> None:
    seen = probe.parse(f"{ANSWER}kernel {release}\n", asked=0, answered=0, host="a")
    assert seen.kernel == version


@pytest.mark.parametrize("text", ["", "hello", "clock now", "clock $(reboot)"])
def test_nonsense_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(RemoteError, match="alpha: the probe returned an invalid answer"):
        probe.parse(text, asked=0, answered=0, host="alpha")


async def test_files_that_are_there_and_not(tmp_path: Path) -> None:
    there, missing = tmp_path / "-e a\nb", tmp_path / "missing"
    there.touch()
    files = [str(there), str(missing)]
    assert await probe.present(Shell(tmp_path), files) == {str(there): True, str(missing): False}
    assert await probe.present(Shell(tmp_path), []) == {}


@pytest.mark.parametrize("said", ["y\n", "y\nn\ny\n", "y\nmotd\n"])
async def test_an_answer_about_files_that_makes_no_sense_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    async def run(*_: object, **__: object) -> Answer:
        return Answer(status=0, out=said, err="")

    shell = Shell(tmp_path)
    monkeypatch.setattr(shell, "run", run)
    with pytest.raises(RemoteError, match="looking for files: invalid answer"):
        await probe.present(shell, ["/a", "/b"])


def test_an_x86_kernel_is_not_booted_on_another_architecture(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-s"], input=probe._KVM_SCRIPT, text=True, check=False,
        env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 3
