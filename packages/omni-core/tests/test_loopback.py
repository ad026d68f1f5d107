"""A group of one process is reachable from its own machine alone."""

import os
import socket
import subprocess
import sys

import pytest

from omni_core import loopback

LISTENING = """
import os
import torch.distributed as dist
from omni_core import loopback

with loopback.only():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sockets = set()
for descriptor in os.listdir("/proc/self/fd"):
    try:
        sockets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        pass
for line in open("/proc/self/net/tcp").read().splitlines()[1:]:
    columns = line.split()
    if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
        print(columns[1].partition(":")[0])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="reads /proc")
def test_a_group_of_one_listens_on_loopback_alone():
    found = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=60, check=True
    )

    assert set(found.stdout.split()) <= {"0100007F"}  # 127.0.0.1, as the kernel writes it


def test_inside_the_loopback_interface_is_named_and_outside_nothing_is_left(monkeypatch):
    monkeypatch.delenv(loopback.VARIABLE, raising=False)

    with loopback.only():
        inside = os.environ.get(loopback.VARIABLE)

    assert inside == loopback.interface()
    assert loopback.VARIABLE not in os.environ


def test_an_interface_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(loopback.VARIABLE, "ib0")

    with loopback.only():
        assert os.environ[loopback.VARIABLE] == "ib0"
    assert os.environ[loopback.VARIABLE] == "ib0"


@pytest.mark.parametrize(("names", "expected"), [(["lo0", "en0"], "lo0"), (["eth0"], None)])
def test_the_interface_has_its_own_name_on_each_system(names, expected, monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))

    assert loopback.interface() == expected
