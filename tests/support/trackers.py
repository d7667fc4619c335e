"""Find the trackers of guests by their sockets: `python -m tests.support.trackers` in a host."""

from pathlib import Path

from vmckpt.util import host_directories


def running(folder: Path) -> list[int]:
    """Process IDs of the trackers whose sockets are in this directory."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    wanted = {
        f"socket:[{words[6]}]" for words in lines if words[7:] and words[7].startswith(f"{folder}/")
    }
    return [
        int(one.name) for one in Path("/proc").glob("[0-9]*") if wanted & {*map(_link, _files(one))}
    ]


def _files(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    print(*running(host_directories.RUN / "tracking"))  # noqa: T201
