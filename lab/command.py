"""The place of the `vmckpt lab` commands, for the CLI. Imports no other lab module. Pure data."""

from vmckpt.cli.commands import Place

LAB = Place(
    "cli",
    "app",
    "Create libvirt hosts on this machine for tests.",
    package="vmckpt_lab",
)
