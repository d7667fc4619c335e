#!/usr/bin/python
"""Create, delete or restore a snapshot of a guest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: snapshot
short_description: Create, delete or restore a snapshot of a guest
version_added: "0.1.0"
description:
  - Makes sure that a guest has a snapshot with a name, or that it has none.
  - With O(state=restored), replaces the guest by the snapshot. This is done each time.
attributes:
  check_mode:
    description: Whether the module can predict changes without making them.
    support: full
author:
  - The vmckpt authors (@vmckpt)
options:
  guest:
    description: Name of the guest.
    type: str
    required: true
  name:
    description: Name of the snapshot.
    type: str
    required: true
  state:
    description: What is to be done.
    type: str
    default: present
    choices: [present, absent, restored]
  memory:
    description: Whether a new snapshot includes the memory.
    type: bool
    default: true
  store:
    description: Store, by its name in hosts.yaml. Default is the first one.
    type: str
extends_documentation_fragment:
  - vmckpt.vmckpt.command
"""

EXAMPLES = r"""
- name: Take a snapshot before an upgrade
  vmckpt.vmckpt.snapshot:
    guest: web1
    name: before-upgrade
  delegate_to: localhost

- name: Go back
  vmckpt.vmckpt.snapshot:
    guest: web1
    name: before-upgrade
    state: restored
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The report of vmckpt.
  returned: if something was changed
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.vmckpt.vmckpt.plugins.module_utils.command import ARGUMENTS, Vmckpt


def main():
    module = AnsibleModule(
        argument_spec=dict(
            ARGUMENTS,
            guest={"type": "str", "required": True},
            name={"type": "str", "required": True},
            state={
                "type": "str",
                "choices": ["present", "absent", "restored"],
                "default": "present",
            },
            memory={"type": "bool", "default": True},
            store={"type": "str"},
        ),
        supports_check_mode=True,
    )
    vmckpt = Vmckpt(module)
    given = module.params
    store = ["--store", given["store"]] if given["store"] else []
    found = [
        one["id"]
        for one in vmckpt.run("snapshot", "list", given["guest"], *store)[1]
        if one["name"] == given["name"]
    ]
    state = given["state"]
    if len(found) > 1:
        module.fail_json(msg=f"{len(found)} snapshots have the name {given['name']}")
    if state == "restored" and not found:
        module.fail_json(msg=f"{given['guest']} has no snapshot {given['name']}")
    if (state == "present" and found) or (state == "absent" and not found):
        module.exit_json(changed=False)
    if module.check_mode:
        module.exit_json(changed=True)
    if state == "present":
        words = ["create", given["guest"], "--name", given["name"]]
        words += [] if given["memory"] else ["--no-memory"]
    elif state == "absent":
        words = ["delete", found[0], "--yes"]
    else:
        words = ["restore", found[0], "--replace", "--yes"]
    module.exit_json(changed=True, report=vmckpt.run("snapshot", *(words + store))[1])


if __name__ == "__main__":
    main()
