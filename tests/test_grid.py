"""Cells of the grid that show the rest: every algorithm on two families, two algorithms on every family.

All of them: `hatch run grid`.
"""

from __future__ import annotations

import pytest

from grid import Cell, Model, Status, algorithms, families, page, table, train_cell
from omni_core.testing.toys import register_toys, unregister_toys

WHOLE_FAMILIES = ("flux", "z_image")
"""Fixed text and an embedded scale; masked text and classifier-free guidance."""
WHOLE_ALGORITHMS = ("flow_grpo", "diffusion_nft")
"""On the rollout's own steps, with log-probs; on the forward process."""

CELLS = [
    (family, algorithm)
    for family in families()
    for algorithm in algorithms()
    if family in WHOLE_FAMILIES or algorithm in WHOLE_ALGORITHMS
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A family's tiny pipeline, written once."""
    made = {}

    def build(family):
        if family not in made:
            made[family] = Model.build(family, tmp_path_factory.mktemp(family))
        return made[family]

    register_toys()
    yield build
    unregister_toys()


@pytest.mark.parametrize(("family", "algorithm"), CELLS)
def test_an_algorithm_trains_a_family(model_of, family, algorithm):
    cell = train_cell(model_of(family), algorithm)
    assert (cell.status, cell.reason) == (Status.OK, "")


def test_an_error_is_a_cells_result(model_of, monkeypatch):
    monkeypatch.setitem(__import__("grid").OPTIONS, "flow_grpo", {"clip_rato": 1.0})
    cell = train_cell(model_of("flux"), "flow_grpo")
    assert cell.status is Status.ERROR
    assert "clip_rato" in cell.reason


def test_reasons_are_numbered_below_the_table():
    cells = [
        Cell(family="a", algorithm="x", status=Status.OK),
        Cell(family="b", algorithm="x", status=Status.NOT_APPLICABLE, reason="it has no\nmask"),
        Cell(family="a", algorithm="y", status=Status.ERROR, reason="ValueError: 3"),
        Cell(family="b", algorithm="y", status=Status.NOT_APPLICABLE, reason="it has no\nmask"),
    ]
    assert table(cells).splitlines() == [
        "| | a | b |",
        "|---|---|---|",
        "| x | ok | n/a (1) |",
        "| y | error (2) | n/a (1) |",
        "",
        "1. it has no mask",
        "2. ValueError: 3",
    ]
    assert "1 ok, 2 n/a, 1 error;" in page(cells)
