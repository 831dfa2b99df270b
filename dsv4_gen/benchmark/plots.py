"""Pictures of what the benchmark measured. Needs matplotlib, which the package does not depend on."""

from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure


def plot(measured: dict, output: Path) -> None:
    """Draw a decode step and a prefill, where they were measured, into `output` as PNG files."""
    if "decode" in measured:
        curves(
            measured["decode"],
            by=("dtype", "batch"),
            x="context",
            title="A decode step, ms",
            file=output / "decode.png",
        )
    if "prefill" in measured:
        curves(measured["prefill"], by=("dtype",), x="prompt", title="A prefill, ms", file=output / "prefill.png")


def curves(rows: list[dict], by: tuple[str, ...], x: str, title: str, file: Path) -> None:
    """A panel for each value of the columns `by`, and in it a curve for each contender over the column `x`."""
    panels = [(key, list(group)) for key, group in groupby(rows, key=lambda row: [row[column] for column in by])]
    figure = Figure(figsize=(4 * len(panels), 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (key, group) in zip(axes, panels):
        for contender in (column for column in group[0] if column.endswith(", ms")):
            ax.plot([row[x] for row in group], [row[contender] for row in group], "o-", label=contender[:-4])
        ax.set(title=", ".join(f"{column} {value}" for column, value in zip(by, key)), xlabel=x, xscale="log")
        ax.set(yscale="log")
    axes[0].set_ylabel(title)
    axes[0].legend()
    figure.savefig(file)
