"""What README and docs name exists: links, headings, paths, tests and field cases; README stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIELD_CASES = ROOT / "docs" / "field-cases.md"
SUFFIXES = "py|sh|md|yaml|toml|txt|in|patch|svg"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def headings(page: Path) -> list[str]:
    """Titles of a page's sections, fenced and indented text left out."""
    return re.findall(r"^#+ (.+)$", page.read_text(), re.M)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def missing_links(page: Path) -> list[str]:
    """Relative links to no file, or to no heading of a page."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, name = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (name and name not in map(anchor, headings(target))):
            found.append(link)
    return found


def missing_paths(page: Path) -> list[str]:
    """Files and folders in backticks that are not in the repository. What a run leaves (``runs/``) is not expected there."""
    text = page.read_text()
    files = re.findall(rf"`([\w.\-]+(?:/[\w.\-]+)+\.(?:{SUFFIXES}))`", text)
    folders = re.findall(r"`((?:orbit_\w+|kernels|tests|recipes|benchmarks|patches|docs|tools)/(?:[\w\-]+/)*)`", text)
    return [path for path in (*files, *folders) if not path.startswith("runs/") and not (ROOT / path).exists()]


@every_page
def test_every_link_leads_somewhere(page):
    assert missing_links(page) == []


@every_page
def test_every_path_exists(page):
    assert missing_paths(page) == []


def test_every_page_is_linked_from_the_readme():
    text = PAGES[0].read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


def test_the_readme_is_short():
    words = re.findall(r"\S*\w\S*", PAGES[0].read_text())
    assert 500 <= len(words) <= 700


def test_field_cases_name_tests_that_exist():
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = re.findall(r"`(test_\w+)`", FIELD_CASES.read_text())
    assert len(named) > 70
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_tests_cite_field_cases_and_each_case_with_tests_is_cited():
    sections = re.split(r"^### (.+)$", FIELD_CASES.read_text(), flags=re.M)[1:]
    cases = dict(zip(sections[::2], sections[1::2], strict=True))
    cited = {
        case
        for path in (ROOT / "tests").rglob("*.py")
        for citation in re.findall(r"docs/field-cases\.md: (.+)\.(?:\"|$)", path.read_text(), re.M)
        for case in citation.split("; ")
    }
    assert cited - cases.keys() == set()
    assert {case for case, text in cases.items() if re.search(r"^Tests?: ", text, re.M)} - cited == set()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](#no-such-heading)", "#no-such-heading"),
        ("`orbit_sglang/no_such_file.py`", "orbit_sglang/no_such_file.py"),
        ("`orbit_sglang/no_such_folder/`", "orbit_sglang/no_such_folder/"),
    ],
)
def test_what_is_missing_is_found(tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text} [b](#page) `orbit_sglang/plugin.py` `runs/demo/train.log`\n")
    assert missing_links(page) + missing_paths(page) == [problem]


def test_the_table_of_where_things_are_names_what_its_files_define():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where do I find")[2].partition("\n## ")[0]
    wrong, num_names = [], 0
    for row in re.findall(r"^\|.*\|$", table, re.M):
        files = [ROOT / path for path in re.findall(r"`([\w/]+/\w+\.py)`", row)]
        sources = "\n".join(file.read_text() for file in files if file.exists())
        for name in re.findall(r"`(?:[A-Z]\w+\.)?([A-Za-z_]+)`", row):
            num_names += 1
            if not re.search(rf"\b(?:def|class) {name}\b|^{name}\b", sources, re.M):
                wrong.append(name)
    assert num_names >= 8 and wrong == []
