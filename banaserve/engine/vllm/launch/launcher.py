"""Launchers of engine cores: fork from a pre-imported parent (CPU), or spawn (GPU)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

import msgspec

from banaserve.engine.vllm.launch import messages
from banaserve.engine.vllm.launch.devices import Devices
from banaserve.engine.vllm.launch.engine_main import Launch
from banaserve.engine.vllm.launch.guest_main import GuestLaunch
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.errors import InstanceDeadError

_NO_PARENT = "the engine parent has ended: restart banaserve"


class Launcher(Protocol):
    """Starts engine cores; each handshakes with its instance over ``handshake_address``.

    ``vllm_argv`` are the options of an engine; empty are those that the launcher was made with.
    """

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        """Start one and return its process id."""
        ...

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        """Start a guest that answers at ``address`` and return its process id.

        Args:
            vllm_argv: Of its host.
        """
        ...

    def devices_of(self, instance_id: str) -> str:
        """The instance's CUDA_VISIBLE_DEVICES; empty on CPU."""
        ...

    def reserve(self, instance_id: str) -> None:
        """Find devices for an instance that is to be added.

        Raises:
            MigrationError: None are free.
        """
        ...

    def release(self, instance_id: str) -> None:
        """The instance is there no more."""
        ...

    def close(self) -> None:
        """End every engine core and guest that is still there."""
        ...


class ForkLauncher:
    """Orders forks from the engine parent."""

    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        # Of threads: who has been cancelled still reads the answer, and must not read another's.
        self._lock = threading.Lock()

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        order = messages.StartEngine(instance_id, handshake_address, str(log_path), vllm_argv)
        return await asyncio.to_thread(self._order, order)

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        order = messages.StartGuest(address, str(log_path), vllm_argv)
        return await asyncio.to_thread(self._order, order)

    def _order(self, order: messages.StartEngine | messages.StartGuest) -> int:
        with self._lock:
            try:
                return self._answered(order)
            except OSError as error:
                raise InstanceDeadError(f"{_NO_PARENT} ({error.strerror})") from error

    def _answered(self, order: messages.StartEngine | messages.StartGuest) -> int:
        messages.send(self._control, order)
        while (answer := messages.receive(self._control)) is not None:
            match order, answer:
                case messages.StartEngine(), messages.EngineStarted() if (
                    answer.instance_id == order.instance_id
                ):
                    return answer.pid
                case messages.StartGuest(), messages.GuestStarted() if (
                    answer.guest_id == order.address.guest_id
                ):
                    return answer.pid
        raise InstanceDeadError(_NO_PARENT)

    def devices_of(self, instance_id: str) -> str:
        return ""

    def reserve(self, instance_id: str) -> None:
        """All share the machine's processors."""

    def release(self, instance_id: str) -> None:
        """Nothing was reserved."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # closing alone wakes no thread that reads
        self._control.close()
        os.waitpid(self._parent_pid, 0)


class SpawnLauncher:
    """Starts a Python process for each engine core.

    Args:
        vllm_argv: The options of engine cores that are started without their own.
        devices: Of the instances, and those that are free.
    """

    def __init__(self, vllm_argv: list[str], devices: Devices) -> None:
        self._vllm_argv = vllm_argv
        self._devices = devices
        self._processes: list[subprocess.Popen[bytes]] = []

    def devices_of(self, instance_id: str) -> str:
        return self._devices.of(instance_id) or ""

    def reserve(self, instance_id: str) -> None:
        self._devices.reserve(instance_id)

    def release(self, instance_id: str) -> None:
        self._devices.release(instance_id)

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        argv = list(vllm_argv) or self._vllm_argv
        launch = Launch(instance_id, argv, handshake_address, str(log_path))
        command = [
            sys.executable,
            "-m",
            "banaserve.engine.vllm.launch.engine_main",
            msgspec.json.encode(launch).decode(),
        ]
        return self._spawn(command, self._environment(instance_id)).pid

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        launch = GuestLaunch(address, list(vllm_argv) or self._vllm_argv, str(log_path))
        command = [
            sys.executable,
            "-m",
            "banaserve.engine.vllm.launch.guest_main",
            msgspec.json.encode(launch).decode(),
        ]
        return self._spawn(command, self._environment(address.target)).pid

    def _environment(self, instance_id: str) -> dict[str, str]:
        environment = dict(os.environ)
        if (devices := self._devices.of(instance_id)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._processes = [p for p in self._processes if p.poll() is None]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
