"""Parts of a server without processes, for ``seeded_server``."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, Role
from banaserve.engine.compat import engine as compat
from banaserve.serving.instances.instance import Instance
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.launch.engine_settings import EngineSettings
from seeded_engine import Front
from seeded_machine import LoopClock, Machine


class UnmodelledInstance(Instance):
    """An instance whose client talks to a process of the machine."""

    def _connect(self, _: object) -> Any:
        machine: Any = self._launcher
        if (process := machine.processes.get(self.pid)) is None:
            raise TimeoutError("the engine does not answer")
        return Front(process.engine, self.board, machine.delay_s)


class Factory:
    """Makes instances; see ``InstanceFactory``.

    Attributes:
        lasting: Calls of all its instances that last.
    """

    def __init__(self, machine: Machine, clock: LoopClock) -> None:
        self._machine = machine
        self._clock = clock
        self.lasting = LastingCalls()

    def check_memory(self, _: int) -> None: ...

    def make(self, name: InstanceId, role: Role, settings: EngineSettings) -> Instance:
        series: Any = SimpleNamespace(engine_ended=lambda _: None)
        launcher: Any = self._machine
        run = RunDir(Path("/nowhere"), Path("/nowhere"))
        made_with = (launcher, series, run, self._clock, self.lasting)
        return UnmodelledInstance(name, role, settings, *made_with)

    def discard(self, _: InstanceId) -> None: ...


class InputProcessor:
    """Takes token ids as they are, and gives each request an id of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams, **_: Any
    ) -> compat.EngineCoreRequest:
        return compat.EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def assign_request_id(self, request: compat.EngineCoreRequest) -> None:
        request.external_req_id = request.request_id
        request.request_id = f"{request.request_id}-{next(self._numbers)}"
