"""`omni data check`: what prompt files hold, and the exit code that says whether they can be trained on."""

from __future__ import annotations

import json

import pytest

from omni_trainer import cli


@pytest.fixture
def check(tmp_path, toys, capsys, monkeypatch):
    """Run the command in a folder of its own: `check("p.txt", ...)` -> (exit code, lines)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = cli.main(["data", "check", *arguments])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_a_good_file_passes_and_is_described(check, tmp_path):
    (tmp_path / "p.txt").write_text('a sign "Hi"\na wall "No"\nanother sign "Hello"\n')
    code, lines = check("p.txt", "reward.name=ocr")
    assert code == 0
    assert [line.split() for line in lines] == [
        ["train"],
        ["file", "p.txt"],
        ["rows", "3"],
        ["bad", "rows", "0"],
        ["with", "a", "target", "3"],
        ["repeated", "0"],
        ["characters", "11", "to", "20,", "median", "11"],
        ["no", "token", "was", "counted:", "no", "--tokenizer"],
        ["the", "files", "can", "be", "trained", "on"],
    ]


def test_bad_rows_fail_the_check_by_line_unless_they_are_left_out(check, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"text": "b"}\n')
    code, lines = check("p.jsonl")
    assert code == 1
    assert lines[-4:] == [
        "error: 2 bad rows",
        "  p.jsonl:2: blank",
        "  p.jsonl:3: no 'prompt'; a text is expected (columns: text)",
        "the check failed",
    ]
    code, lines = check("p.jsonl", "data.on_bad_row=skip")
    assert code == 0
    assert "warning: 2 bad rows" in lines
    assert check("p.jsonl", "data.on_bad_row=skip", "--strict")[0] == 1


def test_a_prompt_without_a_target_is_a_bad_row_of_the_reward(check, tmp_path):
    (tmp_path / "p.txt").write_text('a sign "Hi"\na sign\n')
    assert check("p.txt")[0] == 0
    code, lines = check("p.txt", "reward.name=ocr")
    assert code == 1
    assert any(line.startswith("  p.txt:2: no text in double quotes") for line in lines)


def test_a_heldout_prompt_that_is_trained_on_fails_the_check(check, tmp_path):
    (tmp_path / "train.txt").write_text("one\nA  wall\nthree\n")
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "two"}\n{"prompt": "a wall"}\n')
    code, lines = check("train.txt", "data.heldout=heldout.jsonl")
    assert code == 1
    assert lines[-3:] == [
        "error: 1 held-out prompt is trained on",
        "  heldout.jsonl:2 is train.txt:2: 'a wall'",
        "the check failed",
    ]


def test_repeats_are_a_warning(check, tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\nOne \n")
    code, lines = check("p.txt")
    assert code == 0
    assert lines[-3:-1] == [
        "warning: 1 prompt is a repeat",
        "  p.txt:3: the prompt of 1 again",
    ]
    assert check("p.txt", "--strict")[0] == 1


def test_many_findings_are_counted_and_not_all_shown(check, tmp_path):
    (tmp_path / "p.txt").write_text("one\n" * 31)
    _, lines = check("p.txt")
    assert "warning: 30 prompts are repeats" in lines
    assert lines[-2] == "  ... and 10 more"


def test_a_runs_config_is_checked_with_its_own_model_and_columns(check, toy_source, tmp_path):
    code, lines = check(toy_source)
    assert code == 0
    rows = {line[:15].strip(): line[15:].strip() for line in lines}
    assert rows["rows"].split() == ["7", "3"]
    assert rows["with a target"].split() == ["7", "3"]
    assert rows["tokens read"].split() == ["256", "256"]
    assert rows["cut"].split() == ["0", "0"]

    code, lines = check(toy_source, "model.pipeline.max_sequence_length=4")
    assert code == 0
    assert "warning: 10 prompts are cut" in lines
    assert "  train.txt:1: 5 tokens, and 4 are read" in lines

    data = tmp_path / "rows.csv"
    data.write_text("text,word\na,b\n,c\n")
    code, lines = check(toy_source, f"data.train={data}", "data.prompt_column=text")
    assert code == 1
    assert "  rows.csv:3: no 'text'; a text is expected (columns: word)" in lines


def test_a_missing_model_leaves_tokens_uncounted(check, toy_source, tmp_path, monkeypatch):
    from omni_core.testing.toys import ToyEngine

    def missing(self, prompts):
        raise FileNotFoundError("no such model")

    monkeypatch.setattr(ToyEngine, "prompt_lengths", missing)
    code, lines = check(toy_source)
    assert code == 0
    assert "no token was counted: no such model" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.txt"], "'nowhere.txt' does not exist"),
        (["empty.txt"], "empty.txt holds no prompt: the file is empty"),
        (["p.txt", "trainer.steps=3"], "trainer: a prompt file takes data.* and reward.*"),
        (["p.txt", "data.prompt_colum=x"], "data.prompt_colum: unknown key; did you mean"),
        (["p.txt", "reward.name=nobody"], "reward.name: no omni.rewards plugin named 'nobody'"),
        (["p.txt", "--tokenizer", "nowhere"], "there is no directory 'nowhere'"),
        (["nothing"], "no omni.recipes plugin named 'nothing'"),
    ],
)
def test_what_cannot_be_checked_is_a_sentence(tmp_path, toys, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "p.txt").write_text("one\n")
    assert cli.main(["data", "check", *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


def test_prompts_that_the_model_cuts_are_counted_and_told_of_once(train, metrics, capsys):
    import structlog

    with structlog.testing.capture_logs() as logs:
        found = train("model.pipeline.max_sequence_length=4", "trainer.steps=2")
    lines = metrics(found.run_dir)
    assert [line["rollout/cut_prompts"] for line in lines[1:]] == [3.0, 3.0]
    told = [entry for entry in logs if entry["event"] == "prompts.cut"]
    assert len(told) == 1
    assert (told[0]["longest"], told[0]["limit"], told[0]["log_level"]) == (5, 4, "warning")
    assert json.dumps(told[0]["prompt"]).startswith('"a bright sign number ')


def test_prompts_that_fit_are_counted_as_such(train, metrics):
    import structlog

    with structlog.testing.capture_logs() as logs:
        found = train("trainer.steps=1")
    assert metrics(found.run_dir)[-1]["rollout/cut_prompts"] == 0.0
    assert not [entry for entry in logs if entry["event"] == "prompts.cut"]
