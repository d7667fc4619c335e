"""Run a command of vmckpt on the controller, and read its JSON output."""

from __future__ import annotations

import json
import os

ARGUMENTS = {
    "executable": {"type": "path", "default": "vmckpt"},
    "vmckpt_inventory": {"type": "path"},
    "vmckpt_policies": {"type": "path"},
}

LEFT_BEHIND = 26


class Vmckpt:
    """The commands of the vmckpt on this machine."""

    def __init__(self, module):
        self._module = module
        self.executable = module.params["executable"]
        if os.sep not in self.executable:
            self.executable = module.get_bin_path(self.executable, required=True)
        self._environment = {"NO_COLOR": "1"}
        for parameter, variable in (
            ("vmckpt_inventory", "VMCKPT_INVENTORY"),
            ("vmckpt_policies", "VMCKPT_POLICIES"),
        ):
            if module.params.get(parameter):
                self._environment[variable] = module.params[parameter]

    def run(self, *words, **options):
        """Run a command with --json. Returns its exit code and its output.

        `accept`: exit codes besides 0 that do not make the module fail.
        """
        command = [self.executable, *map(str, words), "--json"]
        code, out, err = self._module.run_command(command, environ_update=self._environment)
        try:
            answer = json.loads(out) if out.strip() else None
        except ValueError:
            self._module.fail_json(
                msg=f"vmckpt {words[0]} did not print JSON", rc=code, stdout=out, stderr=err
            )
        if code != 0 and code not in options.get("accept", ()):
            self._module.fail_json(
                msg=self._reason(answer, err) or f"exit code {code}",
                rc=code,
                cmd=command,
                report=answer,
                stderr=err,
            )
        return code, answer

    @staticmethod
    def _reason(answer, err):
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            return answer["error"]
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        return lines[-1][len("error: ") :] if lines else err.strip()

    def guest(self, name):
        """Return the guest with a name or UUID. Fails if there is none, or more than one.

        Standbys and test copies, which have the name of their guest, do not count.
        """
        found = [
            one
            for one in self.run("guests")[1]
            if name in (one["name"], one["uuid"]) and one["state"] not in ("standby", "test")
        ]
        if len(found) != 1:
            many = f"{len(found)} guests have this name" if found else "no such guest"
            self._module.fail_json(msg=f"{name}: {many}")
        return found[0]
