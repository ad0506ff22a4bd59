"""Which folder imports which: no circle, and only in the directions that the architecture names."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "orbit_kernels": ROOT / "kernels" / "orbit_kernels",
    **{name: ROOT / name for name in ("orbit_sglang", "orbit_verl", "orbit_cli", "recipes", "benchmarks")},
}


def module_files() -> dict[str, Path]:
    """Every module of the project by its dotted name; a package goes by its own name."""
    files = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            files[".".join([package, *parts]).removesuffix(".__init__")] = file
    return files


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            for alias in node.names:
                yield from (f"{node.module}.{alias.name}", node.module)


def folder_graph() -> dict[str, set[str]]:
    """The folders that each folder imports from, itself left out. ``from package import module`` needs the module's folder."""
    files = module_files()
    folders = {module: str(file.parent.relative_to(ROOT)) for module, file in files.items()}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, file in files.items():
        names = [name for name in imported(file) if name in folders]
        narrowest = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
        graph[folders[module]] |= {folders[name] for name in narrowest} - {folders[module]}
    return graph


def test_folders_import_each_other_in_one_direction():
    graph = folder_graph()
    assert len(graph) > 30 and sum(map(len, graph.values())) > 100
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"folders that import each other in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        ("kernels", ("verl", "sglang", "orbit_verl", "orbit_sglang", "orbit_cli", "recipes", "benchmarks")),
        ("orbit_verl", ("orbit_sglang", "orbit_cli", "recipes", "benchmarks")),
        ("orbit_sglang", ("verl", "orbit_verl", "orbit_cli", "recipes", "benchmarks")),
        ("orbit_cli", ("recipes", "benchmarks")),
    ],
)
def test_imports_go_one_way(importer, forbidden):
    found = {
        (module, name)
        for module, file in module_files().items()
        if str(file.relative_to(ROOT)).startswith(f"{importer}/")
        for name in imported(file)
        if name.partition(".")[0] in forbidden
    }
    assert not found


@pytest.mark.parametrize(
    ("folder", "switches"),
    [("orbit_sglang/cpu", {"orbit_sglang"}), ("orbit_verl/cpu", {"orbit_verl", "orbit_verl/worker", "benchmarks"})],
)
def test_what_is_for_a_cpu_alone_stands_apart(folder, switches):
    """Who reads for a GPU skips the folder: nothing imports it but what switches it on."""
    assert {importer for importer, imports in folder_graph().items() if folder in imports} <= switches
