"""The entry point of vmckpt. It prepares the process before it loads the rest of the package.

Ctrl-C during loading exits cleanly. Closed standard streams are replaced with /dev/null, so that no
other file gets their descriptors.
"""

import gc
import os
import sys


def main() -> None:
    """Run the command line and exit with the code that docs/reference.md documents."""
    _open_what_is_closed()
    try:
        from vmckpt.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)
    code = run(sys.argv[1:])
    gc.freeze()  # at its exit, Python would spend 0.1 s on a search for garbage in all modules
    sys.exit(code)


def _open_what_is_closed() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


if __name__ == "__main__":
    main()
