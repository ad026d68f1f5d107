"""A function in a file of the user's own as a reward: what it is given, and what it may return."""

from __future__ import annotations

import json
import math

import pytest
import torch

from omni_core.input_image import InputImage
from omni_core.plugins import REWARDS, registry
from omni_core.reward import RewardInput
from omni_core.testing import RewardSuite
from omni_core.trajectory import Media
from omni_trainer import cli
from omni_trainer.config import load_run
from omni_trainer.rewards.options import PythonRewardConfig
from omni_trainer.rewards.python_file import PythonReward, RewardFileError
from omni_trainer.rewards.scoring import Scorer

BRIGHT = """
def score(images, prompts, metadata):
    return [sum(image.resize((1, 1)).getpixel((0, 0))) / 765 for image in images]
"""


def pictures(*levels):
    return Media(image=torch.stack([torch.full((4, 4, 3), v, dtype=torch.uint8) for v in levels]))


def made(tmp_path, source, **options):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return PythonReward(PythonRewardConfig(path=str(path), **options))


def scores(reward, levels=(0, 255)):
    """Score through what scores in a run."""
    scorer = Scorer(reward, retries=0)
    scorer.setup()
    return scorer.score(pictures(*levels), [RewardInput(prompt="p")] * len(levels))


class TestPythonReward(RewardSuite):
    tolerance = 0.0

    @pytest.fixture
    def reward(self, tmp_path):
        return made(tmp_path, BRIGHT)

    @pytest.fixture
    def media(self):
        return pictures(0, 100, 255)

    @pytest.fixture
    def inputs(self):
        return [RewardInput(prompt=f"number {i}") for i in range(3)]


def test_it_is_found_by_name():
    assert registry(REWARDS).get("python").load() is PythonReward


def test_it_is_given_pillow_images_prompts_and_the_rows_other_columns(tmp_path):
    reward = made(
        tmp_path,
        "SEEN = []\n"
        "def score(images, prompts, metadata):\n"
        "    SEEN.append((images, prompts, metadata))\n"
        "    return range(len(images))\n",
    )
    reward.setup()
    inputs = [
        RewardInput(prompt="a", target="A", metadata={"n": 1}),
        RewardInput(prompt="b", image=InputImage.of(pictures(5).image[0])),
    ]
    assert [result.value for result in reward.score(pictures(7, 9), inputs)] == [0, 1]
    images, prompts, metadata = reward._function.__globals__["SEEN"][0]
    assert [(i.mode, i.size, i.getpixel((0, 0))) for i in images] == [
        ("RGB", (4, 4), (7, 7, 7)),
        ("RGB", (4, 4), (9, 9, 9)),
    ]
    assert prompts == ["a", "b"]
    assert metadata[0] == {"n": 1, "target": "A"}
    assert metadata[1].keys() == {"input_image"}
    assert metadata[1]["input_image"].getpixel((0, 0)) == (5, 5, 5)


def test_a_video_is_given_as_its_frames_with_its_sound(tmp_path):
    reward = made(
        tmp_path,
        "def score(images, prompts, metadata):\n"
        "    return [f[1].getpixel((0, 0))[0] + len(f) + m['frame_rate'] + m['audio'].max()\n"
        "            + m['audio_rate'] for f, m in zip(images, metadata)]\n",
    )
    reward.setup()
    video = torch.zeros(2, 3, 4, 4, 3, dtype=torch.uint8)
    video[1, 1] = 7
    audio = torch.tensor([0.25, 0.5])[:, None, None].expand(2, 1, 5)
    media = Media(video=video, frame_rate=24.0, audio=audio, audio_rate=100)
    inputs = [RewardInput(prompt="p")] * 2
    assert [r.value for r in reward.score(media, inputs)] == [127.25, 134.5]
    with pytest.raises(ValueError, match="got 2 videos for 1 inputs"):
        reward.score(media, inputs[:1])


def test_a_target_rule_applies_to_its_prompts(tmp_path):
    assert made(tmp_path, BRIGHT).target('a sign "Hi"') is None
    ruled = made(tmp_path, BRIGHT, target_rule="quoted")
    assert ruled.target('a sign "Hi"') == "Hi"
    with pytest.raises(ValueError, match="no text in double quotes"):
        ruled.target("a sign")


@pytest.mark.parametrize(("body", "got"), [("[0.5]", 1), ("[0.5] * 3", 3), ("[]", 0)])
def test_case_13_a_wrong_count_names_file_function_and_both_numbers(tmp_path, body, got):
    reward = made(tmp_path, f"def score(images, prompts, metadata): return {body}\n")
    with pytest.raises(ValueError, match=f"'my_reward.py:score' returned {got} scores for 2"):
        scores(reward)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("None", "returned None; a list of numbers is expected"),
        ("0.5", "returned a float; a list with a number for each image"),
        ("'ab'", "returned a str; a list with a number for each image"),
        ("['a', 1]", "returned the score 'a'"),
        ("[[1, 2], 1]", r"returned the score \[1, 2\]"),
    ],
)
def test_what_is_no_list_of_numbers_is_an_error(tmp_path, body, said):
    reward = made(tmp_path, f"def score(images, prompts, metadata): return {body}\n")
    with pytest.raises(TypeError, match=rf"my_reward\.py:score'? {said}"):
        scores(reward)


@pytest.mark.parametrize("value", ["None", "float('nan')", "float('inf')"])
def test_an_image_without_a_score_is_a_failure_and_no_zero(tmp_path, value):
    reward = made(tmp_path, f"def score(images, prompts, metadata): return [{value}, 0]\n")
    bad, zero = scores(reward)
    assert not bad.ok
    assert math.isnan(bad.value) or not math.isfinite(bad.value)
    assert "my_reward.py:score" in bad.error
    assert (zero.ok, zero.value) == (True, 0.0)


def test_arrays_and_tensors_are_lists_of_numbers(tmp_path):
    source = "import torch\ndef score(images, prompts, metadata): return torch.tensor([.25, .5])\n"
    assert [result.value for result in scores(made(tmp_path, source))] == [0.25, 0.5]


def test_what_the_function_raises_passes_on(tmp_path):
    reward = made(tmp_path, "def score(images, prompts, metadata): return images[9]\n")
    with pytest.raises(IndexError):
        scores(reward)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def scor(i, p, m): pass\n", r"defines no 'score'; did you mean 'scor'\? \(it defines"),
        ("x = 1\n", r"defines no 'score' \(it defines nothing"),
        ("def score(:\n", r"my_reward\.py:1: "),
    ],
)
def test_a_file_without_the_function_is_refused_before_it_runs(tmp_path, source, said):
    with pytest.raises(RewardFileError, match=said):
        made(tmp_path, source + "raise SystemExit\n")


def test_the_file_is_run_by_setup_and_not_before(tmp_path):
    reward = made(tmp_path, "def score(i, p, m): pass\nraise OSError('ran')\n")
    with pytest.raises(OSError, match="ran"):
        reward.setup()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def score(images, prompts): pass\n", r"takes \(images, prompts\); \(images, prompts, me"),
        ("score = 3\n", "is 3; a function"),
    ],
)
def test_a_function_of_another_form_is_refused_by_setup(tmp_path, source, said):
    with pytest.raises(RewardFileError, match=said):
        made(tmp_path, source).setup()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py' does not exist"):
        PythonReward(PythonRewardConfig(path=str(tmp_path / "nowhere.py")))
    (tmp_path / "reward.txt").write_text(BRIGHT)
    with pytest.raises(RewardFileError, match=r"does not end in \.py"):
        PythonReward(PythonRewardConfig(path=str(tmp_path / "reward.txt")))


def test_a_file_may_import_its_neighbours_and_two_files_do_not_mix(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.75\n")
    (tmp_path / "b").mkdir()
    first = made(
        tmp_path,
        "from neighbour_of_reward import VALUE\n"
        "def score(images, prompts, metadata): return [VALUE] * len(images)\n",
    )
    second = made(tmp_path / "b", "def score(images, prompts, metadata): return [0.1, 0.2]\n")
    assert [result.value for result in scores(first)] == [0.75, 0.75]
    assert [result.value for result in scores(second)] == [0.1, 0.2]


def test_a_run_is_trained_with_it_and_remembers_where_the_file_is(
    train, tmp_path, metrics, monkeypatch
):
    (tmp_path / "my_reward.py").write_text(BRIGHT)
    monkeypatch.chdir(tmp_path)
    found = train("reward.name=python", "reward.path=my_reward.py")
    (first, *_, last) = [line for line in metrics(found.run_dir) if "reward/mean" in line]
    assert 0 < first["reward/mean"] < 1
    assert last["reward/unscored"] == 0.0
    saved = load_run(str(found.run_dir / "config.yaml")).config
    assert saved.reward.options.path == str(tmp_path / "my_reward.py")


def test_a_mistake_in_the_file_is_a_sentence(toy_source, tmp_path, capsys):
    (tmp_path / "my_reward.py").write_text("def scoer(images, prompts, metadata): pass\n")
    run = f"trainer.run_dir={tmp_path / 'runs'}"
    path = f"reward.path={tmp_path / 'my_reward.py'}"
    assert cli.main(["train", toy_source, run, "reward.name=python", path]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'scoer'?" in said
    assert "Traceback" not in said


def test_metadata_of_a_jsonl_row_reaches_the_function(train, tmp_path, metrics):
    rows = [{"prompt": f"p {i}", "wish": i / 10, "target": "t"} for i in range(3)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_reward.py").write_text(
        "def score(images, prompts, metadata):\n"
        "    return [row['wish'] + (row['target'] == 't') + int(prompt[-1]) for row, prompt in "
        "zip(metadata, prompts)]\n"
    )
    found = train(
        "reward.name=python",
        f"reward.path={tmp_path / 'my_reward.py'}",
        f"data.train={data}",
        "data.heldout=null",
        "trainer.steps=1",
    )
    (line,) = metrics(found.run_dir)
    assert line["reward/mean"] == pytest.approx(0.1 + 1 + 1)
