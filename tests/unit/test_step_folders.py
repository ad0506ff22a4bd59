"""Which steps of a run are kept, and which one it resumes from."""

import pytest

from orbit_verl.driver.step_folders import StepFolders


def save(steps: StepFolders, step: int, text: str = "") -> None:
    with steps.saved(step) as folder:
        write(folder, text or str(step))


def write(folder, text: str = "") -> None:
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "state.json").write_text(text)
    (folder / "data.pt").write_text(text)


def names(steps: StepFolders) -> set[str]:
    return {path.name for path in steps.root.iterdir() if path.is_dir()}


def test_whole_steps_are_removed_whichever_process_saved_them(tmp_path):
    """A resumed run counts those of the run before; ``data.pt`` goes with its step."""
    for step in range(1, 4):
        save(StepFolders(tmp_path), step)
    resumed = StepFolders(tmp_path)
    save(resumed, 4)
    resumed.remove_old(2)
    assert names(resumed) == {"global_step_3", "global_step_4"}
    assert resumed.committed() == 4


def test_only_steps_before_the_committed_one_are_removed(tmp_path):
    """A run that starts anew beside later steps of another keeps its own, and leaves those."""
    steps = StepFolders(tmp_path)
    for step in (8, 9, 1, 2):
        save(steps, step)
    steps.remove_old(1)
    assert names(steps) == {"global_step_2", "global_step_8", "global_step_9"}


def test_what_another_put_there_is_never_removed(tmp_path):
    steps = StepFolders(tmp_path / "run")
    for step in range(1, 6):
        save(steps, step)
    foreign = ["global_step_1_best", "global_step_0", "my_thesis"]
    for name in foreign:
        (steps.root / name).mkdir()
    write(tmp_path / "elsewhere" / "global_step_2")
    steps.folder(2).rename(tmp_path / "moved")
    steps.folder(2).symlink_to(tmp_path / "elsewhere" / "global_step_2")
    steps.remove_old(1)
    assert names(steps) == {*foreign, "global_step_2", "global_step_5"}
    assert (tmp_path / "elsewhere" / "global_step_2" / "actor" / "state.json").is_file()


def test_a_step_without_the_actors_state_is_not_committed(tmp_path):
    steps = StepFolders(tmp_path)
    save(steps, 1)
    with pytest.raises(ValueError, match="must be a folder that all nodes share"), steps.saved(2) as folder:
        (folder / "data.pt").write_text("")
    assert names(steps) == {"global_step_1"} and steps.committed() == 1


def test_a_tracker_whose_step_is_gone_is_refused_with_the_steps_there_are(tmp_path):
    """docs/field-cases.md: nothing to resume from."""
    steps = StepFolders(tmp_path)
    assert steps.committed() is None
    steps.tracker.write_text("7")
    with pytest.raises(ValueError, match=r"global_step_7 is not there.*no whole step.*trainer\.resume_mode=disable"):
        steps.committed()
    write(steps.folder(3))
    with pytest.raises(ValueError, match=r"whole steps there: \[3\]; resume with .*resume_from_path=.*global_step_3"):
        steps.committed()
    (steps.folder(7) / "actor").mkdir(parents=True)
    with pytest.raises(ValueError, match="global_step_7 is not there or not whole"):
        steps.committed()
    steps.tracker.write_text("")
    with pytest.raises(ValueError, match="holds '': must be the number of a step"):
        steps.committed()
