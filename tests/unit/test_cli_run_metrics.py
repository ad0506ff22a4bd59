import json

import pytest
from rich.console import Console
from verl.utils.tracking import FileLogger

from orbit_cli import run_metrics
from orbit_cli.run_metrics import MetricsFile, Step, merge, read_run
from orbit_cli.run_summary import save_picture, summary_table


def _line(step, **values):
    return json.dumps({"step": step, "data": values}) + "\n"


def _run():
    accuracy = "val-core/tiny_arithmetic/acc/mean@1"
    steps = [Step(0, {accuracy: 0.5})]
    for step in range(1, 11):
        values = {
            run_metrics.REWARD: step / 20,
            "orbit/parity/logprob_abs_diff_mean": 1e-3,
            "orbit/parity/audit_logprob_abs_diff_max": 2e-2 if step == 7 else 1e-2,
            run_metrics.SERVED_VERSION: step,
            run_metrics.REQUESTS_IN_FLIGHT: step % 2,
            run_metrics.ACTIVATE_PAUSE_MS: 0.2,
            run_metrics.SYNC_BYTES: 95_000,
        }
        steps.append(Step(step, values | ({accuracy: 0.9} if step == 10 else {})))
    return steps


def test_reads_what_verls_file_logger_writes(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    logger = FileLogger("orbit", "test")
    logger.log({run_metrics.REWARD: 0.25, "text": "left out"}, 3)
    logger.finish()
    assert read_run(path) == [Step(3, {run_metrics.REWARD: 0.25})]


def test_a_line_that_is_being_written_waits_until_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.read_new() == []
    whole = _line(1, a=1.0)
    path.write_text(whole + _line(2, a=2.0)[:9])
    assert file.read_new() == [Step(1, {"a": 1.0})]
    assert file.read_new() == []
    path.write_text(whole + _line(2, a=2.0))
    assert file.read_new() == [Step(2, {"a": 2.0})]


def test_lines_of_one_step_are_merged_in_order():
    assert merge([Step(2, {"a": 1}), Step(1, {"b": 2}), Step(2, {"c": 3})]) == [
        Step(1, {"b": 2}),
        Step(2, {"a": 1, "c": 3}),
    ]


def test_a_broken_line_or_an_empty_run_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="no steps"):
        read_run(path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="verl's file logger"):
        read_run(path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"val-core/x/reward/mean@1": 0.25, "val-core/x/acc/mean@1": 0.5}, 0.5),
        ({"val-core/x/reward/mean@1": 0.25}, 0.25),
        ({"val-aux/x/acc/mean@1": 0.5}, None),
    ],
)
def test_validation_accuracy_prefers_acc(values, expected):
    assert Step(1, values).validation_accuracy == expected


def test_log_prob_difference_is_the_audits_when_no_token_is_of_the_trained_version():
    audit = {"orbit/parity/audit_logprob_abs_diff_mean": 0.0, "orbit/parity/stale_logprob_abs_diff_mean": 0.5}
    assert Step(1, audit).logprob_diff_mean == 0.0
    assert Step(1, audit | {"orbit/parity/logprob_abs_diff_mean": 0.25}).logprob_diff_mean == 0.25
    assert Step(1, {"orbit/parity/stale_logprob_abs_diff_mean": 0.5}).logprob_diff_mean is None


def test_table_says_what_the_run_came_to():
    console = Console(width=120, record=True)
    console.print(summary_table(_run()))
    text = console.export_text()
    for expected in (
        "50.0% at step 0 -> 90.0% at step 10 (+40.0 points)",
        "0.150 -> 0.400",
        "10, the last is 10",
        "5 of 10",
        "median 0.20 ms",
        "95.0 kB",
        "mean 1.0e-03, max 2.0e-02",
    ):
        assert expected in text


def test_table_and_picture_do_without_what_was_not_recorded(tmp_path):
    steps = [Step(1, {run_metrics.REWARD: 0.5})]
    assert summary_table(steps).row_count == 1
    save_picture(steps, tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


def test_picture_is_a_png_that_changes_with_the_run(tmp_path):
    save_picture(_run(), tmp_path / "whole.png")
    save_picture(_run()[:5], tmp_path / "half.png")
    whole = (tmp_path / "whole.png").read_bytes()
    assert whole.startswith(b"\x89PNG")
    assert whole != (tmp_path / "half.png").read_bytes()
