"""The house itself: what is shipped, what importing it costs, and that its papers are true."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import steppe
from steppe import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "steppe"
MODULES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python_blocks(document: Path) -> list[tuple[int, str]]:
    """The fenced python blocks of a document, each with the line it starts on."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in found]


def run_python(*args: str, timeout: float = 600) -> str:
    """Run this interpreter on ``args``; its output, or a failed test that shows its errors."""
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> list[Path]:
    """Every file that git keeps and that is still there."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("steppe") == steppe.__version__


def test_the_public_names_are_there() -> None:
    public = set(steppe.__all__)
    assert set(errors.__all__) - {"SubmitRefusal"} <= public
    assert {"LLM", "SamplingParams", "LLMGenerationRequest", "LLMGenerationResponse"} <= public
    assert {"SequenceOutput", "Usage", "FinishReason", "StreamChannel", "StreamChunk"} <= public
    assert {name for name in public if not hasattr(steppe, name)} == set()


def test_the_package_says_it_is_typed() -> None:
    assert importlib.resources.files("steppe").joinpath("py.typed").is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"


def test_importing_steppe_is_light() -> None:
    heavy = ("torch", "transformers", "triton", "fastapi", "uvicorn", "ray")
    out = run_python(
        "-c", f"import sys, steppe; print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert out.strip() == "[]"


def test_no_file_names_a_machine_or_a_registry() -> None:
    pattern = re.compile(
        r"(?<![\w.-])/(?:home|root|mnt|farm|work)/"  # somebody's folders
        r"|\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com))\b"  # installers know their own
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_drawing_of_the_error_tree_is_the_tree() -> None:
    # A line is: four columns per level, the class, its second base in brackets, and its meaning.
    line = re.compile(r"^ {4}(?P<rails>[│├└─ ]*)(?P<name>\w+Error)\b(?: \((?P<also>\w+)\))?")
    drawn: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for match in filter(None, map(line.match, (errors.__doc__ or "").splitlines())):
        depth = len(match["rails"]) // 4
        del above[depth:]
        bases = above[-1:] or ["Exception"]
        drawn[match["name"]] = (*bases, *filter(None, [match["also"]]))
        above.append(match["name"])

    real = {
        name: tuple(base.__name__ for base in value.__bases__)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert drawn == real
    assert set(real) <= set(errors.__all__)


def test_the_structure_page_lists_every_module_once() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = Counter(re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE))
    modules = {
        (path.parent if path.name == "__init__.py" and path.parent != PACKAGE else path)
        for path in MODULES
    }
    expected = {
        f"{path.relative_to(PACKAGE).as_posix()}{'/' if path.is_dir() else ''}" for path in modules
    }
    assert set(listed) == expected
    assert [name for name, times in listed.items() if times > 1] == []


def test_the_conformance_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "seed-conformance.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith(("| member", "| ---"))
    ]
    assert rows
    wrong = []
    for member, _, shown_by in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown_by)
        known = all(
            (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text("utf-8")
            for path, name in tests
        )
        if shown_by != "later" and not (tests and known):
            wrong.append(f"{member}: {shown_by}")
    assert wrong == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
        if not target.startswith("http") and not (document.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_compiles(document: Path) -> None:
    for number, block in python_blocks(document):
        compile(block, f"{document.name}:{number}", "exec")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_python_in_the_readme_runs() -> None:
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    for _, block in blocks:
        assert run_python("-c", block).strip()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    assert run_python(str(path)).strip()
