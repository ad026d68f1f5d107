"""`omni train | resume | eval | export` on the toys: what is said, where things lie, exit codes."""

import errno
import json
import signal
import subprocess
import sys
import time

import pytest

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.testing.toys import register_toys, unregister_toys
from omni_trainer import cli

RUN = """
model: {path: toy, family: toy, pipeline: {height: 8, width: 8}}
engine: {name: toy}
rollout: {name: toy, samples_per_prompt: 4, sampling: {num_inference_steps: 4, guidance_scale: 1.0}}
algorithm: {name: flow_grpo}
reward: {name: toy}
data: {train: prompts.txt, heldout: heldout.txt, prompts_per_step: 2}
evaluation: {samples_per_prompt: 2, sampling: {num_inference_steps: 4, guidance_scale: 1.0}}
checkpoint: {every: 1}
trainer: {steps: 3, name: toy}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    register_toys()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na bird\na fish\n")
    (tmp_path / "heldout.txt").write_text("a cow\na hen\n")
    yield tmp_path
    unregister_toys()


def test_train_eval_export_and_a_finished_run(folder, capsys):
    assert cli.main(["train", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "run runs/toy\n" in said
    assert "trained 3 steps in " in said
    assert "gain in reward: " in said
    assert "LoRA: runs/toy/export/" in said

    assert cli.main(["eval", "runs/toy", "--step", "3"]) == 0
    lines = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    evaluated = [
        json.loads(line)["heldout/reward_mean"]
        for line in (folder / "runs/toy/metrics.jsonl").read_text().splitlines()
        if "heldout/reward_mean" in line
    ]
    assert lines["heldout/reward_mean"] == f"{evaluated[-1]:.4g}"

    assert cli.main(["export", "runs/toy", "--output", "out"]) == 0
    assert "load it: pipeline.load_lora_weights(" in capsys.readouterr().out
    assert (folder / "out/sampling.json").is_file()

    assert cli.main(["resume", "runs/toy"]) == 0
    assert "runs/toy was finished already, after 3 steps\n" in capsys.readouterr().out


def test_a_second_run_of_one_name_is_refused(folder, capsys):
    assert cli.main(["train", "run.yaml", "trainer.steps=1"]) == 0

    assert cli.main(["train", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert "error: runs/toy already holds a run; `omni resume runs/toy` goes on with it" in err


@pytest.mark.parametrize("command", ["resume", "eval", "export"])
def test_a_directory_without_a_run_is_a_sentence(command, folder, capsys):
    assert cli.main([command, "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere holds no run")


def test_a_step_without_a_checkpoint_lists_those_that_are_there(folder, capsys):
    assert cli.main(["train", "run.yaml", "trainer.steps=2"]) == 0

    assert cli.main(["export", "runs/toy", "--step", "7"]) == 1
    assert "no checkpoint of step 7; complete ones: 1, 2" in capsys.readouterr().err


def test_bad_prompts_are_named_by_line_and_exit_with_2(folder, capsys):
    (folder / "prompts.txt").write_text("")

    assert cli.main(["train", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not (folder / "runs/toy").exists()


def test_case_35_a_failed_worker_is_named_first_and_the_run_can_go_on(folder, capsys, monkeypatch):
    from omni_core.testing.toys import ToyReward

    def fails(*_):
        raise ValueError("x")

    monkeypatch.setattr(ToyReward, "score", fails)

    assert cli.main(["train", "run.yaml"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: reward rank 0: ValueError: x")
    assert "the run is in runs/toy; it has no checkpoint yet" in rest[-1]


def test_what_the_model_refuses_is_a_sentence_and_the_name_stays_free(folder, capsys, monkeypatch):
    # The config knows of this combination already; what only the model knows takes the worker's road.
    monkeypatch.setattr(FlowGRPOOptions, "mistakes", lambda self, facts: {})
    refused = ["train", "run.yaml", "trainer.steps=1", "model.lora=null", "algorithm.kl_coef=0.1"]
    assert cli.main(refused) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: actor rank 0: ValueError: algorithm.name: flow_grpo cannot train"
    )
    assert line.endswith("`omni -v` shows the traceback")

    assert cli.main(["-v", *refused]) == 2
    assert "Traceback" in capsys.readouterr().err

    assert cli.main(["train", "run.yaml", "trainer.steps=1"]) == 0
    assert "lora: null" not in (folder / "runs/toy/config.yaml").read_text()


def test_what_a_run_has_not_is_a_sentence(folder, capsys):
    bare = ["data.heldout=null", "model.lora=null", "trainer.steps=1"]
    assert cli.main(["train", "run.yaml", *bare]) == 0

    assert cli.main(["eval", "runs/toy"]) == 2
    said = "error: runs/toy: nothing to evaluate: data.heldout is not set\n"
    assert capsys.readouterr().err.endswith(said)
    assert cli.main(["export", "runs/toy"]) != 0
    assert "ToyEngine writes no pipelines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.prompts_per_step=9", "data.tail: a batch of 9 prompts never fills from 4 rows"),
        ("trainer.run_dir=prompts.txt", "prompts.txt"),
    ],
)
def test_a_mistake_beside_the_config_is_a_sentence(override, said, folder, capsys):
    assert cli.main(["train", "run.yaml", "data.tail=drop", override]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_disk_that_is_full_is_a_sentence(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert cli.main(["train", "run.yaml"]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == "error: No space left on device"
    assert last.startswith("the run is in runs/toy; ")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_says_where_the_run_is_and_how_to_go_on(number, code, word, folder):
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from omni_core.testing.toys import register_toys\n"
        "from omni_trainer.cli import main\n"
        "register_toys()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-u", "-c", script, "train", "run.yaml", "trainer.steps=100000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    checkpoint = folder / "runs/toy/checkpoints/step-000002/COMPLETE"
    for _ in range(600):
        if checkpoint.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert process.returncode == code, err
    said = err.splitlines()[-1]
    assert said.startswith(f"{word}; the run is in runs/toy; `omni resume runs/toy` goes on ")
    assert "Traceback" not in err
