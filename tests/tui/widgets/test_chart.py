"""Charts as text: what they show, and when there is nothing to be read from them."""

from textual.app import App, ComposeResult

from tests.support.dashboards import seen
from vmckpt_tui.screens.migration_view import Lines
from vmckpt_tui.widgets.chart import Chart

FALLS = Lines(title="— remaining", unit="MiB", solid=((0.0, 10.0, 40.0), (4000.0, 2500.0, 0.0)))


class Shown(App[None]):
    """Nothing but a chart."""

    def compose(self) -> ComposeResult:
        yield Chart()


async def drawn(lines: Lines | None, size: tuple[int, int] = (60, 12)) -> str:
    app = Shown()
    async with app.run_test(size=size) as pilot:
        if lines is not None:
            app.query_one(Chart).show(lines)
        await pilot.pause()
        return seen(app)


async def test_a_chart_has_its_title_its_unit_and_round_numbers_at_its_edges() -> None:
    text = await drawn(FALLS)
    assert text.startswith("— remaining (MiB)")
    lines = text.splitlines()
    assert any(line.strip().startswith("4,000") for line in lines)
    assert lines[-1].split() == ["0", "20", "40", "s"]


async def test_one_sample_is_no_line() -> None:
    one = Lines(title="— remaining", unit="MiB", solid=((0.0,), (4000.0,)))
    assert (await drawn(None)).split() == ["no", "samples", "yet"]
    assert (await drawn(one)).split() == ["no", "samples", "yet"]


async def test_where_nothing_could_be_read_nothing_is_drawn() -> None:
    assert (await drawn(FALLS, (12, 12))).strip() == ""
    assert (await drawn(FALLS, (60, 3))).strip() == ""


async def test_a_forecast_that_ends_later_has_a_place() -> None:
    band = (((0.0, 80.0), (4000.0, 0.0)), ((0.0, 200.0), (4000.0, 0.0)))
    later = Lines(title="— remaining", unit="MiB", solid=FALLS.solid, band=band)
    assert (await drawn(later)).splitlines()[-1].split() == ["0", "100", "200", "s"]
