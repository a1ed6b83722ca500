#!/usr/bin/env python3
"""Put the records of benchmarks/results into README.md, CARD.md, docs/RESULTS.md and docs/BUILDING.md, and draw the figures. Run by `make report`."""

import json
import sys
from pathlib import Path

import figures
from records import REPO, RESULTS, put

sys.path.insert(0, str(REPO / "tools"))
from check_versions import table as abi_table

DOCS = REPO / "docs"
SPEED, MEMORY = DOCS / "speed.png", DOCS / "memory.png"
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
    if row.get(field) is None:
        return ""
    return f"{row[field]:,.0f}" if row[field] >= 100 else f"{row[field]:.3g}"


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
        shares = [f"{row[name] / row['rows']:.1%}" if name in row else "100%" for name in ("forward_rows", "live_rows")]
        memory = f"{row['peak_extra_bytes'] / 2**30:.2f}"
        shape = ", ".join(map(str, row["shape"]))
        times = [f"{row['ms']:.4g}", f"{row['ms'] / row['one_product_ms']:.2f}" if "one_product_ms" in row else ""]
        body.append([row["case"], shape, row["api"], row["lattice"], *shares, *times, memory])
    first = next(row for row in rows if "rows" in row and "tiles of" not in row["case"])
    text = (
        f"Forward and backward of joint network and loss on one {first['gpu']} (PyTorch {first['torch']}, commit {first['commit']}, "
        f"{first['date']}), bfloat16, H = 640, relu. Forward, backward: the share of the rows that each computes. Of one product: the "
        "time over that of one padded product of all rows' hidden units with the head's weight. Tolerance 0 computes every row."
    )
    names = ["case", "B, T, U, V + D", "", "lattice", "forward", "backward", "ms", "of one product", "peak GiB"]
    return "\n".join([text, "", *markdown(names, body)])


def sweep_tables(rows: list[dict]) -> str:
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
        *strides_table(rows),
        *lattice_lines(rows),
    ]
    return "\n".join(lines)


def find(rows: list[dict], **fields) -> dict | None:
    """The first row that was measured and has these fields."""
    return next((row for row in rows if row.get("ms") and fields.items() <= row.items()), None)


def earlier_rows(sweep: list[dict], quoted: list[dict]) -> list[dict]:
    """Rows of the kernel published before, each with ours of the same run: of the sweep, where it has them, else of a run that timed only these two."""
    rows = []
    for row in sweep:
        if row["api"] == "earlier kernel" and row["ms"]:
            ours = find(sweep, api="tdt_loss_joint", case=row["case"], dtype=row["dtype"])
            rows.append(row | {"ms_ours": ours["ms"], "peak_extra_bytes_ours": ours["peak_extra_bytes"]})
    return rows or quoted


def earlier_table(rows: list[dict]) -> str:
    first = rows[0]
    text = (
        f"The kernel that was published under this name before (revision {first['earlier']}), on two slices of a joint tensor as its users call "
        f"it, beside `tdt_loss_joint` in the same run on one {first['gpu']} (PyTorch {first['torch']}, {first['date']}, copy bandwidth "
        f"{first['copy_tbps']:.2f} TB/s): forward and backward, ms, and peak memory beyond the logits, MiB."
    )
    body = []
    for row in rows:
        columns = [row["case"], ", ".join(map(str, row["shape"])), row["dtype"]]
        columns += [f"{row['ms']:.3g}", f"{row['ms_ours']:.3g}", f"{row['ms'] / row['ms_ours']:.1f}"]
        columns += [f"{row[field] / 2**20:,.0f}" for field in ("peak_extra_bytes", "peak_extra_bytes_ours")]
        body.append(columns)
    names = ["earlier kernel", "`tdt_loss_joint`", "ratio", "MiB earlier kernel", "MiB"]
    return "\n".join([text, "", *markdown([*PLACE[:3], *names], body)])


def size(count: int) -> str:
    return f"{count / 2**30:.2g} GiB" if count < 10 * 2**30 else f"{count / 2**30:.1f} GiB"


def gain_row(what: str, peer: str, row: dict, ours: dict) -> list[str]:
    faster, less = row["ms"] / ours["ms"], row["peak_extra_bytes"] / ours["peak_extra_bytes"]
    times = f"{faster:,.0f}" if faster >= 10 else f"{faster:.1f}"
    ms = f"{row['ms']:,.0f}" if row["ms"] >= 100 else f"{row['ms']:.3g}"
    return [
        what,
        f"{peer}: {ms} ms, {size(row['peak_extra_bytes'])}",
        f"{ours['ms']:.3g} ms, {size(ours['peak_extra_bytes'])}",
        f"{times} times as fast, 1/{less:.0f} of the memory",
    ]


def gain_table(sweep: list[dict], earlier: list[dict], fused: list[dict]) -> str:
    """What a reader gains, in four rows."""
    tdt, rnnt = {"case": "ft-v2", "dtype": "bfloat16"}, {"case": "ft-v2", "dtype": "float32"}
    before = find(earlier, **tdt)
    ours_then = {"ms": before["ms_ours"], "peak_extra_bytes": before["peak_extra_bytes_ours"]}
    logits = "TDT loss, 1,025 tokens, bfloat16"
    unfused = find(fused, case="ft-v3", api="joint network, then tdt_loss_joint", lattice="random")
    without = find(fused, case="ft-v3", api="tdt_loss_fused_joint", lattice="random")
    ours = find(sweep, api="tdt_loss_joint", **tdt)
    body = [
        gain_row(logits, "transformers", find(sweep, api="transformers", **tdt), ours),
        gain_row(logits, "the kernel published before", before, ours_then),
        gain_row(
            "RNN-T loss, 1,025 tokens, float32",
            "torchaudio",
            find(sweep, api="torchaudio", **rnnt),
            find(sweep, api="rnnt_loss", **rnnt),
        ),
        gain_row("joint network and TDT loss, 8,193 tokens, bfloat16", "with logits", unfused, without),
    ]
    first = sweep[0]
    text = (
        f"16 utterances of 20 s with 99 labels, forward and backward on one {first['gpu']} (PyTorch {first['torch'].split('+')[0]}). Memory is the "
        "peak: beyond the logits in the first three rows, of everything but weights and inputs in the last. The kernel published before is revision "
        f"{before['earlier']}, {before['date']}."
    )
    return "\n".join([*markdown(["", "otherwise", "here", "gain"], body), "", text])


def end_to_end_table(rows: list[dict]) -> str:
    """Training steps of whole models; nothing where none were recorded."""
    if not rows:
        return "Not measured yet: `python benchmarks/end_to_end.py` on a GPU, then `make report`."
    first = rows[0]
    text = (
        f"A training step of whole models on one {first['gpu']} (PyTorch {first['torch']}, transformers {first['transformers']}, commit "
        f"{first['commit']}, {first['date']}): random weights of the released sizes, utterances of {first['seconds']:g} s with {first['labels']} "
        "labels, autocast to bfloat16, AdamW. ms: the median, and from the 20th to the 80th percentile; GPU: ms of a step in which the GPU had work; GiB: the "
        "peak of the allocator, weights and optimizer included; then the largest batch that trains in 24 and 80 GiB."
    )
    body = []
    for row in rows:
        if "largest_batch" in row:
            continue
        largest = next(
            (
                r["largest_batch"]
                for r in rows
                if r["model"] == row["model"] and r["loss"] == row["loss"] and "largest_batch" in r
            ),
            {},
        )
        columns = [row["model"], str(row.get("batch", "")), row["loss"]]
        if row["ms"] is None:
            columns += [row["lost"], "", "", ""]
        else:
            columns += [f"{row['ms']:.0f}", f"{row['ms_p20']:.0f} to {row['ms_p80']:.0f}"]
            columns += [f"{row['ms_gpu_busy']:.0f}" if row["ms_gpu_busy"] else ""]
            columns += [f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else ""]
        body.append([*columns, *("" if largest.get(gib) is None else str(largest[gib]) for gib in ("24", "80"))])
    names = ["model", "batch", "loss", "ms", "p20 to p80", "GPU", "GiB", "24 GiB", "80 GiB"]
    return "\n".join([text, "", *markdown(names, body)])


def memory_lines(fused: list[dict]) -> dict[str, list[tuple[int, float | None]]]:
    """Peak GiB by batch of each way to the loss; None where it ran out."""
    names = {
        "joint network, then tdt_loss_joint": "logits and gradient",
        "the same, gradient in place": "logits, gradient in place",
        "tdt_loss_fused_joint": "without logits",
    }
    lines: dict[str, list[tuple[int, float | None]]] = {}
    for row in fused:
        if row["case"] == "memory":
            gib = row["peak_extra_bytes"] / 2**30 if row["ms"] else None
            lines.setdefault(names[row["api"]], []).append((row["shape"][0], gib))
    return lines


def memory_text(fused: list[dict]) -> str:
    """The memory by batch as text, for the Hub's page, which has no pictures of ours."""
    lines = memory_lines(fused)
    dense, without = dict(lines["logits and gradient"]), dict(lines["without logits"])
    shown = [8, 16, 32, 64, 128, 256]
    most = max(gib for gib in dense.values() if gib)
    rows = ["batch  with logits                                    without logits"]
    for batch in shown:
        bar = "#" * max(1, round(24 * dense[batch] / most)) if dense.get(batch) else ""
        said = f"{bar} {dense[batch]:.1f} GiB" if bar else f"out of memory ({GPU_GIB} GiB)"
        rows.append(f"{batch:5}  {said:<44} # {without[batch]:.1f} GiB")
    return "\n".join(["```text", *rows, "```"])


GPU_GIB = 140  # of an H200


def speedup_panels(sweep: list[dict], earlier: list[dict]) -> dict[str, dict[str, float]]:
    def against(peer: str, ours: str) -> dict[str, float]:
        bars = {}
        for row in sweep:
            if row["api"] == peer and row["ms"]:
                mine = find(sweep, api=ours, case=row["case"], dtype=row["dtype"])
                bars[short(row)] = row["ms"] / mine["ms"]
        return bars

    return {
        "transformers' TDT loss": against("transformers", "tdt_loss_joint"),
        "the kernel published before": {short(row): row["ms"] / row["ms_ours"] for row in earlier},
        "torchaudio's RNN-T loss": against("torchaudio", "rnnt_loss"),
    }


def short(row: dict) -> str:
    return f"{row['case']}, {row['dtype'].replace('bfloat', 'bf').replace('float', 'fp')}"


def read(name: str) -> list[dict]:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else []


def documents() -> dict[Path, str]:
    """Every text that has tables, as the records say."""
    sweep, fused = read("nvidia-h200.json"), read("nvidia-h200-fused.json")
    earlier = earlier_rows(sweep, read("nvidia-h200-earlier.json"))
    gain = gain_table(sweep, earlier, fused)
    parts = {
        REPO / "README.md": {"gain": gain},
        REPO / "CARD.md": {"gain": gain, "memory": memory_text(fused)},
        DOCS / "RESULTS.md": {
            "end to end": end_to_end_table(read("nvidia-h200-end-to-end.json")),
            "earlier": earlier_table(earlier),
            "sweep": sweep_tables(sweep),
            "fused": fused_table(fused),
        },
        DOCS / "BUILDING.md": {"abi": abi_table(read("abi.json"))},
    }
    texts = {}
    for path, contents in parts.items():
        texts[path] = path.read_text()
        for marker, content in contents.items():
            texts[path] = put(texts[path], marker, content)
    return texts


def draw() -> None:
    sweep = read("nvidia-h200.json")
    earlier = earlier_rows(sweep, read("nvidia-h200-earlier.json"))
    figures.speedups(speedup_panels(sweep, earlier), SPEED)
    figures.memory(memory_lines(read("nvidia-h200-fused.json")), GPU_GIB, MEMORY)


def main() -> None:
    for path, text in documents().items():
        path.write_text(text)
    draw()


if __name__ == "__main__":
    main()
