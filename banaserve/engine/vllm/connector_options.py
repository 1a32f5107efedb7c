"""What the connector is told in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from banaserve.errors import UserError
from banaserve.names import check_known

_ARRANGEMENTS = ("pipelined", "serial")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of one engine's connector.

    The last five serve measurements; their defaults are what serving wants.

    Attributes:
        socket: Path of the store's socket.
        salt: Deployments with different salts never share blocks.
        cost_gate: Whether a prefix is fetched only where computing it would take longer.
        arrangement: "pipelined" fetches layer i+1 and saves layer i-1 while layer i computes;
            "serial" fetches everything before the forward pass and saves everything after it.
        load_bytes_per_s: Fetches are held back to this speed; 0 does not.
        save_bytes_per_s: The same for saves.
        trace: Whether to keep when each layer was fetched, computed and saved.
    """

    socket: str
    salt: str = ""
    cost_gate: bool = True
    arrangement: str = "pipelined"
    load_bytes_per_s: float = 0.0
    save_bytes_per_s: float = 0.0
    trace: bool = False

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> ConnectorOptions:
        """Read and check.

        Raises:
            UserError: An unknown option, one of the wrong kind, or no socket.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        for name in extra_config:
            check_known("option of the store's connector", name, defaults)
        if not extra_config.get("socket"):
            raise UserError("the store's connector needs the option socket: the store's socket")
        options = cls(**{name: _checked(name, value) for name, value in extra_config.items()})
        check_known("arrangement", options.arrangement, _ARRANGEMENTS)
        return options


def _checked(name: str, value: Any) -> Any:
    if name in ("cost_gate", "trace"):
        fits = isinstance(value, bool)
    elif name.endswith("_per_s"):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    else:
        fits = isinstance(value, str)
    if not fits:
        raise UserError(f"the store's connector cannot use {name}={value!r}")
    return value
