import signal
from typing import Any

import pytest
from hypothesis import settings

from tests import schemas
from vmckpt.cli import output

# By the clock an example takes as long as whoever has the cores leaves it.
settings.register_profile("vmckpt", deadline=None)
settings.load_profile("vmckpt")

# Of a shell's background, or under nohup, what tests start would ignore these for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _what_is_printed_as_json_has_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of commands that run in this process; Bench looks at those that do not."""
    write = output.print_json

    def checked(value: Any, *, line: bool = False) -> None:
        schemas.held(schemas.running(), value)
        write(value, line=line)

    monkeypatch.setattr(output, "print_json", checked)
