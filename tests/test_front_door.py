"""What a stranger reads first: README.md, CARD.md, docs/ and their tables and figures, against the package and the records."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (REPO / "docs").is_dir(), reason="needs the whole repository")
PAGES = [REPO / "README.md", REPO / "CHANGELOG.md", REPO / "tests" / "README.md", *sorted((REPO / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def report():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(REPO / "benchmarks"))
    try:
        import report

        yield report
    finally:
        sys.path.remove(str(REPO / "benchmarks"))


def readme():
    return (REPO / "README.md").read_text()


def test_the_readme_fits_on_a_few_screens():
    assert len(readme().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(REPO).as_posix())
def test_links_lead_somewhere(page):
    tracked = set(subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout.split("\n"))
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("#"):
            continue
        path = (page.parent / target.split("#")[0]).resolve()
        assert path.exists(), f"{page.name}: {target}"
        name = path.relative_to(REPO).as_posix()
        assert len(tracked) == 1 or path.is_dir() or name in tracked, f"{page.name}: {target} is not in git"


def test_every_page_can_be_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[^)]+\.md)\)", readme()))
    assert linked == {f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")}


def test_every_function_is_in_the_readme_and_on_the_card(kernel):
    results = {name for name in kernel.__all__ if inspect.isclass(getattr(kernel, name))}
    for text in (readme(), (REPO / "CARD.md").read_text()):
        words = set(re.findall(r"\w+", text))
        assert set(kernel.__all__) - results <= words
        assert not results & set(re.findall(r"^[|-] `(\w+)", text, re.MULTILINE))
    called = set(re.findall(r"kernel\.(\w+)\(", readme()))
    assert called and all(hasattr(kernel, name) for name in called)


def test_the_options_of_the_readme_are_those_of_the_losses(kernel):
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", readme().split("Options, all off")[1], re.MULTILINE)
    listed = {name for row in rows for name in row if name}
    functions = (kernel.tdt_loss_joint, kernel.rnnt_loss, kernel.tdt_loss_fused_joint)
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    assert listed <= taken
    assert set(inspect.signature(kernel.tdt_loss_joint).parameters) - listed <= {
        *("logits", "targets", "logit_lengths", "target_lengths", "blank_token_id", "durations", "reduction")
    }


def test_what_tells_the_kernels_apart_is_true_of_this_one(kernel):
    for page in (REPO / "README.md", REPO / "CARD.md", REPO / "docs" / "BUILDING.md"):
        assert 'hasattr(kernel, "use_fused_loss")' in page.read_text()
    assert hasattr(kernel, "use_fused_loss")


def test_the_example_of_the_readme_runs(kernel):
    (example,) = (text for text in re.findall(r"```python\n(.*?)```", readme(), re.DOTALL) if "backward()" in text)
    names: dict = {}
    exec(example, names)
    assert names["loss"].isfinite() and names["logits"].grad.isfinite().all()


def test_tables_are_those_of_the_records(report):
    """If this fails: make report."""
    for path, text in report.documents().items():
        assert path.read_text() == text, path.name


def test_figures_are_drawn_from_the_records(report, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SPEED", tmp_path / "speed.png")
    monkeypatch.setattr(report, "MEMORY", tmp_path / "memory.png")
    report.draw()
    for name in ("speed.png", "memory.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
        assert (REPO / "docs" / name).exists()


def test_a_sweep_that_has_the_earlier_kernel_replaces_what_was_quoted(report):
    quoted = report.read("nvidia-h200-earlier.json")
    ours = {"case": "a", "dtype": "float32", "api": "tdt_loss_joint", "ms": 1.0, "peak_extra_bytes": 10}
    theirs = ours | {"api": "earlier kernel", "ms": 4.0, "peak_extra_bytes": 30}
    assert report.earlier_rows([ours], quoted) == quoted
    (row,) = report.earlier_rows([ours, theirs], quoted)
    assert (row["ms"], row["ms_ours"], row["peak_extra_bytes_ours"]) == (4.0, 1.0, 10)


def test_end_to_end_rows_become_a_table(report):
    common = {"model": "M", "loss": "ours, fused", "gpu": "G", "torch": "2", "transformers": "5", "commit": "c"}
    common |= {"date": "d", "seconds": 20.0, "labels": 99}
    timed = {"batch": 8, "ms": 150.4, "ms_p20": 149.0, "ms_p80": 153.0, "ms_gpu_busy": 140.0, "peak_bytes": 14 * 2**30}
    lost = {"loss": "transformers", "batch": 8, "ms": None, "lost": "out of memory"}
    table = report.end_to_end_table([common | timed, common | lost, common | {"largest_batch": {"24": 22, "80": None}}])
    assert "| M | 8 | ours, fused | 150 | 149 to 153 | 140 | 14.0 | 22 |  |" in table
    assert "| M | 8 | transformers | out of memory |" in table
    assert "Not measured yet" in report.end_to_end_table([])
