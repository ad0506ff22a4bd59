from orbit_cli import run_metrics
from orbit_cli.run_metrics import Step
from recipes import demo
from recipes.demo import Progress, error_lines


def test_errors_of_a_log_are_found_behind_rays_prefixes(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "\x1b[36m(TaskRunner pid=12)\x1b[0m ValueError: orbit.adapter.block_size: 48\n"
        "\x1b[36m(TaskRunner pid=13)\x1b[0m ValueError: orbit.adapter.block_size: 48\n"
        "shutting down\n"
    )
    assert error_lines(log) == ["ValueError: orbit.adapter.block_size: 48"]


def test_a_log_without_errors_gives_its_last_lines(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("\n".join(f"line {index}" for index in range(30)))
    assert error_lines(log) == [f"line {index}" for index in range(22, 30)]


def test_progress_shows_only_what_a_step_recorded():
    step = Step(4, {run_metrics.REWARD: 0.5, run_metrics.SERVED_VERSION: 5, "val-core/x/acc/mean@1": 0.75})
    line = Progress.line(step)
    for expected in ("step   4", "reward 0.500", "version 5", "held-out accuracy 75.0%"):
        assert expected in line
    assert "log-prob" not in line


def test_a_second_demo_is_refused_and_removes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "OUTPUT_DIR", tmp_path / "runs" / "demo")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    log = tmp_path / "runs" / "demo" / "train.log"
    log.write_text("of the first")
    with demo._lock():
        assert demo.main([]) == 1
    assert "another demo is running in runs/demo" in capsys.readouterr().out
    assert log.read_text() == "of the first"
    demo._lock().close()
