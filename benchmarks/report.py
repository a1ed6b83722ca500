#!/usr/bin/env python3
"""Put the measurements of benchmarks/results/nvidia-h200*.json into README.md, and draw them as PNG. Run by `make report`."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from records import REPO, RESULTS, put

SWEEP, FUSED = RESULTS / "nvidia-h200.json", RESULTS / "nvidia-h200-fused.json"
RNNT_APIS = ("rnnt_loss", "rnnt_loss, CUDA graph", "torchaudio")
LATTICES = {"lattice": "TDT", "rnnt lattice": "RNN-T"}


def label(row: dict) -> str:
    return f"{row['case']} {row['dtype']}"


def by_case(rows: list[dict], rnnt: bool = False) -> dict[str, dict[str, dict]]:
    """The rows of the TDT loss, or of the RNN-T loss, by case and then by api."""
    cases: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["api"] not in LATTICES and (row["api"] in RNNT_APIS) == rnnt:
            cases.setdefault(label(row), {})[row["api"]] = row
    return cases


def milliseconds(row: dict | None) -> str:
    if row is None:
        return ""
    return row.get("lost", "lost") if row["ms"] is None else f"{row['ms']:.3g}"


def mebibytes(row: dict | None) -> str:
    return "" if row is None or row["ms"] is None else f"{row['peak_extra_bytes'] / 2**20:,.0f}"


def markdown(header: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(columns) + " |" for columns in [header, ["---"] * len(header), *body]]


def place(row: dict) -> list[str]:
    """The columns that say what was measured."""
    return [row["case"], ", ".join(map(str, row["shape"])), row["dtype"], f"{row['floor_ms']:.3g}"]


PLACE = ["case", "B, T, U, V", "dtype", "floor"]


def tdt_table(rows: list[dict]) -> list[str]:
    body = []
    for apis in by_case(rows).values():
        ours = apis["tdt_loss_joint"]
        in_place, peer = apis.get("tdt_loss_joint, in place"), apis.get("transformers")
        shown = [
            ours,
            apis.get("tdt_loss_joint, CUDA graph"),
            apis.get("layers.TDTLoss"),
            apis.get("tdt_loss"),
            in_place,
            peer,
        ]
        body.append([*place(ours), *map(milliseconds, shown), *map(mebibytes, (ours, in_place, peer))])
    names = ["`tdt_loss_joint`", "CUDA graph", "`TDTLoss` on slices", "`tdt_loss`", "in place", "transformers"]
    return markdown([*PLACE, *names, "MiB", "MiB in place", "MiB transformers"], body)


def rnnt_table(rows: list[dict]) -> list[str]:
    body = []
    for apis in by_case(rows, rnnt=True).values():
        ours, peer = apis["rnnt_loss"], apis.get("torchaudio")
        shown = [ours, apis.get("rnnt_loss, CUDA graph"), peer]
        body.append([*place(ours), *map(milliseconds, shown), *map(mebibytes, (ours, peer))])
    if not body:
        return []
    version = next((f" {row['torchaudio']}" for row in rows if row.get("torchaudio")), "")
    names = ["`rnnt_loss`", "CUDA graph", f"torchaudio{version}", "MiB", "MiB torchaudio"]
    return ["", "RNN-T, the same way:", "", *markdown([*PLACE, *names], body)]


def omega_table(rows: list[dict]) -> list[str]:
    """What the second lattice of a positive omega costs, beside the same call without it."""
    body = []
    for apis in by_case(rows).values():
        columns = []
        for suffix in ("", ", CUDA graph"):
            plain, mixed = apis.get("tdt_loss_joint" + suffix), apis.get("tdt_loss_joint, omega 0.1" + suffix)
            if plain and mixed and plain["ms"] and mixed["ms"]:
                columns += [milliseconds(plain), milliseconds(mixed), f"{mixed['ms'] / plain['ms']:.2f}"]
        if len(columns) == 6:
            ours = apis["tdt_loss_joint"]
            body.append([*place(ours)[:3], *columns])
    if not body:
        return []
    names = ["omega 0", "omega 0.1", "ratio", "CUDA graph, omega 0", "omega 0.1", "ratio"]
    text = (
        "What omega costs, `tdt_loss_joint`: the RNN-T lattice is walked beside the TDT lattice, and backward reads the rows that "
        "have occupancy in either; of random logits RNN-T leaves few without."
    )
    return ["", text, "", *markdown([*PLACE[:3], *names], body)]


def lattice_lines(rows: list[dict]) -> list[str]:
    lines = []
    for api, transducer in LATTICES.items():
        lattices = [row for row in rows if row["api"] == api]
        if lattices:
            shapes = "; ".join(f"{', '.join(map(str, row['shape'][:3]))}: {row['ms']:.3g} ms" for row in lattices)
            lines += ["", f"The lattice of {transducer} alone, alpha and beta, B, T, U: {shapes}."]
    return lines


def fused_table(rows: list[dict]) -> str:
    """Joint network and loss, fused beside unfused."""
    body = []
    for row in rows:
        if "rows" not in row or "tiles of" in row["case"]:
            continue
        live = f"{row['live_rows'] / row['rows']:.0%}" if "live_rows" in row else "100%"
        memory = f"{row['peak_extra_bytes'] / 2**30:.2f}"
        shape = ", ".join(map(str, row["shape"]))
        body.append(
            [row["case"], shape, row["api"], row["lattice"], live, f"{row['ms']:.4g}", memory, f"{row['tflops']:.0f}"]
        )
    first = next(row for row in rows if "rows" in row and "tiles of" not in row["case"])
    text = (
        f"Forward and backward of joint network and loss on one {first['gpu']} (PyTorch {first['torch']}, commit {first['commit']}, "
        f"{first['date']}), bfloat16, H = 640, relu. Live: the rows that backward computes; TFLOP/s: 8 rows H (V + D) over the time, "
        "whether computed or left out."
    )
    names = ["case", "B, T, U, V + D", "", "lattice", "live", "ms", "peak GiB", "TFLOP/s"]
    return "\n".join([text, "", *markdown(names, body)])


def report(rows: list[dict]) -> str:
    first = rows[0]
    lines = [
        f"Forward and backward on one {first['gpu']} (PyTorch {first['torch']}, CUDA {first['cuda']}, transformers "
        f"{first['transformers']}, commit {first['commit']}, {first['date']}), medians in ms; peak memory beyond the logits in MiB. "
        f"The floor is three passes over the logits at the copy bandwidth of the same run, {first['copy_tbps']:.2f} TB/s. Logits are "
        "standard normal; rows without occupancy are not read backward, which is how a time can be under the floor.",
        "",
        *tdt_table(rows),
        *rnnt_table(rows),
        *omega_table(rows),
        *lattice_lines(rows),
        "",
        "![Times against the floor](benchmarks/results/nvidia-h200.png)",
    ]
    return "\n".join(lines)


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
    rows = json.loads(SWEEP.read_text())
    readme = REPO / "README.md"
    text = put(readme.read_text(), "report", report(rows))
    readme.write_text(put(text, "fused", fused_table(json.loads(FUSED.read_text()))))
    plot(rows, SWEEP.with_suffix(".png"))


if __name__ == "__main__":
    main()
