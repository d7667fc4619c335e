"""A guest that runs on two hosts."""

from dataclasses import replace

from tests.support.builders import GUEST
from vmckpt.model.guest import Copies, GuestState

WEB = replace(GUEST, name="web1", uuid="u-1", state=GuestState.RUNNING)
TWICE = Copies(guest="web1", uuid="u-1", hosts=("alpha", "beta"))
