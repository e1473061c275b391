"""`megatrain report` on a real run, and on what is none."""

from tests.unit.test_report import Page


def test_a_finished_run_has_a_page(megatrain, trained, tmp_path):
    folder, _ = trained
    result = megatrain("report", folder, "--output", tmp_path / "pages" / "run.html")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "pages" / "run.html")
    page = Page((tmp_path / "pages" / "run.html").read_text())
    for part in ("Finished: 6 of 6 steps.", "Timeline of step 6", "model_type: llama", "update"):
        assert part in page.text, part
    assert "Host memory, GiB: " in page.text and "Device memory" not in page.text  # on the CPU
    assert "is not there" not in page.text
    result = megatrain("report", folder, "--output", folder / "metrics.jsonl")
    assert result.exit_code == 2 and "name one that ends in .html" in result.stderr


def test_what_is_no_run_is_refused_in_one_line(megatrain, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("hello")
    for name in ("empty", "text.json", "gone"):
        result = megatrain("report", tmp_path / name)
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert name in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "text.json"}
