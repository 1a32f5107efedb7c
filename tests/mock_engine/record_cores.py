"""Record what a real engine core says in the scenario, for mock cores to be compared with.

Usage, from a checkout, with the vLLM that is to be recorded:

    PYTHONPATH=tests/mock_engine:tests/support python -P tests/mock_engine/record_cores.py

writes ``golden/vllm-VERSION.json``. ``--sources WHEEL_OR_VERSION`` compares instead the messages'
fields in the sources of another vLLM, which is not run, with those recorded with the installed one,
and writes them to ``golden/fields-VERSION.json``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.models.cache import cache_root
from banaserve.engine.compat.__main__ import wheel_of
from front_end import (
    Action,
    FrontEnd,
    Handshake,
    Names,
    Player,
    Recording,
    farewell,
    front_end,
    shape_of,
)
from struct_fields import compared, fields_in_package, fields_in_wheel

GOLDEN = Path(__file__).parent / "golden"
START_S, END_S = 240.0, 30.0


def main() -> int:
    if sys.argv[1:2] == ["--sources"]:
        return compare_sources(sys.argv[2])
    recording = record()
    path = golden_of(recording.vllm)
    body = msgspec.json.format(msgspec.json.encode(recording), indent=1)
    path.write_bytes(body + b"\n")
    print(f"{path}: {len(recording.answers)} answers")
    return 0


def golden_of(version: str) -> Path:
    """File of the recording with a version of vLLM, by its first two numbers."""
    return GOLDEN / f"vllm-{'.'.join(version.split('.')[:2])}.json"


def read_golden(path: Path) -> Recording:
    return msgspec.json.decode(path.read_bytes(), type=Recording)


def compare_sources(given: str) -> int:
    """Print how the fields of another vLLM's messages differ; 1 if they do."""
    wheel = wheel_of(given, cache_root() / "wheels")
    version = wheel.name.split("-")[1].partition("+")[0]
    theirs = fields_in_wheel(wheel)
    path = fields_of(version)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(theirs), indent=1) + b"\n")
    recorded = read_golden(sorted(GOLDEN.glob("vllm-*.json"))[-1])
    lines = compared(recorded.structs, theirs)
    print(f"{path}: {len(lines)} differences from the recording of {recorded.vllm}")
    print("\n".join(lines))
    return int(bool(lines))


def fields_of(version: str) -> Path:
    """File of the fields in the sources of a version that was not run."""
    return GOLDEN / f"fields-{'.'.join(version.split('.')[:2])}.json"


# ---- the real engine core


@contextmanager
def real_core(folder: Path, front: FrontEnd) -> Iterator[subprocess.Popen[bytes]]:
    """A real engine core, started from nothing as banaserve starts one on a GPU."""
    import small_model
    from banaserve.contracts.environment import ENVIRONMENT
    from banaserve.engine.engine_args import common_options
    from banaserve.serving.launch.messages import StartEngine, spawn

    model = small_model.resolve()
    argv = ["--model", model.path_or_id, "--served-model-name", model.served_name]
    argv += ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)]
    argv += ["--max-model-len", "4096", "--distributed-executor-backend", "uni"]
    argv += common_options()
    log = folder / "core.log"
    order = StartEngine("c0", front.handshake_address, str(log), tuple(argv))
    environment = {"OMP_NUM_THREADS": "1", **ENVIRONMENT, **os.environ}
    process = spawn(order, environment)
    try:
        yield process
    except TimeoutError as late:
        raise TimeoutError(f"{late}; its log ends with\n{log.read_text()[-2000:]}") from None
    finally:
        process.kill()
        process.wait()


def shaken(front: FrontEnd, init: Any, process: subprocess.Popen[bytes]) -> Handshake:
    """The handshake with a real engine core, which takes its time to start."""
    return front.shake(init, lambda: process.poll() is None, START_S)


def record() -> Recording:
    """Play the scenario on two real engine cores: one ends in order, one is killed."""
    from vllm import __version__

    structs = recorded_structs()
    init, actions, names = init_message(), scenario(), Names.of(structs)
    with tempfile.TemporaryDirectory(prefix="rc-") as place:
        folder = Path(place)
        with front_end(folder) as front, real_core(folder, front) as process:
            shake = shaken(front, init, process)
            player = Player(front, names)
            answers = [player.play(action) for action in actions]
            process.terminate()
            ended = farewell(front, names, process.wait(END_S))
    with tempfile.TemporaryDirectory(prefix="rc-") as place:
        folder = Path(place)
        with front_end(folder) as front, real_core(folder, front) as process:
            shaken(front, init, process)
            process.send_signal(signal.SIGKILL)
            killed = farewell(front, names, process.wait(END_S))
    return Recording(
        vllm=__version__,
        structs=structs,
        init=init,
        actions=actions,
        hello=shake.hello,
        ready=shake.ready,
        registration=shape_of(shake.registration),
        answers=answers,
        stats=names.stats,
        ended=ended,
        killed=killed,
    )


# ---- what is sent


def init_message() -> Any:
    """Answer to HELLO as banaserve encodes it; addresses are put in by the front end."""
    from banaserve.engine.compat.engine import EngineHandshakeMetadata, EngineZmqAddresses

    addresses = EngineZmqAddresses(inputs=[], outputs=[])
    return encoded(EngineHandshakeMetadata(addresses=addresses, parallel_config={}))


def scenario() -> list[Action]:
    """Requests, an abort and utility calls, as vLLM's client encodes them."""
    from banaserve.contracts.rpc.engine_api import CoreApi, WorkerApi

    numbers = iter(range(1, 100))

    def utility(name: str, method: str, *args: Any) -> Action:
        body = encoded((0, next(numbers), method, args))
        return Action(name, "UTILITY", body, "utility")

    def ping(name: str) -> Action:
        racing = utility(name, "is_scheduler_paused")
        return msgspec.structs.replace(racing, is_racing=True)

    budget, rpc = CoreApi.banaserve_set_budget.__name__, "collective_rpc"
    print_of = WorkerApi.banaserve_fingerprint.__name__
    return [
        utility("tasks", "get_supported_tasks"),
        utility("is not paused", "is_scheduler_paused"),
        utility("is not asleep", "is_sleeping"),
        utility("unknown", "no_such_utility"),
        utility("failing", "pause_scheduler", "bogus", True),
        utility("budget", budget, 512, 4),
        utility("fingerprint", rpc, print_of, None, (), None),
        utility("unknown of workers", rpc, "no_such_method", None, (), None),
        added("greedy", temperature=0.0, max_tokens=4, ignore_eos=True),
        added(
            "seeded", temperature=1.0, seed=7, max_tokens=3, min_tokens=2, logprobs=2, priority=1
        ),
        added("continued", seed=7, max_tokens=4, extra_args={"banaserve_output": [300, 301]}),
        added("stopped", temperature=0.0, max_tokens=9, stop_token_ids=[400], allowed=[400]),
        msgspec.structs.replace(
            added("aborted", temperature=0.0, max_tokens=4000, ignore_eos=True),
            ends="outputs 2",
            is_racing=True,
        ),
        Action("abort", "ABORT", ["aborted"], "none"),
        ping("after the abort"),
        ping("and once more"),
        utility("pause", "pause_scheduler", "abort", True),
        utility("is paused", "is_scheduler_paused"),
        utility("resume", "resume_scheduler"),
        utility("cache is reset", "reset_prefix_cache", False, False),
        added("after the reset", temperature=0.0, max_tokens=2, ignore_eos=True),
        msgspec.structs.replace(
            added("aborted by a pause", temperature=0.0, max_tokens=4000, ignore_eos=True),
            ends="outputs 2",
            is_racing=True,
        ),
        msgspec.structs.replace(
            utility("pause under load", "pause_scheduler", "abort", False), is_racing=True
        ),
        utility("resume again", "resume_scheduler"),
        utility("no LoRA", "list_loras"),
    ]


def added(
    name: str,
    *,
    priority: int = 0,
    allowed: list[int] | None = None,
    **params: Any,
) -> Action:
    """A request of twenty tokens, as vLLM's front end prepares it."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    made = SamplingParams(
        output_kind=RequestOutputKind.DELTA, detokenize=True, allowed_token_ids=allowed, **params
    )
    if not made.ignore_eos:
        made.update_from_generation_config({}, 2)
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(1000, 1020)),
        mm_features=None,
        sampling_params=made,
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        external_req_id=name,
    )
    return Action(name, "ADD", encoded(request), "finished")


def encoded(message: Any) -> Any:
    """What a message is after vLLM's client has encoded it, as a plain value."""
    from vllm.v1.serial_utils import MsgpackEncoder

    (body,) = MsgpackEncoder().encode(message)
    return msgspec.msgpack.decode(body)


def recorded_structs() -> dict[str, list[list[str]]]:
    """Fields of the installed vLLM's structs, with their defaults as its sources have them."""
    import vllm

    return fields_in_package(Path(vllm.__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
