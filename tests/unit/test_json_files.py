"""A JSON file that is cut short is named, with the place where it breaks off and the cure, whoever reads it."""

import json
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from orbit_kernels.checkpoint.files import INDEX_FILE, HFCheckpoint
from orbit_kernels.contract.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder
from orbit_kernels.json_files import check_json_files, read_json
from orbit_sglang.startup.flags import around_init
from orbit_sglang.startup.scheme import read_config


def cut(path: Path, *, size: int = 30) -> str:
    """Writes a file that breaks off in its second line, and returns what must be said of it."""
    whole = json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}, indent=2)
    path.write_text(whole[:size])
    return rf"{path.name}: no JSON from line \d+, column \d+ on .* has {size} bytes.*: it is cut short .* download it again"


@pytest.mark.parametrize("size", [0, 1, 30, 60])
def test_a_file_that_is_cut_short_is_named_with_the_place(tmp_path, size):
    with pytest.raises(ValueError, match=cut(tmp_path / "config.json", size=size)):
        read_json(tmp_path / "config.json")


def test_files_that_are_no_json_objects_are_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="config.json: no JSON .*it is damaged"):
        read_json(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="config.json: holds a JSON list, must hold an object"):
        read_json(file)
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}


def test_every_reader_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=cut(tmp_path / INDEX_FILE)):
        HFCheckpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match=f"{INDEX_FILE}: has no weight_map"):
        HFCheckpoint(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match=cut(tmp_path / CONFIG_FILE)):
        read_peft_folder(tmp_path)
    with pytest.raises(ValueError, match=cut(tmp_path / "config.json")):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_server_names_the_files_that_others_read(tmp_path, name):
    message = cut(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        check_json_files(tmp_path)
    with pytest.raises(ValueError, match=message):
        around_init(ServerArgs.__init__, object.__new__(ServerArgs), model_path=str(tmp_path), enable_orbit_slots=True)
