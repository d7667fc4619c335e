"""Who is told by itself how things stand: by HTTP, when it asks or when somebody has to look."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One address that pages are posted to."""

    url: str
    secret_file: Path | None = None
    """What bodies are signed with; None: they are not."""

    @property
    def shown(self) -> str:
        """For people: the rest of a URL may be a secret."""
        return urlsplit(self.url).hostname or "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where something listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """Whom a service tells what it sees."""

    metrics: Address | None = None
    """Where Prometheus asks; None: it does not."""
    webhooks: bool = False
    """Whether those of the inventory are told."""


NOBODY = WebhookOptions()
