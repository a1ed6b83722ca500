#!/usr/bin/env python3
"""Put the measurements of benchmarks/results/nvidia-h200.json into README.md, and draw them beside it as PNG. Run by `make report`."""

import json
from pathlib import Path

from matplotlib.figure import Figure

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results" / "nvidia-h200.json"
BEGIN, END = "<!-- report -->", "<!-- /report -->"


def label(row: dict) -> str:
    return f"{row['case']} {row['dtype']}"


def by_case(rows: list[dict]) -> dict[str, dict[str, dict]]:
    cases: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["api"] != "lattice":
            cases.setdefault(label(row), {})[row["api"]] = row
    return cases


def milliseconds(row: dict | None) -> str:
    if row is None:
        return ""
    return row.get("lost", "lost") if row["ms"] is None else f"{row['ms']:.3g}"


def mebibytes(row: dict | None) -> str:
    return "" if row is None or row["ms"] is None else f"{row['peak_extra_bytes'] / 2**20:,.0f}"


def table(rows: list[dict]) -> str:
    first = rows[0]
    lines = [
        f"Forward and backward on one {first['gpu']} (PyTorch {first['torch']}, CUDA {first['cuda']}, transformers "
        f"{first['transformers']}, commit {first['commit']}, {first['date']}), medians in ms; peak memory beyond the logits in MiB. "
        f"The floor is three passes over the logits at the copy bandwidth of the same run, {first['copy_tbps']:.2f} TB/s. Logits are "
        "standard normal; rows without occupancy are not read backward, which is how a time can be under the floor.",
        "",
        "| case | B, T, U, V | dtype | floor | `tdt_loss_joint` | CUDA graph | `TDTLoss` on slices | `tdt_loss` | in place "
        "| transformers | MiB | MiB in place | MiB transformers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for apis in by_case(rows).values():
        ours = apis["tdt_loss_joint"]
        in_place, peer = apis.get("tdt_loss_joint, in place"), apis.get("transformers")
        columns = [
            ours["case"],
            ", ".join(map(str, ours["shape"])),
            ours["dtype"],
            f"{ours['floor_ms']:.3g}",
            milliseconds(ours),
            milliseconds(apis.get("tdt_loss_joint, CUDA graph")),
            milliseconds(apis.get("layers.TDTLoss")),
            milliseconds(apis.get("tdt_loss")),
            milliseconds(in_place),
            milliseconds(peer),
            mebibytes(ours),
            mebibytes(in_place),
            mebibytes(peer),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    lattices = [row for row in rows if row["api"] == "lattice"]
    if lattices:
        shapes = "; ".join(f"{', '.join(map(str, row['shape'][:3]))}: {row['ms']:.3g} ms" for row in lattices)
        lines += ["", f"The lattice alone, alpha and beta, B, T, U: {shapes}."]
    return "\n".join([*lines, "", "![Times against the floor](benchmarks/results/nvidia-h200.png)"])


def plot(rows: list[dict], path: Path) -> None:
    cases = by_case(rows)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = {
        "floor": "0.75",
        "tdt_loss_joint, CUDA graph": "tab:blue",
        "tdt_loss_joint": "tab:cyan",
        "transformers": "tab:red",
    }
    for k, (api, color) in enumerate(shown.items()):
        for i, apis in enumerate(cases.values()):
            row = apis["tdt_loss_joint"] if api == "floor" else apis.get(api)
            value = row and (row["floor_ms"] if api == "floor" else row["ms"])
            if value:
                axes.bar(i + (k - 1.5) * 0.2, value, 0.2, color=color, label=api if i == 0 else None)
    axes.set_yscale("log")
    axes.set_ylabel("forward + backward, ms")
    axes.set_xticks(range(len(cases)), list(cases), rotation=30, ha="right")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    rows = json.loads(RESULTS.read_text())
    readme = REPO / "README.md"
    text = readme.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")
    plot(rows, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
