"""Two processes for the transport tests, and their fixtures.

Loaded by path, since the tests' folders are no packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import secrets
import subprocess

import msgspec
import numpy as np
import pytest

import transport_peer
from banaserve.transport.interface import TransportOptions
from banaserve.transport.regions.descriptor import RegionDescriptor
from forked import Forked

WAIT_S = 60.0
REGION_BYTES = 3 * 2**20 + 123
NAMES = ["shm", "cuda_ipc", "tcp", "torch_distributed", "nixl", transport_peer.NIXL_OF_GPUS]
BY_KERNEL = ("shm", "cuda_ipc")
"""Transports within one machine, where the kernel names the peer and copies do not ask it."""
PACKAGES = {"torch_distributed": "torch", "nixl": "nixl", transport_peer.NIXL_OF_GPUS: "nixl"}


class Peer:
    """A process that offers regions."""

    def __init__(self, name, options):
        folder, secret = options.folder, options.secret
        self.process = Forked(
            transport_peer.offer, name, folder, secret, pipes=True, stderr=subprocess.DEVNULL
        )
        while self.process.stdout.readline() != "ready\n":
            assert self.process.poll() is None

    def __call__(self, do, region="", **given):
        self.process.stdin.write(json.dumps({"do": do, "region": region, **given}) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("answer: "):
            assert line, "the peer has died"
        return json.loads(line.removeprefix("answer: "))

    def offer(self, num_bytes=REGION_BYTES, epoch=1):
        key, descriptor = self("offer", num_bytes=num_bytes, epoch=epoch)
        return key, msgspec.msgpack.decode(bytes.fromhex(descriptor), type=RegionDescriptor)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Side:
    """This process's transport, and the peer shared by the tests that leave it whole."""

    def __init__(self, name, folder):
        self.name = name
        self.options = TransportOptions(folder=str(folder), secret=secrets.token_bytes(32))
        self.transport = transport_peer.make(name, self.options)
        self.peer = Peer(name, self.options)

    def open_new(self, **given):
        key, descriptor = self.peer.offer(**given)
        return key, self.transport.open(descriptor, WAIT_S)


@pytest.fixture(scope="module", params=NAMES)
def side(request, tmp_path_factory):
    package = PACKAGES.get(request.param)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    side = Side(request.param, tmp_path_factory.mktemp("t"))
    yield side
    side.transport.close()
    side.peer.end()


@pytest.fixture
def doomed(side):
    """A peer of one test's own, to be killed or stopped."""
    peer = Peer(side.name, side.options)
    yield peer
    peer.end()


def random_bytes(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def digest(array):
    return hashlib.sha256(array).hexdigest()
