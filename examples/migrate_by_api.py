"""Move layers between running instances by the admin API, while a stream is being answered.

    make serve                                     # in one terminal
    python examples/migrate_by_api.py              # in another one; --run-dir where several run

The decode instance's layers in the middle go to the prefill instance's device and come back. The
client of the stream notices nothing: its tokens are those of an instance that stays as it is.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import openai

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import Migration, MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient

HOST, TARGET = "d0", "p0"


class Stream(threading.Thread):
    """A long answer, read in the background."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__()
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0)
        self._max_tokens = max_tokens
        self.begun = threading.Event()
        self.num_pieces = 0
        self.num_tokens = 0

    def run(self) -> None:
        pieces = self._client.completions.create(
            model=self._client.models.list().data[0].id,
            prompt="Write the numbers from one on: one, two, three, four,",
            max_tokens=self._max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for piece in pieces:
            # A piece may hold several tokens; the last one says how many there were.
            self.num_pieces += 1
            self.begun.set()
            if piece.usage is not None:
                self.num_tokens = piece.usage.completion_tokens


def show(admin: AdminClient) -> None:
    """Print where the layers of each instance are."""
    for instance in admin.placement().instances:
        away = [f"{unit.words} at {unit.at}" for unit in instance.units]
        print(f"  {instance.id}: {', '.join(away) or f'all {instance.num_layers} layers at home'}")


def check(migration: Migration) -> None:
    if migration.state != "done":
        raise SystemExit(f"migration {migration.id} {migration.state}: {migration.error}")
    for move in migration.moves:
        seconds = {phase: round(time_s, 2) for phase, time_s in move.seconds.items()}
        print(f"migration {migration.id} done, seconds by phase: {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, help="folder of the run, where several run")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the stream")
    options = parser.parse_args()
    # Written by the server for commands of this user: its URL and its admin key.
    access = find_admin(options.run_dir)
    admin = AdminClient(access.url, access.key)

    instance = next(one for one in admin.placement().instances if one.id == HOST)
    layers = (instance.num_layers // 3, 2 * instance.num_layers // 3)

    stream = Stream(access.url, options.tokens)
    stream.start()
    stream.begun.wait(60)
    print("before:")
    show(admin)
    check(admin.run(MoveLayers(source=HOST, target=TARGET, layers=layers)))
    print(f"away, {stream.num_pieces} pieces of the stream so far:")
    show(admin)
    check(admin.run(Return(source=HOST)))
    print("home again:")
    show(admin)
    stream.join()
    print(f"the stream has ended after {stream.num_tokens} tokens")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # such as: no server runs
        raise SystemExit(str(error)) from None
