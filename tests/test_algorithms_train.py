"""Every algorithm that is found by name trains a tiny random SD3 with the real engine, and goes on after a
stop as if there had been none."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import yaml
from safetensors.torch import load_file

from omni_core import plugins
from omni_core.config import ConfigError
from omni_core.testing.toys import register_toys, unregister_toys
from omni_trainer.config import load_run
from omni_trainer.data import PromptFileError
from omni_trainer.loop import Trainer
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.reporting.metric_names import METRICS, describe
from omni_trainer.run import run_training

RUN = {
    "model": {
        "family": "sd3",
        "pipeline": {"height": 16, "width": 16, "max_sequence_length": 8},
        "lora": {"rank": 2, "alpha": 8.0},
    },
    "engine": {"name": "fsdp2"},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"every": 1, "keep": 9},
    "rollout": {
        "name": "engine",
        "samples_per_prompt": 4,
        "sampling": {"num_inference_steps": 4, "guidance_scale": 1.0},
    },
    "reward": {"name": "toy"},
    "data": {"prompts_per_step": 2},
    "trainer": {"steps": 2},
}

ALGORITHMS: dict[str, dict[str, object]] = {
    "awm": {"updates_per_rollout": 2},
    "dance_grpo": {
        "updates_per_rollout": 2,
        "rollout_correction": {"importance": "token", "rejection": "z_k1", "band": [9.0]},
    },
    "dgpo": {"kl_coef": 0.01},
    "diffusion_dpo": {},
    "diffusion_nft": {"beta": 0.1},
    "distillation": {"updates_per_rollout": 2, "route": "teacher"},
    "elbo": {"old_policy": "ramp", "norm_guard": {"coef": 0.1}},
    "flow_dppo": {"updates_per_rollout": 2},
    "flow_grpo": {"window_size": 1},
    "grpo_guard": {"updates_per_rollout": 2, "kl_coef": 0.1, "kind": "cps"},
    "mix_grpo": {"window_size": 1, "interval": 1},
    "ram": {"sigmas": "logit_normal", "draws": 3, "sigma_shift": 3.0},
}
"""Name -> options that make it do all that it can."""

TEACHERS = ("dim", "bright")

FORWARD = ("awm", "dgpo", "diffusion_dpo", "diffusion_nft", "elbo", "ram")


class StoppedError(BaseException):
    """Stands for the end of the process."""


@contextmanager
def stopped():
    """Let the process end while the second step is under way."""
    train = Trainer.train

    def stopping(self):
        train(self)
        if self.step == 1:
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", stopping)
        with pytest.raises(StoppedError):
            yield


@pytest.fixture(scope="module")
def source(tmp_path_factory, tiny_sd3):
    """Path of a run's YAML file: a tiny random SD3, brightness as the reward."""
    folder = tmp_path_factory.mktemp("tiny")
    prompts = folder / "train.jsonl"
    rows = [{"prompt": f"sign {i}", "teacher": TEACHERS[i % 2]} for i in range(5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        **RUN,
        "model": {**RUN["model"], "path": str(tiny_sd3)},
        "data": {**RUN["data"], "train": str(prompts)},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    register_toys()
    yield folder / "run.yaml"
    unregister_toys()


@pytest.fixture(scope="module")
def teachers(source, tmp_path_factory):
    """Two adapters that FlowGRPO trained, as a recipe names them."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(TEACHERS):
        values = {**yaml.safe_load(source.read_text()), "algorithm": {"name": "flow_grpo"}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        loaded = load_run(str(folder / f"{name}.yaml"), [f"seeds.train={seed}", "trainer.steps=4"])
        run_training(loaded.config, run_dir=folder / name, resolved=loaded.resolved)
    return [{"name": name, "path": str(folder / name / "export")} for name in TEACHERS]


@pytest.fixture
def train(source, tmp_path, request):
    def run(name, *overrides, folder="run", resume=False, options=None):
        path = tmp_path / "run.yaml"
        values = yaml.safe_load(source.read_text())
        values["algorithm"] = {"name": name, **(ALGORITHMS[name] if options is None else options)}
        if name == "distillation":
            values["algorithm"].setdefault("teachers", request.getfixturevalue("teachers"))
        path.write_text(yaml.safe_dump(values))
        loaded = load_run(str(path), overrides)
        return run_training(
            loaded.config, run_dir=tmp_path / folder, resume=resume, resolved=loaded.resolved
        ).run_dir

    return run


def metrics(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {n: v for n, v in json.loads(line).items() if not n.startswith(("time/", "memory/"))}
        for line in lines
    ]


def checkpoint(run_dir, step):
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    state = json.loads((path / "state.json").read_text())
    state.pop("trackers")
    tensors = {}
    for file in sorted(path.rglob("*.safetensors")):
        tensors.update({name: value.tolist() for name, value in load_file(file).items()})
    return state, tensors


def test_all_algorithms_are_here():
    registry = plugins.registry(plugins.ALGORITHMS)
    ours = {n for n in registry.names() if registry.get(n).target.startswith("omni_core.")}
    assert ours == set(ALGORITHMS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_case_28_an_algorithm_trains_and_goes_on_bit_for_bit(train, name):
    whole = train(name, folder="whole")
    lines = metrics(whole)
    first, second = checkpoint(whole, 1)[1], checkpoint(whole, 2)[1]
    weights = [key for key in second if key.startswith("weights.") and ".default." in key]
    assert weights
    assert [key for key in weights if first[key] != second[key]], "nothing was trained"
    assert lines[-1]["actor/grad_norm"] > 0.0
    assert all(describe(key) for line in lines for key in line if key != "step")
    assert ("canary/exact" in lines[0]) == (name not in FORWARD)
    if name not in FORWARD:
        assert lines[0]["canary/exact"] == 0.0

    with stopped():
        train(name, folder="halves")
    resumed = train(name, folder="halves", resume=True)
    assert metrics(resumed) == lines
    assert checkpoint(resumed, 2) == checkpoint(whole, 2)


@pytest.mark.timeout(300)  # thirteen runs
def test_case_36_the_dictionary_of_metrics_holds_what_runs_emit_and_nothing_else(train, tmp_path):
    runs = [train(name, "trainer.steps=1", folder=name) for name in sorted(ALGORITHMS)]
    loaded = load_run("smoke", ["checkpoint.every=1"])  # evaluates, and reads signs
    run_training(loaded.config, run_dir=tmp_path / "smoke", resolved=loaded.resolved)
    emitted = {
        name
        for run in [*runs, tmp_path / "smoke"]
        for _, line in read_metrics(run)
        for name in line
    }

    named_by_plugins = {"reward/brightness", *(f"actor/teacher_distance/{t}" for t in TEACHERS)}
    assert emitted - METRICS.keys() == named_by_plugins
    silent = {name for name in METRICS.keys() - emitted if not name.endswith("/*")}
    # tests/test_ray_run.py, and test_ray.py of omni-trainer
    of_ray = {"memory/actor_rss", "memory/reward_rss", "memory/server_rss"}
    of_vllm = {name for name, metric in METRICS.items() if metric.when == "rollout vllm_omni"}
    assert silent == {*of_ray, *of_vllm, "time/compile"}


def test_a_group_that_is_seen_whole_has_to_fit_into_a_micro_batch(train):
    with pytest.raises(ConfigError, match=r"engine\.micro_batch_size is 3, and must be at least 4"):
        train("dgpo", "engine.micro_batch_size=3")


def test_the_old_policy_is_a_copy_where_every_weight_is_trained(train):
    run_dir = train("diffusion_nft", "model.lora=null", "optimizer.lr=1e-4")
    first, second = checkpoint(run_dir, 1)[1], checkpoint(run_dir, 2)[1]
    old = [name for name in second if name.startswith("weights.old:")]
    assert len(old) == len([name for name in second if name.startswith("weights.transformer.")])
    assert [name for name in old if first[name] != second[name]]
    assert metrics(run_dir)[-1]["actor/grad_norm"] > 0.0


def test_teachers_are_refused_without_an_adapter(train):
    with pytest.raises(ConfigError, match=r"algorithm.name: its teachers are adapters"):
        train("distillation", "model.lora=null")


@pytest.mark.parametrize("name", ["awm", "diffusion_nft", "elbo"])
def test_the_other_adapters_follow(train, name):
    run_dir = train(name)
    first, second = checkpoint(run_dir, 1)[1], checkpoint(run_dir, 2)[1]
    follower = "ema" if name == "awm" else "old"
    assert [key for key in second if f".{follower}." in key and first[key] != second[key]]


def test_a_student_comes_closer_to_its_teacher(train, teachers):
    """The reward is left out: nothing but the teacher's prediction is learned from."""
    options = {"teachers": teachers[:1]}
    overrides = ["reward=null", "trainer.steps=12", "optimizer.lr=2e-2", "checkpoint.every=0"]
    lines = metrics(train("distillation", *overrides, options=options))
    distances = [line["actor/teacher_distance"] for line in lines]
    assert distances[0] > 0.0
    assert distances[-1] < 0.5 * distances[0]
    assert not [name for line in lines for name in line if name.startswith("reward/")]


def test_no_checkpoint_holds_a_teacher(train):
    state, tensors = checkpoint(train("distillation"), 1)
    assert not [name for name in tensors if "teacher" in name]
    kind = state["workers"][0]["engine"]["kind"]["adapter"]
    assert kind["names"] == ["default"]
    assert list(kind["teachers"]) == list(TEACHERS)


def test_another_teacher_is_no_resume(train, teachers):
    with stopped():
        train("distillation", "algorithm.route=null", options={"teachers": teachers[:1]})
    other = [{**teachers[1], "name": TEACHERS[0]}]
    with pytest.raises(Exception, match="of another kind of run"):
        train("distillation", resume=True, options={"teachers": other})


def test_a_row_without_a_teacher_is_named_before_anything_starts(train, teachers, tmp_path):
    with pytest.raises(PromptFileError, match=r"5 of 5 rows.*no teacher") as caught:
        train("distillation", options={"route": "task", "teachers": teachers})
    assert "1: column 'task' is missing; expected a teacher: dim, bright" in str(caught.value)


def test_a_teacher_that_is_not_there_is_named(train):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train("distillation", options={"teachers": [{"path": "nowhere"}]})


def test_a_teacher_needs_an_adapter_beside_it(train):
    with pytest.raises(ConfigError, match=r"its teachers are adapters .*set model.lora"):
        train("distillation", "model.lora=null")
