"""Citations of upstream, ``path/file.py::name`` or ``path/file.py::"text"``: what they name is there in the installed packages."""

import ast
import functools
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
PACKAGES = ("verl", "sglang/srt", "megatron/core", "transformers", "torch/optim", "ray/_private", "anyio", "hydra")
SOURCES = (
    "orbit_sglang", "orbit_verl", "orbit_cli", "kernels", "recipes", "benchmarks", "patches", "tools", "tests", "docs", "README.md",
)  # fmt: skip
FILE = re.compile(r"""(?<![\w./*{}])((?:\w+/)*\w+\.py)\b(?:::("[^"\n]+"|[\w.]*\w))?""")
LINE_NUMBER = re.compile(r"\w\.py:\d")


@functools.cache
def sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        ROOT / name
        for name in listed.split()
        if name.endswith((".py", ".md", ".sh", ".yaml")) and (ROOT / name).exists()
    ]


def prose(path: Path) -> str:
    """Comments and docstrings of a module, all of another file."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    return "\n".join([*docstrings, *comments])


@functools.cache
def own_files() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple("/" + name for name in listed.split())


@functools.cache
def upstream_files() -> tuple[Path, ...]:
    return tuple(path for package in PACKAGES for path in (SITE_PACKAGES / package).rglob("*.py"))


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """Dotted names of a module's functions, classes, methods and assignments."""
    found = set()

    def collect(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                collect(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign):
                found.update(prefix + target.id for target in child.targets if isinstance(target, ast.Name))
            else:
                collect(child, prefix)

    collect(ast.parse(path.read_text()), "")
    return frozenset(found)


def problem(file: str, named: str | None) -> str | None:
    """What is wrong with a citation, if anything."""
    if any(own.endswith(f"/{file}") for own in own_files()) and named is None:
        return None
    held = [path for path in upstream_files() if str(path).endswith(f"/{file}")]
    if len(held) != 1:
        return f"{file} is {len(held)} files of upstream, name one: {[str(path.relative_to(SITE_PACKAGES)) for path in held]}"
    if named is None:
        return f"{file} is cited without a name in it; write {file}::name"
    if named.startswith('"'):
        return None if named.strip('"') in held[0].read_text() else f"{file} does not hold the text {named}"
    return None if named in names_of(held[0]) else f"{file} has no {named}"


def test_no_citation_is_a_line_number():
    numbered = [path for path in sources() if path != Path(__file__) and LINE_NUMBER.search(path.read_text())]
    assert numbered == []


def test_what_is_cited_is_there():
    cited, wrong = 0, []
    for path in sources():
        if path == Path(__file__):
            continue
        for file, named in FILE.findall(prose(path)):
            cited += bool(named)
            if path.suffix != ".py" and not named:  # a file of the project, in a command or a text
                continue
            if found := problem(file, named or None):
                wrong.append(f"{path.relative_to(ROOT)}: {found}")
    assert wrong == []
    assert cited >= 45


@pytest.mark.parametrize(
    "file, named, expected",
    [
        ("layers/sampler.py", "multinomial_with_seed", None),
        ("layers/sampler.py", "multinomial_with_sed", "has no multinomial_with_sed"),
        ("layers/moe/topk.py", '"fused_topk = fused_topk_cpu"', None),
        ("layers/moe/topk.py", '"fused_topk = fused_topk_tpu"', "does not hold the text"),
        ("layers/sampler.py", None, "cited without a name"),
        ("no_such_file.py", "name", "is 0 files of upstream"),
        ("common.py", "is_cpu", "files of upstream, name one"),
        ("orbit_verl/plugin.py", None, None),
    ],
)
def test_what_makes_a_citation_wrong(file, named, expected):
    found = problem(file, named)
    assert found is None if expected is None else expected in found
