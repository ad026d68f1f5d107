"""What `omni doctor RUN` reads out of a run directory: each symptom from the least that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from omni_trainer import cli
from omni_trainer.diagnosis import diagnose, explains
from omni_trainer.run_record import RunRecord
from omni_trainer.symptoms import SYMPTOMS, Weight, page_of_symptoms

CONFIG = {
    "trainer": {"steps": 100},
    "data": {"prompts_per_step": 4},
    "rollout": {"samples_per_prompt": 8},
    "algorithm": {"name": "flow_grpo", "clip_ratio": 1e-4},
    "reward": {"name": "ocr", "on_error": "mask"},
}
WELL = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/unscored": 0.0,
    "reward/retries": 0.0,
    "reward/blank": 0.3,
    "advantage/zero_std_groups": 1.0,
    "actor/lr": 1e-4,
    "actor/grad_norm": 0.1,
    "actor/clip_fraction": 0.1,
    "actor/skipped_steps": 0.0,
    "rollout/old_log_probs_recomputed": 0.0,
    "memory/driver_rss": 1.0,
}


@pytest.fixture
def made(tmp_path):
    """Write a run directory: `made(metrics=..., status=..., heldout=...)` -> its record."""

    def make(*, steps=60, change=lambda step: {}, status=None, heldout=None, ranks=True):
        run = tmp_path / "run"
        (run / "evaluations").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        if ranks:
            (run / "ranks.json").write_text(json.dumps({"ranks": [{"device": "cpu"}]}))
        lines = [{"step": step, **WELL, **change(step)} for step in range(1, steps + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        plain = {"state": "finished", "error": "", "said": "", "died": False, "disk_full": False}
        (run / "status.json").write_text(json.dumps({**plain, **(status or {})}))
        for step, rewards in (heldout or {}).items():
            prompts = [
                {"row_id": str(i), "prompt": "p", "target": None, "rewards": [r], "unscored": 0}
                | {"details": {}, "seeds": [1]}
                for i, r in enumerate(rewards)
            ]
            path = run / f"evaluations/step-{step:06d}.json"
            path.write_text(json.dumps({"step": step, "prompts": prompts, "seconds": 1.0}))
        return RunRecord(run)

    return make


def failed(error, said, **more):
    return {"status": {"state": "failed", "error": error, "said": said, **more}}


LOW, HIGH = [0.1, 0.2, 0.3, 0.2], [0.6, 0.7, 0.8, 0.7]
CASES = [
    (
        "canary",
        failed("CanaryError", "the exact canary is 0.3, not 0"),
        "after 60 of 100 steps: Can",
    ),
    ("reward_failed", failed("UnscoredError", "3 of 32 samples have no score"), "3 of 32 samples"),
    (
        "reward_failed",
        failed("WorkerError", "reward rank 1: ValueError: x (in score)\nTraceback"),
        "WorkerError: reward rank 1: ValueError: x (in score)",
    ),
    (
        "non_finite",
        failed("WorkerError", "actor rank 0: NonFiniteGradientsError: 9 in a row (in update)"),
        "NonFiniteGradientsError: 9 in a row",
    ),
    ("worker_died", failed("WorkerError", "actor rank 1: its process died", died=True), "process"),
    ("failed", failed("WorkerError", "actor rank 0: KeyError: 'x' (in generate)"), "KeyError: 'x'"),
    ("disk_full", failed("OSError", "[Errno 28] No space left on device", disk_full=True), "28"),
    (
        "disk_full",
        failed(
            "WorkerError", "actor rank 0: OSError: [Errno 28] No space left on device (in save)"
        ),
        "No space left",
    ),
    ("never_started", {**failed("WorkerError", "actor rank 0: x"), "ranks": False}, "rank 0"),
    ("killed", {"status": {"state": "running"}}, "there is no checkpoint"),
    ("interrupted", {"status": {"state": "interrupted"}}, "after 60 of 100 steps"),
    (
        "constant_reward",
        {"change": lambda step: {"advantage/zero_std_groups": 3.0}},
        "75% of groups, steps 1 to 60; scores lie between 0 and 1",
    ),
    ("no_learning_rate", {"change": lambda step: {"actor/lr": 1e-9 * step / 60}}, "at most 1e-09"),
    ("no_gradient", {"change": lambda step: {"actor/grad_norm": 0.0}}, "steps 1 to 60"),
    (
        "unscored",
        {"change": lambda step: {"reward/unscored": 2.0 if step > 50 else 0.0}},
        "20 samples in 10 steps of 32 a step, first at step 51; reward.on_error is mask",
    ),
    (
        "clipped",
        {"change": lambda step: {"actor/clip_fraction": step / 60}},
        "76% of terms, steps 31 to 60; clip 0.0001",
    ),
    (
        "unstable",
        {"change": lambda step: {"actor/grad_norm": 10.0 ** (step / 10)}},
        "from 11.3 to 1.13e+05",
    ),
    (
        "skipped_steps",
        {"change": lambda step: {"actor/skipped_steps": float(step in (7, 9))}},
        "2 of them; at steps 7, 9",
    ),
    ("blank", {"change": lambda step: {"reward/blank": 0.97}}, "reward/blank is 0.97 at step 60"),
    ("heldout_fell", {"heldout": {0: HIGH, 10: LOW}}, "-0.500 [-0.500, -0.500] over 10 steps"),
    ("no_gain", {"heldout": {0: LOW, 60: LOW}}, "0.000 [0.000, 0.000] over 60 steps"),
    ("retries", {"change": lambda step: {"reward/retries": 1.0}}, "in 60 of 60 steps"),
    (
        "recomputed",
        {"change": lambda s: {"rollout/old_log_probs_recomputed": 1.0, "canary/floor": 3e-5}},
        "canary/floor 3e-05",
    ),
    (
        "memory_grows",
        {"change": lambda step: {"memory/driver_rss": 1.0 + step / 10}},
        "memory/driver_rss from 2.85 to 6.45 GiB, steps 1 to 60",
    ),
]


@pytest.mark.parametrize(("key", "shows", "evidence"), CASES, ids=[case[0] for case in CASES])
def test_a_symptom_is_named_with_its_evidence(made, key, shows, evidence):
    (found,) = diagnose(made(**shows))

    assert found.symptom is SYMPTOMS[key]
    assert evidence in found.evidence
    assert explains([found]) == (found.symptom.weight > Weight.NOTE)


def test_every_symptom_is_shown_by_a_case():
    assert {key for key, _, _ in CASES} == set(SYMPTOMS)


@pytest.mark.parametrize("heldout", [{0: LOW, 60: HIGH}, {0: LOW}, {0: LOW, 5: LOW}, {}])
def test_a_run_that_is_well_shows_nothing(made, heldout):
    assert diagnose(made(heldout=heldout)) == []


def test_a_reward_that_is_only_watched_may_be_constant(made, monkeypatch):
    monkeypatch.setitem(CONFIG, "algorithm", {"name": "distillation"})
    assert diagnose(made(change=lambda step: {"advantage/zero_std_groups": 4.0})) == []


def test_a_killed_run_on_a_full_disk_had_no_room_to_say_so(made, monkeypatch):
    monkeypatch.setattr(RunRecord, "free_disk", 10)
    assert [one.symptom.key for one in diagnose(made(status={"state": "running"}))] == ["disk_full"]


def test_a_run_under_way_was_not_killed(made):
    record = made(status={"state": "running"})
    with record.run.locked():
        assert record.in_use
        assert diagnose(record) == []
        assert record.state == "under way"
    assert RunRecord(record.path).killed


def test_what_explains_most_comes_first_and_decides_the_exit_code(made, capsys):
    change = {"reward/retries": 1.0, "advantage/zero_std_groups": 4.0}
    record = made(change=lambda step: change, **failed("CanaryError", "[bold]no[/bold]"))

    assert cli.main(["doctor", str(record.path)]) == 1
    said = capsys.readouterr().out
    assert said.index("(stopped, canary)") < said.index("(learning, constant_reward)")
    assert said.index("constant_reward") < said.index("(note, retries)")
    assert "CanaryError: [bold]no[/bold]" in said


def test_notes_alone_leave_0(made, capsys):
    record = made(change=lambda step: {"reward/retries": 1.0})
    assert cli.main(["doctor", str(record.path)]) == 0
    assert "(note, retries)" in capsys.readouterr().out


def test_a_directory_without_a_run_is_wrong_usage(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_page_of_symptoms_is_the_doctors():
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text()
    start = page.index("## Runs that stopped")
    assert page[start:].rstrip() == "\n".join(page_of_symptoms()).rstrip()
