"""The `omni` command: light until a command needs more, and clear about what went wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_core import plugins as core
from omni_trainer import cli
from omni_trainer.commands.terminal import print_table

HEAVY = ("torch", "ray", "datasets", "matplotlib", "rich", "yaml", "cattrs")


def install(folder: Path, name: str, *, entry_points: str, modules: dict[str, str]) -> None:
    """Make *folder* look like a site-packages with one distribution in it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A distribution on sys.path: one good tracker, one with a broken module, one of no Plugin."""
    modules = {
        "stranger_plugins": (
            "from omni_core import NoOptions, Plugin\n"
            "good = Plugin(api=1, options=NoOptions, target='stranger_missing:X', summary='says hi')\n"
            "number = 3\n"
        ),
        "stranger_broken": "raise OSError('no such library')\n",
    }
    points = (
        "[omni.trackers]\n"
        "stranger_good = stranger_plugins:good\n"
        "stranger_number = stranger_plugins:number\n"
        "stranger_broken = stranger_broken:plugin\n"
    )
    install(tmp_path, "stranger", entry_points=points, modules=modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for module in modules:
        sys.modules.pop(module, None)
    core.registry(core.TRACKERS)._loaded.pop("stranger_good", None)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["config", "show", "-h"]])
def test_help_imports_nothing_that_a_command_needs(arguments):
    code = (
        "import sys; from omni_trainer.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as exc: assert exc.code == 0\n"
        f"assert [m for m in {HEAVY} if m in sys.modules] == []\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: omni")


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"], ["train", "r", "--lr=1"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)

    assert raised.value.code == 2
    assert "usage: omni" in capsys.readouterr().err


def test_an_override_written_as_a_flag_is_explained(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "recipe", "--optimizer.lr=1"])

    assert "an override is written key=value" in capsys.readouterr().err


def test_plugins_shows_a_broken_one_and_goes_on(stranger, capsys):
    code = cli.main(["plugins"])

    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert code == 1
    assert lines["stranger_good"].split()[2:] == ["stranger", "1", "says", "hi"]
    assert "broken: OSError: no such library" in lines["stranger_broken"]
    assert "points at int, not at an omni_core Plugin" in lines["stranger_number"]
    assert "omni-core" in lines["flow_grpo"]


def test_plugins_load_finds_what_cannot_be_imported(stranger, capsys):
    code = cli.main(["plugins", "--load"])

    lines = [line for line in capsys.readouterr().out.splitlines() if "stranger_good" in line]
    assert code == 1
    assert "broken: ModuleNotFoundError: No module named 'stranger_missing'" in lines[0]


def test_models_shows_what_a_family_supports_and_who_samples_it(tmp_path, monkeypatch, capsys):
    module = (
        "from omni_core import NoOptions, Plugin\n"
        "from omni_core.testing.toys.family import ToyFamily\n"
        "from omni_core.testing.toys.rollout import ToyRollout\n"
        "class Other(ToyRollout):\n"
        "    pipeline_classes = ('OtherPipeline',)\n"
        "model = Plugin(api=1, options=NoOptions, target='model_module:ToyFamily')\n"
        "lost = Plugin(api=1, options=NoOptions, target='model_missing:X')\n"
        "every = Plugin(api=1, options=NoOptions, target='model_module:ToyRollout')\n"
        "other = Plugin(api=1, options=NoOptions, target='model_module:Other')\n"
    )
    points = (
        "[omni.models]\nmade_here = model_module:model\nlost_here = model_module:lost\n"
        "[omni.rollouts]\nevery_here = model_module:every\nother_here = model_module:other\n"
    )
    install(tmp_path, "modeller", entry_points=points, modules={"model_module": module})
    monkeypatch.syspath_prepend(str(tmp_path))

    code = cli.main(["models"])

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    cells = [cell.strip() for cell in lines["made_here"].split("  ") if cell.strip()]
    assert cells[1:6] == ["modeller", "ToyPipeline", "text-to-image", "image", "masked"]
    assert cells[6] == "classifier-free"
    assert "every_here" in cells[-1]
    assert "other_here" not in cells[-1]
    assert "broken: ModuleNotFoundError" in lines["lost_here"]
    assert code == 1


def test_recipes_shows_standing_hardware_and_batch(tmp_path, monkeypatch, capsys):
    module = (
        "from omni_core import NoOptions, Plugin, Recipe, Standing\n"
        "plugin = Plugin(api=1, options=NoOptions, target='recipe_module:build')\n"
        "def build(options):\n"
        "    return Recipe(yaml='', summary='it runs', standing=Standing.SMOKE,\n"
        "                  hardware='1 core', global_batch='2 prompts x 4')\n"
    )
    points = "[omni.recipes]\nmade_here = recipe_module:plugin\n"
    install(tmp_path, "cook", entry_points=points, modules={"recipe_module": module})
    monkeypatch.syspath_prepend(str(tmp_path))

    cli.main(["recipes"])

    (line,) = [li for li in capsys.readouterr().out.splitlines() if li.startswith("made_here")]
    assert [part.strip() for part in line.split("  ") if part.strip()] == [
        "made_here",
        "smoke",
        "1 core",
        "2 prompts x 4",
        "it runs",
    ]


RUN = """
model: {path: toy, family: toy, pipeline: {height: 8, width: 8}}
engine: {name: toy}
rollout: {name: toy, samples_per_prompt: 4, sampling: {num_inference_steps: 4}}
algorithm: {name: flow_grpo}
reward: {name: toy}
data: {train: prompts.txt, prompts_per_step: 2}
"""


@pytest.fixture
def run_file(tmp_path, toys):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture
def toys():
    from omni_core.testing.toys import register_toys, unregister_toys

    register_toys()
    yield
    unregister_toys()


def test_config_show_says_where_each_value_came_from(run_file, capsys):
    assert cli.main(["config", "show", run_file, "optimizer.lr=1e-4"]) == 0

    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines}
    assert table["optimizer.lr"] == ["command", "line", "0.0001"]
    assert table["data.prompts_per_step"] == [run_file, "2"]
    assert table["optimizer.eps"] == ["default", "1e-08"]
    column = lines[0].index("value")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_config_show_as_yaml_is_a_config(run_file, tmp_path, capsys):
    assert cli.main(["config", "show", run_file, "seeds.data=3", "--yaml"]) == 0
    text = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(text)

    assert cli.main(["config", "show", str(again), "--yaml"]) == 0
    assert capsys.readouterr().out == text
    assert "data: 3\n" in text


def test_case_33_config_validate_names_every_mistake_and_exits_with_2(run_file, capsys):
    wrong = ["+trainer.sav_freq=5", "optimizer.lr=abc", "trainer.resume_mode=atuo"]

    assert cli.main(["config", "validate", run_file, *wrong]) == 2

    said = capsys.readouterr()
    first, *lines = said.err.splitlines()
    assert (said.out, first) == ("", "the configuration has 3 mistakes:")
    assert lines[0].startswith("  optimizer.lr: expected a number, got 'abc'")
    assert "trainer.sav_freq: unknown key; did you mean 'checkpoint.every'?" in lines[1]
    assert "trainer.resume_mode: 'atuo' is none of never, auto; did you mean 'auto'?" in lines[2]


def test_config_validate_says_that_a_config_fits(run_file, capsys):
    assert cli.main(["config", "validate", run_file]) == 0
    assert capsys.readouterr().out == f"{run_file} is valid\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such_recipe", "no omni.recipes plugin named 'no_such_recipe'"),
        ("no/such/file.yaml", "config file 'no/such/file.yaml' does not exist"),
    ],
)
def test_a_missing_source_is_a_sentence_not_a_traceback(source, said, capsys):
    assert cli.main(["config", "validate", source]) == 2

    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}")
    assert "Traceback" not in err


def test_an_unexpected_error_shows_its_traceback_and_exits_with_1(monkeypatch, capsys):
    from omni_trainer.commands import catalogue

    def fails(**_):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(catalogue, "plugins", fails)

    assert cli.main(["plugins"]) == 1
    assert capsys.readouterr().err.endswith("RuntimeError: the disk is on fire\n")


def test_what_is_piped_has_no_colour_and_one_line_a_row(stranger, capsys):
    cli.main(["plugins"])

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(line.startswith(("group ", "omni.")) for line in out.splitlines())


def test_a_narrow_terminal_gets_a_block_for_each_row_and_loses_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["key", "from", "value", "meaning"], [["a" * 30, "recipe", "b" * 50, ""], ["c"]])

    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines() == [
        "a" * 30,
        "  from   recipe",
        "  value  " + "b" * 31,
        "         " + "b" * 19,
        "c",
    ]

    monkeypatch.setenv("COLUMNS", "120")
    print_table(["key", "from", "value"], [["a" * 30, "recipe", "b" * 50]])
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [line.split() for line in said.splitlines()] == [
        ["key", "from", "value"],
        ["a" * 30, "recipe", "b" * 50],
    ]


def test_a_command_without_overrides_does_not_speak_of_them(capsys):
    with pytest.raises(SystemExit):
        cli.main(["models", "more"])
    assert "override" not in capsys.readouterr().err


def test_what_a_command_needs_is_named_alone(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train"])
    assert "are required: RECIPE|FILE\n" in capsys.readouterr().err
