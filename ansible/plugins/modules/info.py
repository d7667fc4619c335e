#!/usr/bin/python
"""Read hosts, guests, protections and snapshots."""

from __future__ import annotations

DOCUMENTATION = r"""
module: info
short_description: Read hosts, guests, protections and snapshots
version_added: "0.1.0"
description:
  - Reads what vmckpt knows about hosts, guests, protections and, on request, snapshots.
attributes:
  check_mode:
    description: Whether the module can predict changes without making them.
    support: full
author:
  - The vmckpt authors (@vmckpt)
options:
  snapshots:
    description: Also list the snapshots of the store.
    type: bool
    default: false
  store:
    description: Store whose snapshots are listed, by its name in hosts.yaml. Default is the first.
    type: str
extends_documentation_fragment:
  - vmckpt.vmckpt.command
"""

EXAMPLES = r"""
- name: Read the state of all guests
  vmckpt.vmckpt.info:
  delegate_to: localhost
  register: state

- name: Fail unless all standbys are ready
  ansible.builtin.assert:
    that: state.protections | rejectattr('standby.ready') | length == 0
"""

RETURN = r"""
hosts:
  description: The hosts, as printed by C(vmckpt hosts --json).
  returned: always
  type: list
  elements: dict
guests:
  description: The guests, as printed by C(vmckpt guests --json).
  returned: always
  type: list
  elements: dict
protections:
  description: The protections, as printed by C(vmckpt status --json).
  returned: always
  type: list
  elements: dict
snapshots:
  description: The snapshots, as printed by C(vmckpt snapshot list --json).
  returned: if O(snapshots=true)
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vmckpt.vmckpt.plugins.module_utils.command import ARGUMENTS, Vmckpt


def main():
    module = AnsibleModule(
        argument_spec=dict(
            ARGUMENTS, snapshots={"type": "bool", "default": False}, store={"type": "str"}
        ),
        supports_check_mode=True,
    )
    vmckpt = Vmckpt(module)
    result = {
        "hosts": vmckpt.run("hosts")[1],
        "guests": vmckpt.run("guests")[1],
        "protections": vmckpt.run("status")[1],
    }
    if module.params["snapshots"]:
        store = ["--store", module.params["store"]] if module.params["store"] else []
        result["snapshots"] = vmckpt.run("snapshot", "list", *store)[1]
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
