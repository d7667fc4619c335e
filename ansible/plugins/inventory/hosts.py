"""Use the hosts of a vmckpt inventory in Ansible."""

from __future__ import annotations

DOCUMENTATION = r"""
name: hosts
short_description: The hosts of a vmckpt inventory
version_added: "0.1.0"
description:
  - Reads a vmckpt inventory, and adds its hosts to the group C(vmckpt).
  - Each label of a host is a group with the name LABEL_VALUE, for example C(rack_a1).
  - Does not contact any host.
author:
  - The vmckpt authors (@vmckpt)
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices: [vmckpt.vmckpt.hosts]
  hosts_yaml:
    description: Path of vmckpt's hosts.yaml, relative to this file.
    type: str
    default: hosts.yaml
extends_documentation_fragment:
  - constructed
requirements:
  - PyYAML
"""

EXAMPLES = r"""
# vmckpt.yml
plugin: vmckpt.vmckpt.hosts
hosts_yaml: /etc/vmckpt/hosts.yaml
"""

from pathlib import Path

import yaml
from ansible.errors import AnsibleParserError

from ansible.plugins.inventory import BaseInventoryPlugin, Constructable

NAMES = ("vmckpt.yml", "vmckpt.yaml")


class InventoryModule(BaseInventoryPlugin, Constructable):
    """Reads hosts.yaml."""

    NAME = "vmckpt.vmckpt.hosts"

    def verify_file(self, path):
        return super().verify_file(path) and Path(path).name.endswith(NAMES)

    def parse(self, inventory, loader, path, cache=True):
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        name = Path(path).parent / self.get_option("hosts_yaml")
        try:
            hosts = yaml.safe_load(name.read_text(encoding="utf-8"))["hosts"]
            found = {name: dict(host or {}) for name, host in hosts.items()}
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as exc:
            raise AnsibleParserError(f"{name}: not a vmckpt inventory: {exc}") from exc
        group = inventory.add_group("vmckpt")
        for host, about in found.items():
            inventory.add_host(host, group)
            ssh = about.get("ssh") or {}
            for key, variable in (
                ("address", "ansible_host"),
                ("user", "ansible_user"),
                ("port", "ansible_port"),
                ("key_file", "ansible_ssh_private_key_file"),
            ):
                if key in ssh:
                    inventory.set_variable(host, variable, ssh[key])
            labels = about.get("labels") or {}
            inventory.set_variable(host, "vmckpt_uri", about.get("uri"))
            inventory.set_variable(host, "vmckpt_labels", labels)
            for label, value in labels.items():
                added = inventory.add_group(self._sanitize_group_name(f"{label}_{value}"))
                inventory.add_host(host, added)
            variables = inventory.get_host(host).get_vars()
            strict = self.get_option("strict")
            self._set_composite_vars(self.get_option("compose"), variables, host, strict)
            self._add_host_to_composed_groups(self.get_option("groups"), variables, host, strict)
            self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, host, strict)
