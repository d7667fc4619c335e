"""Reporting over HTTP: metrics for Prometheus, and webhooks to which alerts are posted."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL to which alerts are posted."""

    url: str
    secret_file: Path | None = None
    """File with the key that signs the bodies; None: bodies are not signed."""

    @property
    def shown(self) -> str:
        """The host name, for messages. The rest of the URL may be secret."""
        return urlsplit(self.url).hostname or "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address to listen on."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookOptions:
    """Where a service reports what it observes."""

    metrics: Address | None = None
    """Address that serves metrics to Prometheus; None: no metrics."""
    webhooks: bool = False
    """Whether alerts are posted to the inventory's webhooks."""


NOBODY = WebhookOptions()
