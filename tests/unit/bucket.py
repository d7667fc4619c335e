"""A server that speaks S3, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import boto3  # type: ignore[import-untyped]

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "nothing secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """Stop it, whatever happens."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        program = Path(sys.executable).parent / "moto_server"
        self._process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | CREDENTIALS,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def bucket(self, name: str) -> None:
        boto3.session.Session().client("s3", endpoint_url=self.endpoint).create_bucket(Bucket=name)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        until = time.monotonic() + 30
        while True:
            try:
                with urlopen(self.endpoint, timeout=1):
                    return
            except (URLError, OSError):
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
