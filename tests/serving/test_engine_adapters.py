"""KV of an adapter is found again only for the weights that it was computed with."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from banaserve.base.errors import UserError
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat import kv_cache
from banaserve.engine.compat.requests import GracefulHTTPError
from banaserve.engine.connector.block_hash import describe_adapter
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.requests.intake import Adapters, load_adapter

BLOCK_SIZE = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    train(tmp_path)
    return tmp_path


def train(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(2000))


def scale(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')


async def loaded(by: Adapters, folder: Path, number: int = 1, **more: Any) -> LoRARequest:
    adapter = LoRARequest("sql", number, str(folder), **more)
    by.begin(adapter)
    await by.loaded(adapter)
    return adapter


def keys(by: Adapters, adapter: LoRARequest) -> list[bytes]:
    hash_function = kv_cache.get_hash_fn_by_name("sha256_cbor")
    kv_cache.init_none_hash(hash_function)
    request = compat.EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(range(2 * BLOCK_SIZE)),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=by.resolve_lora({"lora_request": adapter})["lora_request"],
        cache_salt=None,
        data_parallel_rank=None,
    )
    hasher = kv_cache.get_request_block_hasher(BLOCK_SIZE, hash_function)
    return list(kv_cache.Request.from_engine_core_request(request, hasher).block_hashes)


@pytest.mark.parametrize("change", [train, scale])
@pytest.mark.parametrize("in_place", [False, True])
async def test_an_adapter_whose_files_were_replaced_finds_no_kv_of_the_old_ones(
    folder: Path, change: Any, in_place: bool
) -> None:
    adapters = Adapters()
    old = await loaded(adapters, folder)
    under_way = copy.copy(old)
    before = keys(adapters, old)
    change(folder)
    new = await loaded(adapters, folder, old.lora_int_id, load_inplace=in_place)
    assert not set(keys(adapters, new)) & set(before)
    assert (new.lora_int_id != old.lora_int_id, new.load_inplace) == (True, False)
    assert keys(adapters, under_way) == before


async def test_kv_of_an_adapter_is_found_after_a_restart_if_its_files_are_the_same(
    folder: Path,
) -> None:
    first, second, third = Adapters(), Adapters(), Adapters()
    before = keys(first, await loaded(first, folder))
    assert keys(second, await loaded(second, folder)) == before
    train(folder)
    assert not set(keys(third, await loaded(third, folder))) & set(before)


async def test_engines_are_told_the_adapter_and_the_user_its_name(folder: Path) -> None:
    added: list[LoRARequest] = []
    seen: list[Any] = []

    async def add_lora(adapter: LoRARequest) -> bool:
        added.append(adapter)
        return True

    async def encode(*_: Any, **options: Any) -> Any:
        seen.append(options["lora_request"])
        yield "output"

    made: Any = DisaggregatedClient.__new__(DisaggregatedClient)
    made._adapters, made._request_timeout_s = Adapters(), 60.0
    machine = Machine()
    instance = SimpleNamespace(
        llm=SimpleNamespace(
            add_lora=add_lora, encode=encode, collective_rpc=machine.collective_rpc
        ),
        adapters=set(),
        inflight_requests=0,
        holding=lambda _: _Nothing(),
    )

    async def taking() -> list[Any]:
        return [instance]

    made._cluster = SimpleNamespace(serving=lambda: [instance], taking=taking)
    adapter = LoRARequest("sql", 7, str(folder))
    assert await made.add_lora(adapter)
    machine.digest = "of other files"
    with pytest.raises(ValueError, match="copy the same files to all machines"):
        await made.add_lora(LoRARequest("sql", 8, str(folder)))
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    async for _ in made.encode(prompt, PoolingParams(), "r", lora_request=adapter):
        pass
    assert (adapter.lora_name, added[0], seen[0].lora_path) == ("sql", adapter, str(folder))
    assert seen[0].lora_name.startswith("sql@1.")
    assert seen[0].lora_int_id == added[0].lora_int_id


class Machine:
    """Machine of an engine, which describes an adapter's files there.

    Attributes:
        digest: Digest of files that are not those of the server; empty if they are the same.
    """

    digest = ""

    async def collective_rpc(self, _: str, *, args: tuple[str, ...]) -> list[object]:
        return [self._describe(*args)]

    @implements(WorkerApi.banaserve_describe_adapter)
    def _describe(self, path: str) -> str:
        try:
            return self.digest or describe_adapter(path)
        except OSError as error:
            raise UserError(str(error)) from error


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def instance(error: Exception | None = None) -> Any:
    """Instance whose engine has started since adapters were loaded."""
    asked: list[LoRARequest] = []

    async def add_lora(adapter: LoRARequest) -> bool:
        asked.append(adapter)
        if error is not None:
            raise error
        return True

    llm = SimpleNamespace(add_lora=add_lora, collective_rpc=Machine().collective_rpc)
    return SimpleNamespace(id="d0", adapters=set(), llm=llm, asked=asked)


async def test_an_engine_gets_an_adapter_before_the_first_request_that_needs_it(
    folder: Path,
) -> None:
    adapters = Adapters()
    adapter = adapters.resolve_lora({"lora_request": await loaded(adapters, folder)})
    started = instance()
    for _ in range(2):
        await load_adapter(started, adapter["lora_request"])
        await load_adapter(started, None)
    assert started.asked == [adapter["lora_request"]]

    with pytest.raises(GracefulHTTPError, match="d0 cannot load adapter sql: out of memory"):
        await load_adapter(instance(RuntimeError("out of memory")), adapter["lora_request"])
    with pytest.raises(compat.EngineDeadError):
        await load_adapter(instance(compat.EngineDeadError()), adapter["lora_request"])


async def test_an_engine_that_ends_with_its_answer_has_refused_no_adapter(folder: Path) -> None:
    adapters = Adapters()
    adapter = adapters.resolve_lora({"lora_request": await loaded(adapters, folder)})
    ending = instance(compat.EngineDeadError())
    describe = ending.llm.collective_rpc

    async def end(*args: Any, **more: Any) -> list[object]:
        ending.llm = None
        return list(await describe(*args, **more))

    ending.llm.collective_rpc = end
    with pytest.raises(compat.EngineDeadError):
        await load_adapter(ending, adapter["lora_request"])


@pytest.mark.parametrize("are_gone", [False, True])
async def test_an_engine_gets_no_adapter_whose_files_are_others_now(
    folder: Path, are_gone: bool
) -> None:
    adapters = Adapters()
    adapter = adapters.resolve_lora({"lora_request": await loaded(adapters, folder)})
    if are_gone:
        (folder / "adapter_model.safetensors").unlink()
    else:
        train(folder)
    started = instance()
    with pytest.raises(GracefulHTTPError, match="d0 cannot load adapter sql: "):
        await load_adapter(started, adapter["lora_request"])
    assert (started.asked, started.adapters) == ([], set())
