"""The options that all modules have."""

from __future__ import annotations


class ModuleDocFragment:
    """Options for the vmckpt that a module runs."""

    DOCUMENTATION = r"""
options:
  executable:
    description: The program vmckpt on the controller, as a path or as a name in E(PATH).
    type: path
    default: vmckpt
  vmckpt_inventory:
    description: Path of hosts.yaml. Default is the file that vmckpt itself finds.
    type: path
  vmckpt_policies:
    description: Directory of policies. Default is the directory that vmckpt itself finds.
    type: path
requirements:
  - vmckpt on the machine that runs the module, usually the controller
"""
