#!/usr/bin/env python3
"""Put the measurements of benchmarks/results/nvidia-h200*.json into README.md, and draw them as PNG. Run by `make report`."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from records import REPO, RESULTS, put

SWEEP, FUSED = RESULTS / "nvidia-h200.json", RESULTS / "nvidia-h200-fused.json"
RNNT_APIS = ("rnnt_loss", "rnnt_loss, CUDA graph", "rnnt_loss of columns", "torchaudio")
ODD_STRIDES = (
    "tdt_loss on slices",
    "tdt_loss on leaf slices",
    "tdt_loss_joint of a padded product",
    "layers.TDTLoss, compiled",
    "rnnt_loss of columns",
)
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


def milliseconds(row: dict | None, field: str = "ms") -> str:
    if row is None:
        return ""
    if row["ms"] is None:
        return row.get("lost", "lost")
    return "" if row.get(field) is None else f"{row[field]:.3g}"


def ratio(row: dict, reference: dict, field: str = "ms") -> str:
    ms, least = row.get(field), reference.get(field)
    return f"{ms / least:.2f}" if ms and least else ""


def mebibytes(row: dict | None) -> str:
    return "" if row is None or row["ms"] is None else f"{row['peak_extra_bytes'] / 2**20:,.0f}"


def markdown(header: list[str], body: list[list[str]]) -> list[str]:
    # The words of a lost row may hold what divides columns.
    escaped = [[cell.replace("|", r"\|") for cell in columns] for columns in body]
    return ["| " + " | ".join(columns) + " |" for columns in [header, ["---"] * len(header), *escaped]]


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
                columns += [milliseconds(plain), milliseconds(mixed), ratio(mixed, plain)]
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


def strides_table(rows: list[dict]) -> list[str]:
    """What other strides of the logits cost, beside the same logits in one contiguous tensor."""
    body = []
    for rnnt, contiguous in ((False, "tdt_loss_joint"), (True, "rnnt_loss")):
        for apis in by_case(rows, rnnt).values():
            odd = [apis[api] for api in ODD_STRIDES if api in apis]
            reference = apis.get(contiguous)
            if not odd or reference is None:
                continue
            for row in (reference, *odd):
                columns = [milliseconds(row, "ms_backward"), ratio(row, reference, "ms_backward")]
                # The reason for a lost row stands there already.
                columns += [milliseconds(row), ratio(row, reference)] if row["ms"] else ["", ""]
                body.append([*place(reference)[:3], row["api"], *columns, mebibytes(row)])
    if not body:
        return []
    text = (
        "Odd strides: the first row of each case is the contiguous tensor that the ratios refer to; backward is timed by itself. The others are two slices of "
        "one tensor, which is no leaf; two slices that are leaves themselves; the first V + D columns of rows that are padded to a multiple of 8; the compiled "
        "layer on two slices; and for RNN-T the V token columns of a tensor with five more."
    )
    names = ["call", "backward", "ratio", "forward and backward", "ratio", "MiB"]
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
        "Lines on the bars of the plot go from the 20th to the 80th percentile, where the results have them. "
        f"The floor is three passes over the logits at the copy bandwidth of the same run, {first['copy_tbps']:.2f} TB/s. Logits are "
        "standard normal; rows without occupancy are not read backward, which is how a time can be under the floor.",
        "",
        *tdt_table(rows),
        *rnnt_table(rows),
        *omega_table(rows),
        *strides_table(rows),
        *lattice_lines(rows),
        "",
        "![Times against the floor](benchmarks/results/nvidia-h200.png)",
    ]
    return "\n".join(lines)


def spread(row: dict) -> list[list[float]] | None:
    """How far p20 lies below the median and p80 above it. Files of earlier sweeps hold medians alone."""
    if "ms_p20" not in row:
        return None
    return [[row["ms"] - row["ms_p20"]], [row["ms_p80"] - row["ms"]]]


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
                lines = None if api == "floor" else spread(row)
                label = api if i == 0 else None
                axes.bar(i + (k - 1.5) * 0.2, value, 0.2, yerr=lines, capsize=2, color=color, label=label)
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
