"""A scorer behind HTTP: what is sent, what is tried again, and what never becomes a zero."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from omni_core.config import ConfigError, structure
from omni_core.input_image import InputImage
from omni_core.plugins import REWARDS, registry
from omni_core.reward import RewardInput
from omni_core.testing import RewardSuite
from omni_core.trajectory import Media
from omni_trainer.rewards.http import HTTPReward
from omni_trainer.rewards.options import HTTPRewardConfig, ImageFormat
from omni_trainer.rewards.scoring import Scorer


class Server(ThreadingHTTPServer):
    """Answers on loopback with what it was given: (status, body), call by call."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = []
        self.requests = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        status, answer = self.server.answers.pop(0) if self.server.answers else brightness(body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Say nothing."""


def brightness(body):
    return 200, {"scores": [float(np.asarray(image).mean()) for image in received(body)]}


def received(body):
    return [Image.open(io.BytesIO(base64.b64decode(image))) for image in body["images"]]


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def pictures(count):
    drawn = torch.rand(count, 4, 6, 3, generator=torch.Generator().manual_seed(0))
    return Media(image=(drawn * 255).to(torch.uint8))


def rows(count):
    return [RewardInput(prompt=f"p{i}") for i in range(count)]


@pytest.fixture
def ask(server):
    """Score one picture after the answers given: `ask((500, "busy"), (200, [1.0]))`."""
    made = []

    def ask(*answers, count=1, retries=2, **options):
        server.answers = list(answers)
        waits = []
        reward = HTTPReward(HTTPRewardConfig(url=server.url, **options))
        scorer = Scorer(reward, retries=retries, sleep=waits.append)
        made.append(scorer)
        scorer.setup()
        results = scorer.score(pictures(count), rows(count))
        assert len(waits) == scorer.counts.retries == len(server.requests) - 1
        return results

    yield ask
    for scorer in made:
        scorer.close()


class TestHTTPReward(RewardSuite):
    tolerance = 0.0

    @pytest.fixture
    def reward(self, server):
        made = registry(REWARDS).get("http").build(HTTPRewardConfig(url=server.url))
        yield made
        made.close()

    @pytest.fixture
    def media(self):
        return pictures(3)

    @pytest.fixture
    def inputs(self):
        return rows(3)


def test_case_14_two_500_and_a_200_are_two_retries_and_the_true_score(ask, server):
    (result,) = ask((500, "busy"), (500, "busy"), (200, {"scores": [0.75]}))
    assert (result.ok, result.value) == (True, 0.75)
    assert len(server.requests) == 3


def test_case_14_a_400_is_a_failure_without_a_retry(ask, server):
    (result,) = ask((400, b"no such model"))
    assert not result.ok
    assert result.error.endswith("the server answered 400: no such model")
    assert server.url in result.error
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [[], {"scores": []}])
def test_case_14_an_empty_list_is_a_failure_and_no_zero(ask, answer):
    (result,) = ask((200, answer))
    assert not result.ok
    assert result.error.endswith("0 scores came back for 1 images")


@pytest.mark.parametrize("answer", [[0.0], {"scores": [0.0]}, {"scores": [0]}])
def test_case_14_a_zero_is_a_true_zero(ask, answer):
    (result,) = ask((200, answer))
    assert (result.ok, result.value) == (True, 0.0)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_what_lasts_is_a_failure_once_the_retries_are_used_up(ask, server, status):
    (result,) = ask(*[(status, b"busy")] * 3)
    assert not result.ok
    assert f"the server answered {status}: busy (tried 3 times)" in result.error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>"), "the answer is not JSON: '<html>'"),
        ((200, {"score": [1]}), "the answer holds no list of scores"),
        ((200, 0.5), "the answer holds no list of scores"),
        ((200, [0.5]), "1 scores came back for 2 images"),
        ((200, [0.5] * 3), "3 scores came back for 2 images"),
        ((301, b""), "the server answered 301"),
    ],
)
def test_an_answer_without_the_scores_fails_all_of_the_batch(ask, answer, said):
    results = ask(answer, count=2)
    assert [result.ok for result in results] == [False, False]
    assert said in results[0].error


@pytest.mark.parametrize("score", [b"null", b"NaN", b'"0.5"', b"true", b"1e999"])
def test_a_picture_without_a_score_fails_alone(ask, score):
    good, bad = ask((200, b'{"scores": [0.5, ' + score + b"]}"), count=2)
    assert (good.ok, good.value) == (True, 0.5)
    assert not bad.ok


def test_a_server_that_is_not_there_is_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    waits = []
    reward = HTTPReward(HTTPRewardConfig(url=f"http://127.0.0.1:{port}"))
    scorer = Scorer(reward, retries=1, sleep=waits.append)
    scorer.setup()
    (result,) = scorer.score(pictures(1), rows(1))
    scorer.close()
    assert not result.ok
    assert "no answer: ConnectError" in result.error
    assert len(waits) == 1


def test_a_server_that_is_too_slow_is_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        reward = HTTPReward(HTTPRewardConfig(url=url, timeout=0.05))
        scorer = Scorer(reward, retries=1, sleep=lambda _: None)
        scorer.setup()
        (result,) = scorer.score(pictures(1), rows(1))
        scorer.close()
    assert not result.ok
    assert "no answer: ReadTimeout" in result.error
    assert scorer.counts.retries == 1


def test_pictures_and_rows_arrive_as_they_were(server):
    reward = HTTPReward(HTTPRewardConfig(url=server.url, target_rule="quoted"))
    reward.setup()
    inputs = [
        RewardInput(prompt='a "é"', target="é", metadata={"n": 1, "tags": ["a"]}),
        RewardInput(prompt="b"),
    ]
    sent = pictures(2)
    found = reward.score(sent, inputs)
    reward.close()
    headers, body = server.requests[0]
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert {key: value for key, value in body.items() if key != "images"} == {
        "format": "png",
        "prompts": ['a "é"', "b"],
        "targets": ["é", None],
        "metadata": [{"n": 1, "tags": ["a"]}, {}],
    }
    assert np.array_equal(np.stack([np.asarray(i) for i in received(body)]), sent.image.numpy())
    assert [r.value for r in found] == [float(i.double().mean()) for i in sent.image]
    assert reward.target('a "x"') == "x"


def test_what_is_edited_arrives_beside_the_edits(server):
    reward = HTTPReward(HTTPRewardConfig(url=server.url))
    reward.setup()
    edited = pictures(1).image[0]
    reward.score(pictures(2), [RewardInput(prompt="p", image=InputImage.of(edited)), *rows(1)])
    reward.close()
    sent, none = server.requests[0][1]["input_images"]
    assert none is None
    (found,) = received({"images": [sent]})
    assert np.array_equal(np.asarray(found), edited.numpy())


def test_jpeg_is_smaller_on_the_wire(server):
    reward = HTTPReward(HTTPRewardConfig(url=server.url, format=ImageFormat.JPEG))
    reward.setup()
    reward.score(pictures(1), rows(1))
    reward.close()
    assert received(server.requests[0][1])[0].format == "JPEG"


def test_a_token_comes_from_the_environment_and_is_in_no_config(server, monkeypatch):
    reward = HTTPReward(HTTPRewardConfig(url=server.url, token_variable="OMNI_TEST_TOKEN"))
    monkeypatch.delenv("OMNI_TEST_TOKEN", raising=False)
    with pytest.raises(ValueError, match="OMNI_TEST_TOKEN is not set"):
        reward.setup()
    monkeypatch.setenv("OMNI_TEST_TOKEN", "secret")
    reward.setup()
    reward.score(pictures(1), rows(1))
    reward.close()
    assert server.requests[0][0]["Authorization"] == "Bearer secret"


def test_a_column_that_json_cannot_say_is_named(server):
    reward = HTTPReward(HTTPRewardConfig(url=server.url))
    reward.setup()
    inputs = [RewardInput(prompt="p", metadata={"raw": b"\0"})]
    with pytest.raises(ValueError, match=r"cannot be sent as JSON: .*bytes"):
        reward.score(pictures(1), inputs)
    reward.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:1/score", "expected http://... or https://..."),
        ("ftp://x/score", "expected http://... or https://..."),
        ("http://", "expected http://... or https://..."),
        ("http://me:secret@x/", "holds credentials, and the config is saved with the run"),
    ],
)
def test_a_url_is_checked_before_anything_starts(url, said):
    with pytest.raises(ConfigError) as error:
        structure({"url": url}, HTTPRewardConfig)
    (line,) = error.value.mistakes
    assert line.startswith("url: ")
    assert said in line
    assert "secret" not in line


def test_a_run_is_trained_by_a_server(server, train, metrics):
    found = train("reward.name=http", f"reward.url={server.url}", "trainer.steps=1")
    (_, line) = metrics(found.run_dir)
    assert line["reward/unscored"] == line["reward/retries"] == 0.0
    assert 0 < line["reward/mean"] < 255
