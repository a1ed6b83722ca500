"""README.md of the tests: every test and every file that it cites exists."""

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

TESTS = Path(__file__).resolve().parent
README = (TESTS / "README.md").read_text()
PROMISES = "## Where each promise is tested"


def names_in(path):
    return [node.name for node in ast.parse(path.read_text()).body if getattr(node, "name", "").startswith("test_")]


MODULES = {path.stem: names_in(path) for path in sorted(TESTS.glob("test_*.py"))}


def promises():
    """(promise, what is cited for it)"""
    rows = [line.strip("| ").split(" | ") for line in README.split(PROMISES)[1].splitlines() if line.startswith("| ")]
    return [(promise, cited) for promise, cited in rows if set(promise) != {"-"} and promise != "promise"]


def citations(cited):
    """(module, name or None for the whole module) of a list like: `a::x`, `b`; `c`: `y`, `z`; words are not citations."""
    for part in cited.split("; "):
        names = re.findall(r"`(test_[\w:*]+)`", part)
        if re.match(r"`\w+`: ", part):
            yield from ((names[0], name) for name in names[1:])
        else:
            for name in names:
                module, _, test = name.partition("::")
                yield module, test or None


def missing(module, name):
    if module not in MODULES:
        return True
    return name is not None and not any(fnmatchcase(test, name) for test in MODULES[module])


def test_every_promise_cites_tests_that_exist():
    for promise, cited in promises():
        found = list(citations(cited))
        assert found or "`support/" in cited, promise
        assert [citation for citation in found if missing(*citation)] == [], promise


def test_every_file_that_is_cited_exists():
    cited = re.findall(r"`((?:support/|fuzzing/)?[\w/]+(?:\.py|/))`", README)
    assert len(cited) > len(MODULES)
    places = (TESTS, TESTS / "support", TESTS.parent)
    assert [name for name in cited if not any((place / name).exists() for place in places)] == []


def test_a_citation_of_nothing_is_found():
    cited = "`test_a`: `test_x`, `test_y_*`; `test_b::test_z`, `test_c`"
    assert list(citations(cited)) == [
        ("test_a", "test_x"),
        ("test_a", "test_y_*"),
        ("test_b", "test_z"),
        ("test_c", None),
    ]
    assert missing("test_readme", "test_no_such_thing") and missing("test_no_such_file", None)
    assert not missing("test_readme", "test_every_file_*") and not missing("test_readme", None)
