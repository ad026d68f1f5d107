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
    Columns,
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


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.json", "p.csv"])
def test_case_19_an_empty_file_is_an_error(tmp_path, name):
    with pytest.raises(PromptFileError, match="holds no prompt: the file is empty"):
        load(write(tmp_path / name, ""))
    with pytest.raises(PromptFileError, match="holds no prompt: the file is empty"):
        load(write(tmp_path / name, b"\xef\xbb\xbf"))


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_case_19_a_file_of_blank_lines_is_an_error(tmp_path, name):
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
    columns = Columns(prompt="caption", id="key")
    found = load(path, columns=columns, on_bad_row=BadRowPolicy.SKIP)
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
    with pytest.raises(
        PromptFileError, match=r"suffix '\.yaml' is not known; prompt files are .txt"
    ):
        load(write(tmp_path / "p.yaml", "a"))
    for columns in (Columns(id="key"), Columns(target="key")):
        with pytest.raises(
            PromptFileError, match=r"a \.txt file has no columns, so no column 'key'"
        ):
            load(write(tmp_path / "p.txt", "a"), columns=columns)
    with pytest.raises(PromptFileError, match="is no directory of a HF dataset"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.json", '{"prompt": "a"}', "expected a list of objects, got dict"),
        ("p.json", '[{"prompt": "a"},\n oops]', r"p\.json:2: not JSON: .* \.jsonl file"),
        ("p.json", b'["\xe9"]', r"not UTF-8 \(byte 2\)"),
        ("p.csv", "prompt,n,n\na,1,2\n", r"p\.csv:1: the header names 'n' twice"),
        ("p.csv", "prompt,\na,1\n", "the header names a column without a name"),
        ("p.csv", 'prompt\n"a" b\n', r"p\.csv:2: not CSV"),
        ("p.parquet", b"PAR1 and no more", r"p\.parquet cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_whole(tmp_path, name, content, said):
    with pytest.raises(PromptFileError, match=said):
        load(write(tmp_path / name, content), on_bad_row=BadRowPolicy.SKIP)


ROWS = [
    {"prompt": "first", "n": 1, "tags": ["a", "b"]},
    {"prompt": None, "n": 2, "tags": []},
    {"prompt": "  kept  ", "n": None, "tags": None},
    {"prompt": "   ", "n": 4, "tags": ["c"]},
    {"prompt": "日本", "n": 5, "tags": [None]},
]


def parquet(rows, path):
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def on_disk(rows, path):
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(("save", "name"), [(parquet, "p.parquet"), (on_disk, "p")])
def test_case_21_parquet_and_datasets_with_a_list_column(tmp_path, save, name, capfd):
    path = save(ROWS, tmp_path / name)
    capfd.readouterr()  # the library's own bars while it writes
    found = load(path, on_bad_row=BadRowPolicy.SKIP)
    assert [(row.line, row.prompt, dict(row.metadata)) for row in found.rows] == [
        (1, "first", {"n": 1, "tags": ["a", "b"]}),
        (3, "  kept  ", {"n": None, "tags": None}),
        (5, "日本", {"n": 5, "tags": [None]}),
    ]
    assert list(found.skipped) == [
        f"{name} row 2: no 'prompt'; a text is expected (columns: n, tags)",
        f"{name} row 4: 'prompt' is blank",
    ]
    with pytest.raises(PromptFileError, match="2 of 5 rows cannot be used"):
        load(path)
    assert capfd.readouterr() == ("", "")


def test_a_prompt_column_of_lists_is_refused_by_row(tmp_path):
    path = parquet([{"prompt": ["a", "b"], "text": "x"}], tmp_path / "p.parquet")
    with pytest.raises(PromptFileError) as error:
        load(path)
    assert list(error.value.mistakes) == [
        "p.parquet row 1: list as 'prompt'; a text is expected (columns: text)"
    ]
    assert load(path, columns=Columns(prompt="text")).rows[0].metadata == {"prompt": ["a", "b"]}


def test_a_dataset_of_several_splits_names_them(tmp_path):
    import datasets

    split = datasets.Dataset.from_list(ROWS[:1])
    whole = datasets.DatasetDict({"train": split, "test": split})
    whole.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(
        PromptFileError, match=r"several splits; name one: .*both/train, .*both/test"
    ):
        load(tmp_path / "both")
    assert load(tmp_path / "both/train").rows[0].prompt == "first"


def test_case_21_csv_values_stay_the_texts_that_they_are(tmp_path):
    content = (
        "\ufeffprompt,target,n\r\n"
        "a sign,07,1e3\r\n"
        "\r\n"
        '"two\nlines, one ""quoted""",yes,\r\n'
        " ,x,y\r\n"
        ",x,y\r\n"
        "short,x\r\n"
        "no target,,0\r\n"
    )
    found = load(write(tmp_path / "p.csv", content), on_bad_row=BadRowPolicy.SKIP)
    assert [(r.line, r.row_id, r.prompt, r.target, dict(r.metadata)) for r in found.rows] == [
        (2, "2", "a sign", "07", {"n": "1e3"}),
        (4, "4", 'two\nlines, one "quoted"', "yes", {"n": None}),
        (9, "9", "no target", None, {"n": "0"}),
    ]
    assert list(found.skipped) == [
        "p.csv:3: blank",
        "p.csv:6: 'prompt' is blank",
        "p.csv:7: no 'prompt'; a text is expected (columns: target, n)",
        "p.csv:8: 2 values for 3 columns",
    ]


def test_case_21_json_is_one_list_of_objects(tmp_path):
    content = '\ufeff[{"prompt": "a", "n": [1]}, 7, {"text": "b"}, {"prompt": "c"}]'
    found = load(write(tmp_path / "p.json", content), on_bad_row=BadRowPolicy.SKIP)
    assert [(row.line, row.prompt, dict(row.metadata)) for row in found.rows] == [
        (1, "a", {"n": [1]}),
        (4, "c", {}),
    ]
    assert list(found.skipped) == [
        "p.json row 2: expected a JSON object, got int",
        "p.json row 3: no 'prompt'; a text is expected (columns: text)",
    ]


def test_a_target_column_that_is_named_is_in_every_row(tmp_path):
    rows = [
        {"prompt": "a", "word": "A"},
        {"prompt": "b", "target": "B"},
        {"prompt": "c", "word": 7},
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)))
    columns = Columns(target="word")
    found = load(path, columns=columns, on_bad_row=BadRowPolicy.SKIP)
    assert [(row.prompt, row.target) for row in found.rows] == [("a", "A")]
    assert list(found.skipped) == [
        "p.jsonl:2: 'word' is None; a text is expected",
        "p.jsonl:3: 'word' is 7; a text is expected",
    ]


def test_pictures_in_a_column_stay_as_they_are_stored(tmp_path):
    import datasets
    from PIL import Image

    Image.new("RGB", (2, 2), (9, 9, 9)).save(tmp_path / "one.png")
    held = datasets.Dataset.from_list([{"prompt": "p", "image": str(tmp_path / "one.png")}])
    held = held.cast_column("image", datasets.Image())
    held.save_to_disk(str(tmp_path / "d"))
    held.to_parquet(str(tmp_path / "p.parquet"))
    for name in ("d", "p.parquet"):
        (row,) = load(tmp_path / name).rows
        assert row.metadata["image"].keys() == {"bytes", "path"}


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
