"""Tables for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(rows: list[dict]) -> None:
    """Print rows of the same keys, a column for each, all to the right; whole, however narrow the terminal is."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in rows[0]))
    # Rich cuts what is wider than its console. The height is given because a dumb terminal's width is 80 without.
    Console(width=10_000, height=len(rows), markup=False, emoji=False).print(table)


def _cell(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
