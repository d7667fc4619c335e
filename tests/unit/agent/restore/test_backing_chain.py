"""Whether a file is another guest's image, or lies below one."""

import subprocess
from pathlib import Path

import pytest

from vmckpt.agent.restore import backing_chain
from vmckpt.errors import GuestLocked


def image(path: Path, *base: str) -> Path:
    words = ["qemu-img", "create", "-q", "-f", "qcow2", *base, str(path)]
    subprocess.run([*words, *([] if base else ["1M"])], check=True)
    return path


def test_an_image_below_that_of_a_guest_that_is_off_is_in_use(tmp_path: Path) -> None:
    base = image(tmp_path / "base")
    middle = image(tmp_path / "middle", "-F", "qcow2", "-b", str(base))
    top = image(tmp_path / "top", "-F", "qcow2", "-b", str(middle))
    users = {str(top): ("web2 on alpha", "qcow2"), "/nowhere": ("web3 on beta", "qcow2")}
    for place in (base, middle, top):
        with pytest.raises(GuestLocked, match="in use by guest web2 on alpha"):
            backing_chain.check_backing_chain([place], users)
    backing_chain.check_backing_chain([image(tmp_path / "other"), tmp_path / "new"], users)
    (tmp_path / "link").symlink_to(base)
    with pytest.raises(GuestLocked):
        backing_chain.check_backing_chain([tmp_path / "link"], users)
