"""The process in which a target is fuzzed: `python -m tests.fuzz.harness TARGET [libFuzzer's…]`.

libFuzzer ends the process itself, so this one does nothing else.
"""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

LIBRARIES = ["vmckpt", "yaml", "tests.fuzz.targets", "tests.fuzz.store_targets"]


NONSENSE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.5, 1e-300, "", "x", "1", "\x00",
    [], [[]], [1], {}, {"a": 1},
)  # fmt: skip
"""What takes the place of a value in JSON."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where values stand: (object or list, key)."""
    found = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inside in found:
        yield value, key
        if isinstance(inside, dict | list):
            yield from places(inside)


def mutated(text: str, chance: random.Random) -> str | None:
    """A text of JSON lines, in one of which a value is another; None if it is no such text."""
    lines = text.split("\n")
    which = chance.randrange(len(lines))
    try:
        value = json.loads(lines[which])
        spots = list(places(value)) if isinstance(value, dict | list) else []
    except (ValueError, RecursionError):
        return None
    if not spots:
        return None
    inside, key = chance.choice(spots)
    if chance.random() < 0.1 and isinstance(inside, dict):
        del inside[key]
    else:
        inside[key] = chance.choice(NONSENSE)
    lines[which] = json.dumps(value)
    if chance.random() < 0.1:
        lines.insert(chance.randrange(len(lines)), lines[which])
    return "\n".join(lines)


def scratched(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, doubled, taken out or put in."""
    found = bytearray(data or b" ")
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        to = min(len(found), at + chance.randint(0, 8))
        found[at:to] = chance.choice(
            (b"", found[at:to] * 2, chance.randbytes(chance.randint(1, 4)), b'"', b"{", b"]", b"-")
        )
    return bytes(found)


def change(data: bytes, most: int, seed: int) -> bytes:
    """For JSON: mostly a value that stands where another did, which few changed bytes make."""
    chance = random.Random(seed)
    found = mutated(data.decode("utf-8", "replace"), chance) if chance.random() < 0.7 else None
    return (scratched(data, chance) if found is None else found.encode())[:most]


def main(arguments: list[str]) -> None:
    """Fuzz one target until libFuzzer has enough."""
    name, *options = arguments
    # Not installed where only the corpus is replayed.
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=LIBRARIES, enable_loader_override=False):
        targets = importlib.import_module("tests.fuzz.targets")
    own = {"custom_mutator": change} if name in targets.JSON else {}
    atheris.Setup([sys.argv[0], *options], targets.TARGETS[name], **own)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
