"""The figures of README.md and docs/, drawn from the records: one style, sized for a page that is 800 pixels wide."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, PLAIN, PEER = "#1f6fb4", "#9a9a9a", "#c44e52"
WIDTH = 9.0  # inches; with DPI twice the width of a page, for screens of high density
DPI = 180


def new_figure(height: float, columns: int = 1, ratios: list[float] | None = None) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, width_ratios=ratios)[0]
    for each in axes:
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    return figure, list(axes)


def save(figure: Figure, path: Path) -> None:
    # Without the version of matplotlib the same records give the same file.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def speedups(panels: dict[str, dict[str, float]], path: Path) -> None:
    """A panel for each peer: a bar for each case, how many times as long the peer takes. Each has an axis of its own, from 0."""
    tallest = max(len(bars) for bars in panels.values())
    figure, all_axes = new_figure(0.45 * tallest + 1.1, len(panels))
    for axes, (peer, bars) in zip(all_axes, panels.items()):
        names, values = list(bars), list(bars.values())
        drawn = axes.barh(range(len(names)), values, color=OURS, height=0.65)
        axes.bar_label(drawn, [f"{value:,.0f}x" if value >= 100 else f"{value:.1f}x" for value in values], padding=4)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(tallest - 0.5, -0.5)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_title(peer, fontsize=12)
    figure.supxlabel("times as fast, forward and backward on an NVIDIA H200", fontsize=12)
    save(figure, path)


def memory(lines: dict[str, list[tuple[int, float | None]]], capacity: float, path: Path) -> None:
    """Peak GiB against the batch, None where it ran out of memory. Both axes are linear in factors of two, as batches are."""
    figure, (axes,) = new_figure(4.2)
    colors = dict(zip(lines, (PEER, PLAIN, OURS)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(capacity, color="0.3", linewidth=1, linestyle=":")
    axes.annotate(
        f"the GPU's {capacity:.0f} GiB", (1, capacity), xytext=(0, 4), textcoords="offset points", color="0.3"
    )
    for name, points in lines.items():
        held = [(batch, gib) for batch, gib in points if gib is not None]
        lost = len(held) < len(points)
        last, gib = held[-1]
        said = f"{name}: {last} at most" if lost else f"{name}: {gib:.1f} GiB at {last:,}"
        axes.plot(*zip(*held), marker="o", linewidth=2.5, color=colors[name], label=said)
        if lost:
            axes.plot([last], [gib], marker="x", markersize=11, markeredgewidth=3, color=colors[name])
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.86), labelcolor="linecolor", fontsize=11)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    gibs = [0.25, 1, 4, 16, 64, 256]
    axes.set_yticks(gibs, [f"{gib:g}" for gib in gibs])
    axes.minorticks_off()
    axes.set_ylim(0.2, 400)
    axes.set_xlabel("batch: utterances of 20 s, 99 labels, 8,193 tokens")
    axes.set_ylabel("peak GiB, joint network and loss")
    save(figure, path)
