"""`omni doctor`: each finding says what is wrong and what to do."""

import json
import socket
from importlib import metadata

import pytest

from omni_trainer import cli, doctor

PYPROJECT = """
[project]
name = "edited"
dynamic = ["version"]
[project.entry-points."omni.rewards"]
new = "edited:new"
[project.scripts]
edited = "edited:main"
[tool.hatch.version]
path = "_version.py"
"""


@pytest.fixture
def edited(tmp_path):
    """An editable install whose source tree is at another version and offers another plugin."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "_version.py").write_text('__version__ = "0.2.0"\n')
    info = tmp_path / "edited-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: edited\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[omni.rewards]\nold = edited:old\n[console_scripts]\nedited = edited:main\n"
    )
    (info / "direct_url.json").write_text(
        json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}})
    )
    (dist,) = metadata.distributions(path=[str(tmp_path)])
    return dist, source


def test_stale_editable_metadata_is_named(edited):
    dist, source = edited

    assert doctor.editable_source(dist) == source
    assert doctor.stale_metadata(dist, source) == [
        "installed as 0.1.0, the source is 0.2.0",
        "the installed metadata lacks omni.rewards:new",
        "the installed metadata still has omni.rewards:old",
    ]


def test_the_installed_packages_fit_what_they_require():
    found = {finding.subject: finding for finding in doctor.check_requirements()}

    assert {"omni-core", "omni-trainer"} <= found.keys()
    assert [f.said for f in found.values() if f.health is doctor.Health.BROKEN] == []


def test_an_unmet_requirement_is_named():
    from packaging.requirements import Requirement

    assert doctor._unmet(Requirement("attrs>=900")).startswith("needs attrs>=900, found ")
    assert doctor._unmet(Requirement("no-such-thing")) == (
        "needs no-such-thing, which is not installed"
    )
    assert doctor._unmet(Requirement("no-such-thing; extra == 'x'")) is None


def test_ports_are_opened_and_reached(monkeypatch):
    (finding,) = doctor.check_ports()
    assert (finding.health, finding.said) == (doctor.Health.OK, "opened and reached on 127.0.0.1")

    monkeypatch.setattr(doctor, "reachable", lambda address: False)
    (finding,) = doctor.check_ports()
    assert finding.health is doctor.Health.BROKEN
    assert "was opened and cannot be reached" in finding.said


def test_versions_are_held_against_what_is_tested(monkeypatch):
    found = {"torch": "2.13.0+cpu", "transformers": "5.20.1", "vllm": "0.31.0"}
    monkeypatch.setattr(doctor, "_version", found.get)
    said = {f.subject: (f.health, f.said) for f in doctor.check_tested_versions()}

    assert said == {
        "torch": (doctor.Health.OK, "2.13.0+cpu"),
        "diffusers": (doctor.Health.NOTE, "not installed (tested: 0.40.0)"),
        "accelerate": (doctor.Health.NOTE, "not installed (tested: 1.12.0)"),
        "transformers": (doctor.Health.NOTE, "5.20.1, while <5.15 is tested"),
        "vllm": (doctor.Health.NOTE, "0.31.0, while 0.30.* is tested"),
    }


def test_a_cluster_that_does_not_answer_is_broken(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert doctor.reachable(f"ray://127.0.0.1:{port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")

    (finding,) = doctor.check_ray()

    assert finding.health is doctor.Health.BROKEN
    assert f"RAY_ADDRESS=127.0.0.1:{port} does not answer" in finding.said


def test_the_report_is_aligned_and_its_exit_code_is_that_of_the_worst(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor,
        "CHECKS",
        (
            lambda: iter([doctor.Finding("python", doctor.Health.OK, "3")]),
            lambda: iter([doctor.Finding("ray", doctor.Health.BROKEN, "gone")]),
        ),
    )

    assert cli.main(["doctor"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "what    health  found",
        "python  ok      3",
        "ray     broken  gone",
    ]


def test_every_check_runs_here():
    found = [finding for check in doctor.CHECKS for finding in check()]

    subjects = {finding.subject for finding in found}
    assert {"python", "devices", "threads", "disk", "ports", "ray", "plugins"} <= subjects
