"""The facade's part for looking at what is not there: made-up hosts, and recorded migrations."""

from collections.abc import Sequence
from pathlib import Path

from vmckpt.policy import loader
from vmckpt.policy.model import Policy
from vmckpt.simulation import fleet
from vmckpt.simulation.replay import Replayed
from vmckpt.simulation.source import Showing


def simulated(text: str) -> Showing:
    """Hosts and guests that are made up: "24x300". Raises BadInput."""
    hosts, guests = fleet.parsed(text)
    return Showing(hosts, guests)


def replayed(path: Path) -> Replayed:
    """A recorded migration, as it went. Raises BadInput."""
    return Replayed(path)


def policies() -> Sequence[Policy]:
    """Those that come with vmckpt."""
    return loader.survey(loader.folder(None, None)).policies
