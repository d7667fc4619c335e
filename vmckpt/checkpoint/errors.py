"""What can go wrong in a capture, as one line.

VmckptError
 +-- CaptureFailed       50   no checkpoint was made; the guest is as it was
      +-- CannotCapture  51   this way cannot capture this guest; the message says why
      +-- StreamDamaged  52   what QEMU wrote, or what was kept of it, is no whole stream
"""

from vmckpt.errors import VmckptError


class CaptureFailed(VmckptError):
    """No checkpoint was made; the guest is as it was."""

    exit_code = 50


class CannotCapture(CaptureFailed):
    """This way cannot capture this guest."""

    exit_code = 51


class StreamDamaged(CaptureFailed):
    """What QEMU wrote, or what was kept of it, is no whole migration stream."""

    exit_code = 52
