"""Servers that speak S3, each a process: moto, a substitute; SeaweedFS; and rclone, a bad one."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "nothing secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_PROGRAMS = Path(sys.executable).parent
_SLOW = 60.0
"""Seconds a server may take to start on a busy machine."""


class Server(Protocol):
    """Stop it, whatever happens."""

    endpoint: str

    def bucket(self, name: str) -> None: ...

    def kill(self) -> None:
        """End it without a warning."""

    def stop(self) -> None:
        """End it and remove what it kept."""


class _Program:
    """A server that is one program."""

    def __init__(self, command: Callable[[int], Sequence[str | Path]]) -> None:
        """`command` for a port of this machine's."""
        port = _free_ports(1)[0]
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | CREDENTIALS,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def bucket(self, name: str) -> None:
        _client(self.endpoint).create_bucket(Bucket=name)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.kill()

    def _wait(self) -> None:
        until = time.monotonic() + _SLOW
        while True:
            try:
                with urlopen(self.endpoint, timeout=1):
                    return
            except HTTPError:
                return
            except (URLError, OSError):
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)


class Moto(_Program):
    """moto: quick to start, checks no signature, keeps everything in memory."""

    def __init__(self) -> None:
        server = _PROGRAMS / "moto_server"
        super().__init__(lambda port: [server, "-H", "127.0.0.1", "-p", str(port)])


class Rclone(_Program):
    """rclone: writes over what is there, whatever it is asked for."""

    def __init__(self, folder: Path) -> None:
        key = f"{CREDENTIALS['AWS_ACCESS_KEY_ID']},{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}"
        serve: list[str | Path] = [
            _PROGRAMS / "rclone",
            "--config",
            "",
            "serve",
            "s3",
            "--auth-key",
            key,
        ]
        super().__init__(lambda port: [*serve, "--addr", f"127.0.0.1:{port}", folder])


class Seaweed:
    """SeaweedFS: master, volume server, filer and S3 gateway in one process, data in a folder."""

    def __init__(self, *, folder: Path | None = None, tls: tuple[Path, Path] | None = None) -> None:
        """`folder` for its data stays in the end. `tls`: files of a certificate and its key."""
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="vmckpt-s3-"))
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = _free_ports(9)
        self.secure = f"https://127.0.0.1:{self._ports[8]}" if tls else ""
        self.endpoint = f"http://127.0.0.1:{self._ports[6]}"
        identity = {
            "name": "tests", "actions": ["Admin", "Read", "Write", "List"],
            "credentials": [{
                "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
                "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            }],
        }  # fmt: skip
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start it, again on the same data and ports after a kill; it serves on return."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        until = time.monotonic() + _SLOW
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.folder / "log").read_text()[-4000:])
            time.sleep(0.05)

    def bucket(self, name: str) -> None:
        _client(self.endpoint).create_bucket(Bucket=name)

    def kill(self) -> None:
        # Asked to end it takes 25 seconds, and has nothing to lose.
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self.kill()
        # The sockets of its parts are in /tmp whatever TMPDIR says; a new port has a new socket.
        for port in self._ports:
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink()
        if self._own:
            shutil.rmtree(self.folder)

    def _command(self) -> list[str | Path]:
        names = (
            "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
            "filer.port.grpc", "s3.port", "s3.port.grpc", "s3.port.https",
        )  # fmt: skip
        options = dict(zip(names, map(str, self._ports), strict=True))
        options |= {
            "dir": str(self.folder), "ip": "127.0.0.1", "ip.bind": "127.0.0.1",
            "filer.localSocket": f"{self.folder}/filer.sock",
            "s3.localSocket": f"{self.folder}/s3.sock",
            "s3.config": f"{self.folder}/s3.json",
            # Asked for an object in a bucket that is missing, it would make the bucket.
            "s3.autoCreateBucket": "false", "s3.port.iceberg": "0", "s3.port.lance": "0",
            "master.telemetry": "false", "master.volumeSizeLimitMB": "64", "volume.max": "40",
            "master.electionTimeout": "1s", "volume.minFreeSpace": "1MiB",
        }  # fmt: skip
        if self._tls is None:
            del options["s3.port.https"]
        else:
            options["s3.cert.file"], options["s3.key.file"] = map(str, self._tls)
        words = [f"-{name}={value}" for name, value in options.items()]
        return [_PROGRAMS / "weed", "-logtostderr", "server", "-filer", "-s3", *words]

    def _serves(self) -> bool:
        """Whether an object can be written: the gateway answers before it has volumes."""
        client = _client(self.endpoint)
        try:
            _made(client, "ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        except (ClientError, BotoCoreError):
            return False
        return True


def _made(client: Any, bucket: str) -> None:
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as exc:
        if "BucketAlready" not in str(exc):
            raise


@cache  # each of its own would read the description of S3 again, for 0.15 s
def _session() -> boto3.session.Session:
    return boto3.session.Session(
        CREDENTIALS["AWS_ACCESS_KEY_ID"],
        CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
    )


def _client(endpoint: str) -> Any:
    return _session().client(
        "s3",
        endpoint_url=endpoint,
        config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
