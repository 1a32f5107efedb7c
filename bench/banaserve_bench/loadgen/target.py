"""Server under test, as the load generator finds it: any server with OpenAI's API."""

from __future__ import annotations

import http.client
import json
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.metrics_page import fetch


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server that answers.

    Attributes:
        context_tokens: Context length of the model; None if the server does not report it.
        root: Folder or id of the model that the server loaded; None if the server does not report
            it.
    """

    url: str
    model: str
    context_tokens: int | None
    root: str | None


def find_target(url: str, model: str | None, api_key: str | None) -> ServerUnderTest:
    """Return the server at ``url`` with the model to use. Blocking.

    Raises:
        UserError: The server does not answer, refuses the key, or has no such model.
    """
    base = url.rstrip("/").removesuffix("/v1")
    cards = _cards(base, api_key)
    names = [str(card.get("id")) for card in cards]
    if model is not None and model not in names:
        raise UserError(f"{base} serves {', '.join(names)}, not {model}: give one with --model")
    card = cards[names.index(model)] if model is not None else cards[0]
    length = card.get("max_model_len")
    root = card.get("root")
    return ServerUnderTest(
        base,
        str(card["id"]),
        length if isinstance(length, int) else None,
        root if isinstance(root, str) else None,
    )


def _cards(base: str, api_key: str | None) -> list[dict[str, Any]]:
    try:
        page = json.loads(fetch(f"{base}/v1/models", api_key))
    except urllib.error.HTTPError as error:
        hint = "give its --api-key" if error.code in (401, 403) else "is it an OpenAI API?"
        raise UserError(f"{base}/v1/models answers HTTP {error.code}: {hint}") from error
    except http.client.HTTPException as error:
        raise UserError(f"{base} does not speak HTTP: {type(error).__name__}") from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"no server answers at {base} ({reason}): is it running?") from error
    except ValueError as error:
        raise UserError(f"{base}/v1/models is no OpenAI API: {error}") from error
    found = page.get("data") if isinstance(page, dict) else None
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(card, dict) and "id" in card for card in found)
    ):
        raise UserError(f"{base}/v1/models is no OpenAI API: it lists no models")
    return found


async def try_out(client: OpenAiClient, call: CompletionCall) -> None:
    """Send ``call`` once, before anything is measured.

    Raises:
        UserError: The call failed; the message says how, and what may be the cause.
    """
    record = await client.send(call)
    if record.error is None:
        return
    hint = ""
    if record.status in (400, 422):
        hint = (
            ": servers that know no ignore_eos and min_tokens need --no-exact-output, those that "
            "take no token ids --send text"
        )
    raise UserError(f"a first request failed: {record.error}{hint}")


def find_tokenizer(target: ServerUnderTest, given: str | None) -> Path:
    """Return the folder of the served model's tokenizer: ``given``, else where the server has it.

    Raises:
        UserError: The tokenizer cannot be found.
    """
    for name in (given,) if given else (target.root, target.model):
        if name and (Path(name) / "tokenizer.json").is_file():
            return Path(name)
        if name and (given or name in models.NAMES):
            return Path(models.resolve(name, None, lambda line: print(line, flush=True)).path_or_id)
    raise UserError(
        f"the tokenizer of {target.model} is not on this machine: give a folder or a Hugging "
        "Face id with --tokenizer"
    )
