"""Plain tables for the terminal."""


def format_table(rows: list[dict]) -> str:
    """Rows of the same keys as aligned text; numbers to the right."""
    header = list(rows[0])
    cells = [[_cell(row[name]) for name in header] for row in rows]
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *cells]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _cell(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
