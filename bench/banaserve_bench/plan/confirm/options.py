"""Options of ``banaserve plan`` that run the advice on engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.base.access.key_files import key_option
from banaserve.base.arguments import ABOVE_0, option

_GROUP = "confirmation"


@dataclass(frozen=True, kw_only=True)
class ConfirmOptions:
    """Options of the confirmation."""

    confirm: bool = option(
        "run the best systems on paced engines of this machine, beside the prediction",
        False,
        group=_GROUP,
    )
    confirm_urls: Sequence[str] = option(
        "the system NAME, as the advice names it, runs at URL already: confirm it there; repeat",
        (),
        name="--confirm-url",
        metavar="NAME=URL",
        group=_GROUP,
    )
    confirm_duration_s: float = option(
        "time in which the requests of a confirmation come", 20.0, group=_GROUP, rule=ABOVE_0
    )
    dilate: float = option(
        "wall seconds of a modelled second of paced engines", 8.0, group=_GROUP, rule=ABOVE_0
    )
    confirm_key: str = key_option(
        "--confirm-key",
        "API key of the servers of --confirm-url",
        "file with that key",
        "BANASERVE_API_KEY",
        metavar="KEY",
        group=_GROUP,
    )

    @property
    def is_confirmed(self) -> bool:
        return self.confirm or bool(self.confirm_urls)
