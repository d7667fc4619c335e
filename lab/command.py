"""The location of `vmckpt lab`. Imports nothing else of the lab. Pure data."""

from vmckpt.cli.commands import Place

LAB = Place(
    "cli",
    "app",
    "Create libvirt hosts on this machine for tests.",
    package="vmckpt_lab",
)
