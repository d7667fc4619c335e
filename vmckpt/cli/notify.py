"""vmckpt notify: send a test alert to every receiver."""

import asyncio

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.errors import AlertNotDelivered
from vmckpt.units import show_count

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def notify(inventory: INVENTORY = None, json: JSON = False) -> None:
    """Send a test alert to every receiver in the inventory.

    The receivers are those to which vmckpt run sends alerts: webhooks, Alertmanagers, and the
    services in the Apprise file. Each of them gets one test alert, which is not retried. An
    Alertmanager considers the alert VmckptTest resolved after 5 minutes. The exit code is 6 if a
    receiver did not accept the alert.

    Examples:

        vmckpt notify

        vmckpt notify --json
    """
    from vmckpt.app import controller, monitoring

    tested = asyncio.run(monitoring.send_test(controller.load_inventory(inventory)))
    if json:
        output.print_json({"receivers": [one.as_json() for one in tested]})
    else:
        table = output.table("receiver", "result")
        for one in tested:
            result = "delivered" if one.error is None else f"not delivered: {one.error}"
            table.add_row(one.receiver, output.in_one_line(result))
        output.out.print(table)
    if wrong := [one.receiver for one in tested if one.error is not None]:
        raise AlertNotDelivered(
            f"{show_count(len(wrong), 'receiver')} did not accept the test alert:"
            f" {', '.join(wrong)}",
            hint="check its address and secret in hosts.yaml, then run vmckpt notify again",
        )
