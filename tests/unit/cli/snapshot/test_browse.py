"""vmckpt snapshot open: disks over NBD for their user alone, memory as a core."""

import json
import stat
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.opened_snapshots import serving
from tests.support.partitioned import with_files
from tests.support.stocking import Stock, page, stocked
from vmckpt.capture.nbd.session import Export
from vmckpt.snapshot.browse import Browse


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def as_nobody(*words: str) -> "subprocess.CompletedProcess[str]":
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    return subprocess.run([*drop, *words], capture_output=True, text=True, check=False, cwd="/")


CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def test_a_disk_is_served_until_somebody_stops_it(stock: Stock) -> None:
    key = str(stock.encrypt())
    stock.put("one", [1, 2], disk=7)
    with serving("--nbd", "disk.sock", "--identity", key) as told:
        uri = f"nbd+unix:///vda?socket={Path('disk.sock').absolute()}"
        assert told["exports"] == {"vda": uri}
        assert stat.S_IMODE(Path("disk.sock").stat().st_mode) == 0o600
        subprocess.run(["qemu-img", "convert", "-O", "raw", uri, "disk.raw"], check=True)
    assert Path("disk.raw").read_bytes() == page(7, 65536)
    assert not Path("disk.sock").exists()


def test_no_other_user_reads_a_disk_that_is_served(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is the last thing to keep them out, so it is opened for the trial."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")  # which every user can enter
    stock.put("one", [1, 2], disk=7)
    with serving() as told:
        uri = told["exports"]["vda"]
        place = Path(parse_qs(urlsplit(uri).query)["socket"][0])
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        for mode in (0o700, 0o755):
            place.parent.chmod(mode)
            refused = as_nobody("/usr/bin/python3", "-c", CONNECT, str(place))
            assert "PermissionError" in refused.stderr
            assert as_nobody("qemu-img", "info", uri).returncode != 0
        subprocess.run(["qemu-img", "convert", "-O", "raw", uri, "disk.raw"], check=True)
    assert Path("disk.raw").read_bytes() == page(7, 65536)
    assert not place.parent.exists()


def test_on_a_port_other_users_lack_the_key(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    stock.put("one", [1, 2], disk=7)
    with serving("--listen", "0") as told:
        uri = urlsplit(told["exports"]["vda"])
        key = Path(parse_qs(uri.query)["tls-psk-file"][0])
        assert key.parent == Path(told["tls_psk_dir"])
        image = f"driver=nbd,host=127.0.0.1,port={uri.port},export=vda,tls-creds=key"
        words = ["qemu-img", "convert", "-O", "raw", "--object"]
        words += [f"tls-creds-psk,id=key,endpoint=client,dir={key.parent}", "--image-opts", image]
        refused = as_nobody(*words, "/dev/null")
        assert "Permission denied" in refused.stderr
        assert as_nobody("qemu-img", "info", f"nbd://127.0.0.1:{uri.port}/vda").returncode != 0
        subprocess.run([*words, "disk.raw"], check=True)
    assert Path("disk.raw").read_bytes() == page(7, 65536)
    assert not key.parent.exists()


def test_what_is_wanted_must_be_said_and_be_there(stock: Stock) -> None:
    stock.put("one", [1])
    for words, code, why in (
        (("--nbd", "x", "--listen", "0"), 2, "--core are mutually exclusive"),
        (("--nbd", "x", "--core", "y"), 2, "--core are mutually exclusive"),
        (("--nbd", "x", "--disk", "vdz"), 2, "no disk 'vdz'; choose one of its disks: vda"),
        (("--nbd", "x", "--disk", "vda:1"), 2, "only complete disks can be served; use --disk vda"),
        (("--listen", "0.0.0.0:0"), 2, "other machines could read"),
        (("--listen", "99999"), 2, "is not a valid port or address"),
        (("--files", "/"), 2, "only ext2, ext3 and ext4"),
    ):
        got, _, told = stock("open", "one", *words)
        assert (got, why in told, len(told.splitlines())) == (code, True, 1), told
    stock.encrypt()
    stock.put("two", [1])
    got, _, told = stock("open", "two", "--nbd", "x")
    assert (got, "is encrypted" in told) == (43, True)


def test_a_file_comes_out_of_a_partition(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/fstab").write_text("UUID=1 / ext4\n")
    data = with_files(tree, tmp_path / "disk.raw")
    export = Export(size=len(data), read=lambda at, length: data[at : at + length])
    monkeypatch.setattr(Browse, "export", lambda _browse, _disk: export)
    stock.put("one", [1])
    done = stock("open", "one", "--disk", "vda:2", "--get", "/etc/fstab", "--to", "-")
    assert done == (0, "UUID=1 / ext4\n", "")


def test_memory_comes_out_as_a_core(stock: Stock) -> None:
    stock.put("one", [5, -1, 6])
    code, told, _ = stock("open", "one", "--core", "one.core", "--json")
    assert (code, json.loads(told)["bytes"]) == (0, Path("one.core").stat().st_size)
    assert Path("one.core").read_bytes().endswith(page(5) + bytes(4096) + page(6))
    program = ["readelf", "-hl", "one.core"]
    said = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "CORE (Core file)" in said.stdout
    assert stock("open", "one", "--core", "one.core")[0] == 2
