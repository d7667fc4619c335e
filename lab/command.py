"""Where `vmckpt lab` is; loads nothing else of the lab. Pure data."""

from vmckpt.cli.commands import Place

LAB = Place(
    "cli",
    "app",
    "Real libvirt hosts on this machine, each in its own namespaces.",
    package="vmckpt_lab",
)
