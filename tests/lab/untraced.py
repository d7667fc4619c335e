"""Run a program under a seccomp filter that refuses ptrace(2), as some hosts do.

    python -m tests.lab.untraced COMMAND ...

What the program starts is under it, too. Needs root; x86-64 only.
"""

import ctypes
import errno
import os
import struct
import sys

_SET_SECCOMP, _FILTER = 22, 2
_PTRACE, _X86_64 = 101, 0xC000003E
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000
_NUMBER_AT, _MACHINE_AT = 0, 4  # in struct seccomp_data


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse() -> None:
    """For this process and all that it starts. Raises OSError."""
    code = b"".join(
        struct.pack("<HBBI", *one)
        for one in (
            (_LOAD, 0, 0, _MACHINE_AT),
            (_EQUAL, 0, 3, _X86_64),
            (_LOAD, 0, 0, _NUMBER_AT),
            (_EQUAL, 0, 1, _PTRACE),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    program = _Program(len(code) // 8, code)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no filter can be set")


if __name__ == "__main__":
    refuse()
    os.execvp(sys.argv[1], sys.argv[1:])
