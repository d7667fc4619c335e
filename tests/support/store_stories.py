"""What is done to a store while it is killed or disturbed, and what the store looked like before.

Run as a program it forks a child per line of input ("story fault folder"), so that each child is
killed at its point without paying for the libraries again; it answers with how the child ended.
"""

import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.support.storing import SEALING, chunk, chunks, gc, manifest_of, new_store, write
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.repository import Store


def prepare(folder: Path) -> Store:
    """Two snapshots that share chunks; packs that a collection will rewrite, condemn and remove."""
    store = new_store(folder)
    write(store, "old", chunks(*range(12)))
    write(store, "kept", chunks(0, 4, 8, 20, 21))
    write(store, "older", chunks(*range(30, 38)))
    store.delete("older")
    store.put_wraps("copied-in-part", b"a key")
    gc(store, life=0.0)  # condemns what `older` needed, and these keys
    store.delete("old")
    # What a writer left that was killed.
    store.backend.put("locks/write-dead", b"nonsense")
    store.put_wraps("never-published", b"a key")
    (folder / "tmp" / "half").write_bytes(b"half a pack")
    return store


def writing(store: Store) -> None:
    write(store, "new", chunks(0, 1, 4, 30, *range(40, 44)))


def deleting(store: Store) -> None:
    store.delete("kept")


def pinning(store: Store) -> None:
    store.pin("kept")
    store.unpin("kept")


def collecting(store: Store) -> None:
    gc(store, life=0.0)


def twice(store: Store) -> None:
    """Two snapshots of one writer, as of a group of guests."""
    with store.writer(SEALING, pack_size=9000, parallel=2) as writer:
        coming = [writer.add(chunk(number)) for number in (50, 51, 52, 0)]
        writer.finish()
        digests = [one.result() for one in coming]
        store.publish("a", manifest_of(digests[:2]), None, writer=writer)
        store.publish("b", manifest_of(digests[2:]), b"a key", writer=writer)


def busy(store: Store) -> None:
    """Writes and deletes snapshots of its own that share chunks with those of others."""
    rng = random.Random(os.getpid())
    mine: list[str] = []
    for _ in range(15):
        id_ = f"{os.getpid()}-{len(mine)}-{rng.randrange(10**6)}"
        write(store, id_, chunks(*rng.sample(range(100, 140), 10)))
        mine.append(id_)
        while len(mine) > 3:
            store.delete(mine.pop(rng.randrange(len(mine))))


BUSY = 3
"""Processes that are busy at once."""
STORIES: dict[str, Callable[[Store], None]] = {
    "writing": writing,
    "deleting": deleting,
    "pinning": pinning,
    "collecting": collecting,
    "twice": twice,
}


def main() -> None:
    for line in sys.stdin:
        story, folder, fault = line.rstrip("\n").split("\t")
        count = BUSY if story == "busy" else 1
        told = [_child(story, folder, fault) for _ in range(count)]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in told]
        print(ended[0] if count == 1 else sum(map(abs, ended)), flush=True)  # noqa: T201


def _child(story: str, folder: str, fault: str) -> int:
    child = os.fork()
    if child == 0:
        os.environ["VMCKPT_FAULT"] = fault
        work = busy if story == "busy" else STORIES[story]
        status = 1
        try:
            work(Store.open(LocalFolder(Path(folder))))
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    return child


if __name__ == "__main__":
    main()
