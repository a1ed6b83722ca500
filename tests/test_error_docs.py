"""docs/ERRORS.md explains every message that the sources can raise, and no other."""

import ast
import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def normal(message):
    """What differs from call to call becomes {}; neighbours of the kind become one."""
    return re.sub(r"(\{\})+", "{}", PLACEHOLDER.sub("{}", " ".join(message.split())))


def of_python(package):
    """The message of every `raise` in the package, as a template."""
    trees = [ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))]
    constants = {
        target.id: ast.literal_eval(node.value)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                (message,) = node.exc.args
                if isinstance(message, ast.Name):
                    yield constants[message.id]
                elif isinstance(message, ast.Constant):
                    yield message.value
                else:
                    assert isinstance(message, ast.JoinedStr), f"no plain message: {ast.unparse(node)}"
                    parts = message.values
                    yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)


def arguments(text):
    """The top-level arguments of a C++ call; `text` begins after its opening parenthesis."""
    found, depth, start = [], 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]', text):
        token = match[0]
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        if (token == "," and depth == 0) or depth < 0:
            found.append(text[start : match.start()].strip())
            start = match.end()
        if depth < 0:
            return found
    raise AssertionError("no closing parenthesis")


def of_cpp(folders):
    """The message of every STD_TORCH_CHECK, as a template."""
    for path in sorted(path for folder in folders for path in folder.glob("*.*")):
        text = path.read_text()
        for match in re.finditer(r"STD_TORCH_CHECK\(", text):
            _, *parts = arguments(text[match.end() :])
            assert parts, f"{path}: a check without a message"
            literal = re.compile(r'"((?:[^"\\]|\\.)*)"')
            yield "".join("".join(literal.findall(part)) if literal.match(part) else "{}" for part in parts)


def documented():
    """The messages in the first column of the tables."""
    for line in (REPO / "docs" / "ERRORS.md").read_text().splitlines():
        found = re.match(r"\| `(.*?)`(?: \(\w+\))? \|", line)
        if found:
            yield found[1].replace(r"\|", "|")


def test_every_message_is_explained():
    raised = {normal(message) for message in of_python(REPO / "torch-ext" / "tdt_loss")}
    raised |= {
        normal(message)
        for message in of_cpp(REPO / name for name in ("torch-ext", "tdt_loss_common", "tdt_loss_cpu", "tdt_loss_cuda"))
    }
    explained = {normal(message) for message in documented()}
    assert len(raised) > 60
    assert raised - explained == set(), "not in docs/ERRORS.md"
    assert explained - raised == set(), "in docs/ERRORS.md, but nothing raises them"


def test_every_explanation_has_a_cause_and_a_cure():
    rows = [line for line in (REPO / "docs" / "ERRORS.md").read_text().splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3 and all(cells), row


def test_the_readme_leads_there():
    assert "docs/ERRORS.md" in (REPO / "README.md").read_text()
