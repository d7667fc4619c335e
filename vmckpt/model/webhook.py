"""Reporting over HTTP: metrics for Prometheus, and receivers to which alerts are posted."""

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
class AlertmanagerPlace:
    """An Alertmanager that is kept informed of the active alerts."""

    url: str
    """Its URL, without /api/v2."""
    username: str | None = None
    password_file: Path | None = None

    @property
    def shown(self) -> str:
        """The kind and the host name, for messages."""
        return f"Alertmanager {urlsplit(self.url).hostname or '?'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address to listen on."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringOptions:
    """Where a service reports what it observes."""

    metrics: Address | None = None
    """Address that serves metrics to Prometheus; None: no metrics."""
    alerts: bool = False
    """Whether alerts are sent to the inventory's receivers."""


NO_MONITORING = MonitoringOptions()
