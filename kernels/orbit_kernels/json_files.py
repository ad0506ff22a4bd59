"""This module reads the JSON files of models and adapters, and says of a damaged one which it is and where it breaks off.

It is importable without torch.
"""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ValueError: the file is cut short or damaged, or holds no object; the message names file, position and cure.
    """
    value = _parsed(Path(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}, must hold an object; copy or download it again")
    return value


def check_json_files(folder: str | Path) -> None:
    """Reads every JSON file of a model's folder, whose other readers do not name the file that they cannot read.

    Raises:
        ValueError: a file is cut short or damaged.
    """
    for path in sorted(Path(folder).glob("*.json")):
        _parsed(path)


def _parsed(path: Path) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: no JSON from line {error.lineno}, column {error.colno} on ({error.msg}; the file has {len(content)} bytes): "
            "it is cut short or damaged; copy or download it again"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error}): it is damaged; copy or download it again") from None
