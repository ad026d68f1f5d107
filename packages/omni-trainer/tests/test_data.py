"""Prompt files and the order that prompts are dealt in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from omni_trainer.data import (
    BadRowPolicy,
    PromptFileError,
    PromptRow,
    PromptSampler,
    Tail,
    load_prompts,
)


def load(path, **options):
    options = {"reward": None, "on_bad_row": BadRowPolicy.RAISE, **options}
    return load_prompts(path, **options)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


MESSY = (
    b"\xef\xbb\xbf"
    b'{"prompt": "first", "n": 1}\r\n'
    b"\r\n"
    b'{"prompt": "  kept as it is  ", "tags": ["a", null], "n": 2.5}\n'
    b'{"text": "no prompt"}\n'
    b'{"prompt": "   "}\n'
    b'{"prompt": "\xe6\x97\xa5\xe6\x9c\xac \\u00e9 \xe2\x80\xa8 one line"}\n'
    b'{"prompt": "broken\n'
    b'["prompt"]\n'
    b'{"prompt": 7}\n'
    b'{"prompt": "caf\xe9"}\n'
    b'{"prompt": "last"}'
)


def test_case_21_jsonl_keeps_good_rows_and_names_bad_ones_by_line(tmp_path):
    found = load(write(tmp_path / "p.jsonl", MESSY), on_bad_row=BadRowPolicy.SKIP)
    assert [(row.line, row.row_id, row.prompt, dict(row.metadata)) for row in found.rows] == [
        (1, "1", "first", {"n": 1}),
        (3, "3", "  kept as it is  ", {"tags": ["a", None], "n": 2.5}),
        (6, "6", "日本 é \u2028 one line", {}),
        (11, "11", "last", {}),
    ]
    assert list(found.skipped) == [
        "p.jsonl:2: blank",
        "p.jsonl:4: no 'prompt'; a text is expected (columns: text)",
        "p.jsonl:5: 'prompt' is blank",
        "p.jsonl:7: not JSON: Unterminated string starting at (column 12)",
        "p.jsonl:8: expected a JSON object, got list",
        "p.jsonl:9: int as 'prompt'; a text is expected (columns: none)",
        "p.jsonl:10: not UTF-8 (or it holds U+FFFD, the mark of text that once was not)",
    ]


def test_case_21_raise_names_every_bad_row_at_once(tmp_path):
    with pytest.raises(PromptFileError) as error:
        load(write(tmp_path / "p.jsonl", MESSY))
    assert len(error.value.mistakes) == 7
    assert "7 of 11 rows cannot be used (data.on_bad_row=skip leaves them out)" in str(error.value)
    assert "p.jsonl:9:" in str(error.value)


def test_case_21_text_lines(tmp_path):
    content = "\ufeffone\r\n\r\n  two  \n   \nthree \u2028 still three\vand here\n日本"
    path = write(tmp_path / "p.txt", content)
    found = load(path, on_bad_row=BadRowPolicy.SKIP)
    assert [(row.line, row.prompt) for row in found.rows] == [
        (1, "one"),
        (3, "  two  "),
        (5, "three \u2028 still three\vand here"),
        (6, "日本"),
    ]
    assert list(found.skipped) == ["p.txt:2: blank", "p.txt:4: blank"]


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_case_19_an_empty_file_is_an_error(tmp_path, name):
    with pytest.raises(PromptFileError, match="holds no prompt: the file is empty"):
        load(write(tmp_path / name, ""))
    with pytest.raises(PromptFileError, match="holds no prompt: the file is empty"):
        load(write(tmp_path / name, b"\xef\xbb\xbf"))
    with pytest.raises(PromptFileError, match="holds no usable row"):
        load(write(tmp_path / name, "\n\n"), on_bad_row=BadRowPolicy.SKIP)


def test_ids_and_targets_of_a_row_are_its_own(tmp_path):
    rows = [
        {"caption": "a sign", "target": "Hi", "key": "a"},
        {"caption": "another", "key": 7},
        {"caption": "again", "key": "a"},
        {"caption": "none"},
        {"caption": "bad", "key": "b", "target": " "},
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)))
    found = load(path, prompt_column="caption", id_column="key", on_bad_row=BadRowPolicy.SKIP)
    assert [(row.row_id, row.prompt, row.target) for row in found.rows] == [
        ("a", "a sign", "Hi"),
        ("7", "another", None),
    ]
    assert list(found.skipped) == [
        "p.jsonl:3: id 'a' is that of an earlier row",
        "p.jsonl:4: id column 'key' is None; a text or a whole number is expected",
        "p.jsonl:5: 'target' is ' '; a text is expected",
    ]


def test_files_that_cannot_be_prompts_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt' does not exist"):
        load(tmp_path / "nowhere.txt")
    with pytest.raises(PromptFileError, match=r"suffix '.csv' is not known; prompt files are .txt"):
        load(write(tmp_path / "p.csv", "a"))
    with pytest.raises(PromptFileError, match=r"a \.txt file has no columns"):
        load(write(tmp_path / "p.txt", "a"), id_column="id")


def test_a_path_is_never_a_pattern(tmp_path):
    folder = tmp_path / "run [1] *"
    folder.mkdir()
    assert load(write(folder / "p.txt", "one")).rows[0].prompt == "one"


def test_loading_touches_neither_the_network_nor_the_home(tmp_path):
    path = write(tmp_path / "p.txt", "one\ntwo\n")
    (tmp_path / "home").mkdir()
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from pathlib import Path\n"
        "from omni_trainer.data import BadRowPolicy, load_prompts\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules\n"
        "found = load_prompts(Path(sys.argv[1]), reward=None, on_bad_row=BadRowPolicy.RAISE)\n"
        "print([row.prompt for row in found.rows])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "['one', 'two']\n"), done.stderr
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file()] == []


# -- order ----------------------------------------------------------------------------------------


def rows(count):
    return [
        PromptRow(row_id=str(i), prompt=f"p{i}", target=None, line=i) for i in range(1, count + 1)
    ]


def sampler(count=10, batch_size=4, seed=0, tail=Tail.CARRY, **options):
    return PromptSampler(rows(count), batch_size=batch_size, seed=seed, tail=tail, **options)


def ids(batch):
    return [row.row_id for row in batch.rows]


def test_case_19_ten_rows_in_batches_of_four():
    drop = sampler(tail=Tail.DROP)
    assert drop.steps_per_epoch == 2
    batches = [drop.next() for _ in range(6)]
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2, 2]
    assert all(len(batch.rows) == 4 for batch in batches)

    carry = sampler(tail=Tail.CARRY)
    assert carry.steps_per_epoch == 3
    batches = [carry.next() for _ in range(5)]
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1]
    assert all(len(batch.rows) == 4 for batch in batches)
    # Two epochs are five full batches: every row came exactly twice.
    seen = Counter(row for batch in batches for row in ids(batch))
    assert seen == Counter({str(i): 2 for i in range(1, 11)})


def test_an_epoch_deals_every_row_once_in_an_order_of_its_own():
    first, second = sampler(count=8), sampler(count=8)
    orders = [ids(first.next()) + ids(first.next()) for _ in range(2)]
    assert sorted(orders[0], key=int) == [str(i) for i in range(1, 9)]
    assert sorted(orders[1], key=int) == [str(i) for i in range(1, 9)]
    assert orders[0] != orders[1]
    assert orders[0] == ids(second.next()) + ids(second.next())
    other = sampler(count=8, seed=1)
    assert orders[0] != ids(other.next()) + ids(other.next())
    plain = sampler(count=8, shuffle=False)
    assert ids(plain.next()) + ids(plain.next()) == [str(i) for i in range(1, 9)]


def test_a_row_that_repeats_in_a_batch_is_counted():
    batch = sampler(count=3, batch_size=7, shuffle=False).next()
    assert ids(batch) == ["1", "2", "3", "1", "2", "3", "1"]
    assert batch.occurrences == (0, 0, 0, 1, 1, 1, 2)


def test_a_dropped_tail_needs_rows_for_one_batch():
    with pytest.raises(ValueError, match="batch of 11 prompts never fills from 10 rows"):
        sampler(batch_size=11, tail=Tail.DROP)
    with pytest.raises(ValueError, match="no prompt to sample from"):
        sampler(count=0)


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("before", range(6))
def test_case_28_an_order_goes_on_where_it_stopped(tail, before):
    whole, first, second = sampler(tail=tail), sampler(tail=tail), sampler(tail=tail)
    for _ in range(before):
        whole.next()
        first.next()
    second.load_state(json.loads(json.dumps(first.state())))
    for _ in range(5):
        assert second.next() == whole.next()


def test_an_order_of_other_prompts_is_not_gone_on_with():
    state = sampler().state()
    with pytest.raises(ValueError, match="rows 10, now 9"):
        sampler(count=9).load_state(state)
    with pytest.raises(ValueError, match="seed 0, now 1"):
        sampler(seed=1).load_state(state)
