"""This script applies the patch files beside it to the running interpreter's site-packages.

    python patches/apply.py            apply what is not applied yet
    python patches/apply.py --check    say what is applied, applies or does not; change nothing

It uses the standard library only, because it runs before anything is installed that could be imported safely. Contexts
must match exactly. A changed file is replaced, never written in place: installers hard-link files from their cache.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import sys
import sysconfig
import tempfile

PATCH_DIR = pathlib.Path(__file__).resolve().parent
HUNK_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
UPSTREAM = re.compile(r"^Upstream: (\S+)==(\S+)$", re.MULTILINE)


class PatchError(Exception):
    """A patch does not fit the installed packages."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """A ``Hunk`` has the lines before and after, and the line numbers (from 1) that they start at."""

    old_start: int
    new_start: int
    old: list[str]
    new: list[str]


@dataclasses.dataclass(frozen=True)
class FilePatch:
    """A ``FilePatch`` has the hunks of one file; ``creates`` says that the file is new."""

    path: str
    creates: bool
    hunks: list[Hunk]

    def state(self, root: pathlib.Path) -> str:
        """Returns ``applied``, ``applies`` or ``conflict`` against the file under ``root``."""
        target = root / self.path
        if not target.exists():
            return "applies" if self.creates else "conflict"
        lines = target.read_text().splitlines(keepends=True)
        if self.creates:
            return "applied" if lines == self.hunks[0].new else "applies"
        if all(_matches(lines, hunk.new_start, hunk.new) for hunk in self.hunks):
            return "applied"
        return "applies" if all(_matches(lines, hunk.old_start, hunk.old) for hunk in self.hunks) else "conflict"

    def apply(self, root: pathlib.Path) -> None:
        """Writes the patched file; ``state`` must be ``applies``."""
        target = root / self.path
        lines = [] if self.creates else target.read_text().splitlines(keepends=True)
        for hunk in reversed(self.hunks):
            start = max(hunk.old_start - 1, 0)
            lines[start : start + len(hunk.old)] = hunk.new
        _replace(target, "".join(lines))


def parse(text: str) -> list[FilePatch]:
    """Returns the file patches of a unified diff; text before the first ``---`` line is its header."""
    files: list[FilePatch] = []
    lines = text.splitlines(keepends=True)
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("--- ") and lines[index + 1].startswith("+++ b/"):
            path = lines[index + 1][len("+++ b/") :].strip()
            files.append(FilePatch(path, line.strip() == "--- /dev/null", []))
            index += 2
        elif match := HUNK_HEADER.match(line):
            hunk, index = _parse_hunk(lines, index + 1, match)
            files[-1].hunks.append(hunk)
        else:
            index += 1
    return files


def run(root: pathlib.Path, check: bool, patch_dir: pathlib.Path = PATCH_DIR) -> list[str]:
    """Applies, or only checks, every ``*.patch`` of a folder; returns one line per patch.

    Raises:
        PatchError: a patch does not fit what is installed; nothing of that patch was written.
    """
    report = []
    for patch in sorted(patch_dir.glob("*.patch")):
        text = patch.read_text()
        files = parse(text)
        states = {file.path: file.state(root) for file in files}
        conflicts = [path for path, state in states.items() if state == "conflict"]
        if conflicts:
            raise PatchError(f"{patch.name} does not apply to {', '.join(conflicts)} in {root}: {_version_hint(text)}")
        pending = [file for file in files if states[file.path] == "applies"]
        if not check:
            for file in pending:
                file.apply(root)
        done = "already applied" if not pending else "applies" if check else "applied"
        report.append(f"{patch.name}: {done}")
    return report


def _parse_hunk(lines: list[str], index: int, header: re.Match) -> tuple[Hunk, int]:
    old_left, new_left = (int(header[group]) if header[group] else 1 for group in (2, 4))
    old: list[str] = []
    new: list[str] = []
    while old_left or new_left:
        mark, content = lines[index][0], lines[index][1:]
        if mark in " -":
            old.append(content)
            old_left -= 1
        if mark in " +":
            new.append(content)
            new_left -= 1
        index += 1
    return Hunk(int(header[1]), int(header[3]), old, new), index


def _matches(lines: list[str], start: int, expected: list[str]) -> bool:
    return lines[start - 1 : start - 1 + len(expected)] == expected


def _replace(target: pathlib.Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, target.stat().st_mode if target.exists() else 0o644)
    os.replace(file.name, target)


def _version_hint(text: str) -> str:
    wanted = UPSTREAM.search(text)
    if wanted is None:
        return "its header names no upstream version"
    try:
        installed = importlib.metadata.version(wanted[1])
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted[1]} is not installed; install {wanted[1]}=={wanted[2]}"
    if installed != wanted[2]:
        return f"it is for {wanted[1]} {wanted[2]}, and {installed} is installed"
    return f"{wanted[1]} {installed} was changed by hand; reinstall it"


def main() -> int:
    """Runs the command line; the exit status is 1, with one line on standard error, when a patch does not fit."""
    parser = argparse.ArgumentParser(description="Apply Orbit's patches to the installed packages.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a patch does not fit")
    arguments = parser.parse_args()
    try:
        report = run(pathlib.Path(sysconfig.get_paths()["purelib"]), check=arguments.check)
    except PatchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
