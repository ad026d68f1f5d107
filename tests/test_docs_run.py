"""Every command of the documents is run, in the order of its page, from a folder that holds what the page supposes.

`omni` runs in this process, which saves importing torch for each line. What is changed in a line, and
which lines are not run, stands below with the reason. The README's `sh` block is test_readme's.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import attrs
import pytest
import structlog

from omni_core import resources
from omni_trainer import cli
from omni_trainer.config import load_run
from omni_trainer.run import run_training

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
TINY = "package:omni_configs/tiny_signs"
PROGRAMS = ("omni", "hatch", "pip", "torchrun", "tensorboard")

SMALLER = [
    "trainer.backend=local",
    "trainer.ranks=1",
    "trainer.steps=1",
    "rollout.samples_per_prompt=2",
    "data.prompts_per_step=2",
    "evaluation.max_prompts=2",
    "evaluation.samples_per_prompt=1",
]
"""Put before the overrides of every `omni train`: one step of two prompts in this process."""
TINY_MODEL = [
    f"model.path={TINY}",
    "model.dtype=float32",
    "model.lora={rank: 4, alpha: 8}",
    "model.pipeline={height: 32, width: 32, max_sequence_length: 16}",
    "rollout.sampling.num_inference_steps=3",
    "evaluation.sampling.num_inference_steps=3",
]
"""Put there too where a page trains a model of one's own."""

NOT_RUN = {
    "pip install": "it needs an index; `hatch run installed` installs the packages from wheels",
    "hatch run test": "it is this suite",
    "rollout.name=vllm_omni": "it needs vLLM-Omni; `hatch run vllm:test` runs this combination",
    "reward.name=fork_redness": "it needs a stranger's package; `hatch run fork:test` installs and trains it",
}
SLOW = {
    "hatch run quickstart": "{line} --steps 1",
    "torchrun": "{line} trainer.steps=1 trainer.name=launched",
    "tensorboard": "{line} --inspect",  # else it serves until it is stopped
    "name: wandb": "{line} trainer.steps=1 trainer.name=wandb",
}
"""Lines that take half a minute each -> what runs for them: `hatch run slow -k docs_run`."""
CODES = {
    "omni config validate smoke trainer.sav_freq=5": (2,),
    "omni doctor": (0, 1),  # what it finds depends on the machine, and on so short a run
}

RUNS = {
    "README.md": "runs/RUN",
    "docs/engine.md": "runs/mine",
    "docs/report.md": "runs/quickstart-20261130-101500",
    "docs/troubleshooting.md": "RUN",
    "packages/omni-trainer/README.md": "RUN",
}
"""Page -> a run that it supposes: stopped after the first of two steps."""
OWN_MODEL = ("README.md", "docs/own_model_and_reward.md")
WRITES_MY_RUN = "docs/configuration.md"
PYTHON = {
    # Page -> of each block who runs it, or why nobody does.
    "README.md": ["tests/test_readme.py"],
    "docs/families.md": ["two lines of a program: pipeline is one of stock diffusers"],
    "docs/own_algorithm.md": ["tests/test_algorithm_pages.py", "tests/test_algorithm_pages.py"],
    "docs/own_model.md": ["tests/test_own_model.py"],
    "docs/own_model_and_reward.md": ["here: the page's run scores with it"],
    "docs/performance.md": ["lines of a loop; tests/test_examples.py runs a whole one"],
    "docs/plugins.md": ["tests/test_docs.py"] * 3,
    "docs/rewards.md": ["here"],
    "docs/workers.md": ["here", "lines of examples/own_loop.py; tests/test_examples.py"],
    "packages/omni-engine-fsdp/README.md": ["here (slow)"],
}


@attrs.frozen
class Line:
    """One command of a page."""

    page: str
    text: str

    def listed_in(self, table):
        return next((key for key in table if key in self.text), None)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def commands(page: Path) -> list[Line]:
    """The lines of every block of commands; of an example with its output, the line alone."""
    found = []
    for block in blocks(page, ""):
        lines = block.splitlines()
        if lines[0].startswith("$ "):
            lines = [lines[0].removeprefix("$ ")]
        if lines[0].split()[0] in PROGRAMS:
            found += [Line(name_of(page), re.split(r"\s{2,}#", line)[0]) for line in lines]
    return found


LINES = [line for page in PAGES for line in commands(page)]


def quick(line: Line) -> bool:
    return line.listed_in(NOT_RUN) is None and line.listed_in(SLOW) is None


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A smoke run that has one step to go."""
    folder = tmp_path_factory.mktemp("docs") / "run"
    loaded = load_run("smoke", SMALLER)
    run_training(loaded.config, run_dir=folder, resolved=loaded.resolved)
    config = folder / "config.yaml"
    text = config.read_text()
    assert "  steps: 1\n" in text
    config.write_text(text.replace("  steps: 1\n", "  steps: 2\n"))
    return folder


@pytest.fixture
def supposed(tmp_path, monkeypatch, stopped_run):
    """`supposed(page)` puts the files that a page supposes into an empty folder, and goes there."""

    def make(page: str) -> Path:
        for name in ("prompts", "heldout"):
            rows = [
                f'A bus that reads "{n}"' for n in ((10, 27, 39) if name == "prompts" else (33, 54))
            ]
            (tmp_path / f"{name}.txt").write_text("".join(f"{row}\n" for row in rows))
            (tmp_path / f"{name}.jsonl").write_text(
                "".join(json.dumps({"prompt": row}) + "\n" for row in rows)
            )
        if page in RUNS:
            shutil.copytree(stopped_run, tmp_path / RUNS[page])
        tiny = resources.resolve(TINY)
        (tmp_path / "models/sd3").mkdir(parents=True)
        (tmp_path / "models/my-pipeline").symlink_to(tiny)
        (tmp_path / "models/sd3/tokenizer_3").symlink_to(tiny / "tokenizer_3")
        for block in blocks(ROOT / page, "python"):
            if block.startswith("# my_reward.py\n"):
                (tmp_path / "my_reward.py").write_text(block)
        own = [b for b in blocks(ROOT / page, "yaml") if b.startswith("# my_run.yaml\n")]
        text = own[0] if own else load_smoke_text()
        if page != WRITES_MY_RUN:
            (tmp_path / "my_run.yaml").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        return tmp_path

    yield make
    structlog.reset_defaults()


def load_smoke_text() -> str:
    return (ROOT / "packages/omni-configs/src/omni_configs/recipes/smoke.yaml").read_text()


def run_here(line: Line) -> int:
    """Run an `omni` line, with a redirection if it has one."""
    words = shlex.split(line.text)
    target = None
    if ">" in words:
        target = words[words.index(">") + 1]
        words = words[: words.index(">")]
    if words[1] == "train":
        words[3:3] = [*SMALLER, *(TINY_MODEL if line.page in OWN_MODEL else ())]
    try:
        if target is None:
            return cli.main(words[1:])
        with Path(target).open("w") as file, redirect_stdout(file):
            return cli.main(words[1:])
    except SystemExit as exc:
        return int(exc.code or 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", sorted({line.page for line in LINES if quick(line)}))
def test_the_commands_of_a_page_run_as_they_stand(page, supposed, capsys):
    supposed(page)
    for line in LINES:
        if line.page != page or not quick(line):
            continue
        code = run_here(line)
        said = capsys.readouterr()
        key = line.listed_in(CODES)
        assert code in (CODES[key] if key else (0,)), f"{line.text}: {code}\n{said.err[-2000:]}"
        shown = shown_output(ROOT / page, line.text)
        assert not shown or matches(shown, said.out + said.err), said


def shown_output(page: Path, command: str) -> list[str]:
    """What a page shows below a command."""
    for block in blocks(page, ""):
        first, *rest = block.splitlines()
        if first == f"$ {command}":
            return rest
    return []


def matches(shown: list[str], said: str) -> bool:
    pattern = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in shown)
    return re.search(pattern, said) is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "line",
    [line for line in LINES if line.listed_in(SLOW) and not line.listed_in(NOT_RUN)],
    ids=str,
)
def test_a_command_that_takes_its_time_runs(line, supposed):
    folder = supposed(line.page)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    command = SLOW[line.listed_in(SLOW)].format(line=line.text)
    command = command.replace("hatch run quickstart", f"python {ROOT}/tools/quickstart.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_whoever_is_said_to_run_a_python_block_has_it():
    found = {name_of(page): blocks(page, "python") for page in PAGES if blocks(page, "python")}
    assert {page: len(said) for page, said in PYTHON.items()} == {
        page: len(listed) for page, listed in found.items()
    }
    for who in {who for said in PYTHON.values() for who in said}:
        for name in re.findall(r"tests/\w+\.py", who):
            assert (ROOT / name).is_file()


def test_the_run_of_workers_md_runs(supposed, capsys, monkeypatch):
    supposed("docs/workers.md")
    block = blocks(ROOT / "docs/workers.md", "python")[0]
    (call,) = [n for n in ast.walk(ast.parse(block)) if ast.unparse(n).startswith("load_run(")][:1]
    smaller = f"{ast.unparse(call)[:-2]}, *{SMALLER!r}])"
    exec(block.replace(ast.get_source_segment(block, call), smaller), {"__name__": "page"})
    mean, exported = capsys.readouterr().out.split()[-2:]
    assert 0.0 <= float(mean) <= 1.0
    assert Path(exported).is_file()


def test_the_reward_of_rewards_md_scores(supposed):
    from PIL import Image

    supposed("docs/rewards.md")
    namespace: dict = {}
    exec(Path("my_reward.py").read_text(), namespace)
    pictures = [Image.new("RGB", (8, 8), (0, green, 0)) for green in (0, 255)]
    assert namespace["score"](pictures, ["a", "b"], [{}, {}]) == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_loop_of_the_engine_s_readme_runs_under_torchrun(supposed):
    page = ROOT / "packages/omni-engine-fsdp/README.md"
    folder = supposed(name_of(page))
    (folder / "train.py").write_text(blocks(page, "python")[0])
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launched, "train.py", str(resources.resolve(TINY))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2, rank 1 of 2: gradient norm" in done.stdout
    assert list((folder / "export").glob("*.safetensors"))


def hatch_scripts() -> set[str]:
    """ENV:SCRIPT of hatch.toml, with what an environment takes from its template."""
    found: dict = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]

    def scripts(env: str) -> set[str]:
        own = found[env]
        template = own.get("template", env)
        return set(own.get("scripts", {})) | (scripts(template) if template != env else set())

    return {f"{env}:{script}" for env in found for script in scripts(env)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_hatch_commands_name_scripts_of_hatch_toml(page):
    known = hatch_scripts()
    for wanted in re.findall(r"hatch run ([a-z][\w:-]*)", page.read_text()):
        assert (wanted if ":" in wanted else f"default:{wanted}") in known, wanted


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_omni_commands_between_words_parse(page):
    """`omni ...` in a sentence: the subcommand and its options are there; overrides may be left out."""
    for text in re.findall(r"`(omni [a-z][^`]*)`", page.read_text()):
        words = [word for word in shlex.split(text)[1:] if word not in ("...", "&")]
        if "|" in text or words[-1].startswith("--"):
            continue
        try:
            cli.build_parser().parse_args(words)
        except SystemExit:
            # A command's name alone, of one that wants more.
            assert "RECIPE" in usage(words) or "RUN" in usage(words) or "COMMAND" in usage(words), (
                text
            )


def usage(words: list[str]) -> str:
    parser = cli.build_parser()
    for word in words:
        actions = [a for a in parser._actions if getattr(a, "choices", None)]
        for action in actions:
            if isinstance(action.choices, dict):
                assert word in action.choices, words
                parser = action.choices[word]
    return parser.format_usage()
