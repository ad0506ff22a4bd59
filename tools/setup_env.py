"""This script creates ``.venv`` with the pinned stack, or finds in a moment that nothing changed.

    python3 tools/setup_env.py

It uses the standard library only, and syntax that is old enough for a wrong Python to say so. Every failure is one line
on standard error and exit status 1.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 12)
REQUIRED_FREE_BYTES = 12 * 10**9
# What the environment is made of: a change in any of these files installs again.
INPUTS = ("requirements/*.txt", "patches/*", "pyproject.toml", "tools/setup_env.py")
STAMP = "orbit-setup.sha256"


class SetupError(Exception):
    """The exception says what went wrong and how to mend it, in one line."""


def main() -> int:
    """Sets up, and returns the exit status."""
    try:
        setup(ROOT)
    except SetupError as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; run it again to finish\n")
        return 130
    return 0


def setup(root: Path) -> None:
    """Brings ``root/.venv`` up to date.

    Raises:
        SetupError: wrong Python, too little disk, or a step that failed.
    """
    venv = root / ".venv"
    stamp, digest = venv / STAMP, inputs_digest(root)
    if stamp.is_file() and stamp.read_text() == digest and (venv / "bin" / "python").exists():
        say("environment is up to date")
        return
    start = time.monotonic()
    python = venv / "bin" / "python"
    if python.exists():
        check_python(python_version(str(python)), f"{python}; remove .venv")
    if not (venv / "bin" / "pip").exists():
        create_venv(venv, root)
    uv = venv / "bin" / "uv"
    installer = root / "requirements" / "installer.txt"
    step("installing uv", [python, "-m", "pip", "install", "--quiet", "-r", installer], root)
    uv_install = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps"]
    step("installing the pinned stack", [*uv_install, "-r", root / "requirements" / "stack.txt"], root)
    step("installing Orbit", [*uv_install, "--no-build-isolation", "--editable", root], root)
    step("patching", [python, root / "patches" / "apply.py"], root)
    # Neither uv nor an environment with PYTHONDONTWRITEBYTECODE compiles, and every later start would pay for it.
    # Packages ship templates and files for other Pythons that do not compile, so the exit status says nothing.
    say("byte-compiling site-packages")
    subprocess.run([python, "-W", "ignore", "-m", "compileall", "-qq", "-j2", venv / "lib"], check=False)
    stamp.write_text(digest)
    say(f"done in {time.monotonic() - start:.0f} s")


def inputs_digest(root: Path) -> str:
    """Returns the SHA-256 over the names and contents of ``INPUTS``."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in INPUTS for path in root.glob(pattern) if path.is_file()):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def create_venv(venv: Path, root: Path) -> None:
    """Makes an empty environment, after checking the interpreter and the disk."""
    interpreter = find_python()
    check_disk(root, REQUIRED_FREE_BYTES)
    step("creating .venv", [interpreter, "-m", "venv", venv], root)


def find_python() -> str:
    """Returns the first Python 3.12 among the running one and those on PATH.

    Raises:
        SetupError: there is none.
    """
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    for name in ("python3.12", "python3", "python"):
        found = shutil.which(name)
        if found and python_version(found) == PYTHON:
            return found
    check_python(sys.version_info[:2], sys.executable)
    raise AssertionError("unreachable: check_python accepts only the version that was looked for")


def python_version(interpreter: str) -> tuple:
    """Returns the major and minor version of an interpreter.

    It is (0, 0) for one that does not start, such as an empty pyenv shim.
    """
    code = "import sys; print(*sys.version_info[:2])"
    ran = subprocess.run([interpreter, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return tuple(int(part) for part in ran.stdout.split()) if ran.returncode == 0 else (0, 0)


def check_python(version: tuple, where: str) -> None:
    """Refuses any Python but 3.12.

    Raises:
        SetupError: it is another version.
    """
    if tuple(version) != PYTHON:
        raise SetupError(
            f"needs Python {_dotted(PYTHON)}, got {_dotted(version)} ({where}); install python3.12, for example with "
            "`pyenv install 3.12`, and run again"
        )


def check_disk(folder: Path, required_bytes: int) -> None:
    """Refuses to start an installation that would not fit.

    Raises:
        SetupError: fewer bytes are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < required_bytes:
        raise SetupError(
            f"needs {required_bytes / 1e9:.0f} GB free in {folder}, got {free_bytes / 1e9:.1f} GB; "
            "free some space and run again"
        )


def step(what: str, command: list, root: Path) -> None:
    """Runs one command, whose output goes through.

    Raises:
        SetupError: it failed; names the step and what usually mends it.
    """
    say(what)
    # What a shell exports for another environment must not lead uv there.
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    status = subprocess.run([str(part) for part in command], cwd=str(root), env=environment, check=False).returncode
    if status:
        raise SetupError(
            f"{what} failed with exit status {status}; the reason is above. For a download, check the network and "
            "pip's and uv's index settings; then run again, it goes on where it stopped"
        )


def _dotted(version: tuple) -> str:
    return ".".join(str(part) for part in version)


def say(message: str) -> None:
    """Writes one line of progress."""
    sys.stdout.write(f"setup: {message}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
