"""The facts about a guest and two hosts that preflight checks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vmckpt.definition.needs import Answers, Resource
from vmckpt.model.disk import Checkpoint
from vmckpt.model.guest import Guest
from vmckpt.model.host import HostFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that preflight checks."""

    name: str
    """The guest, as the operator named it."""
    source: str
    target: str
    guest: Guest | None = None
    """The guest; None if the source does not have it, or does not answer."""
    source_facts: HostFacts | None = None
    source_error: str | None = None
    target_facts: HostFacts | None = None
    target_error: str | None = None
    target_links: frozenset[str] | None = None
    """Bridges and interfaces of the target; None if unknown."""
    same_file: Mapping[str, bool] = field(default_factory=dict)
    """Whether both hosts have the same file or block device, by path; absent if unknown."""
    on_target: Mapping[str, bool] = field(default_factory=dict)
    """Whether a path that the guest may need exists on the target; absent if unknown."""
    copied: frozenset[str] = frozenset()
    """Files of disks that are copied, which need not be the same on both hosts."""
    cpu_fits: bool | None = None
    peer_login_error: str | None = None
    post_copy_error: str | None = None
    """Why the target cannot receive a guest in post-copy; None if it can, or if unknown."""
    post_copy_asked: bool = True
    """Whether the target's support for post-copy could be queried."""
    memory_folder: str | None = None
    """Type of the target's file system for memory files, such as "tmpfs"; None if unknown."""
    ssh_errors: tuple[str, ...] = ()
    target_closed: str | None = None
    """Why no guest may be placed on the target; None if no reason is known."""
    needs: tuple[Resource, ...] = ()
    """What the guest's definition needs from its host."""
    answers: Answers = field(default_factory=dict)
    """Whether the target has each resource, or what replaces the resource; absent if unknown."""
    blocked: tuple[str, ...] = ()
    """QEMU's reasons against migrating the guest."""
    refused: str | None = None
    """Why the target's libvirt would not start the guest; None if no reason is known."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """The guest's checkpoints that other tools made, parents first."""
