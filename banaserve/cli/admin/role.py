"""``banaserve role``: give an instance of a running server the role prefill, decode or both."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.arguments import argument, option
from banaserve.base.types import Role
from banaserve.cli.admin.following import ended, followed
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.contracts.control_api import RoleRequest
from banaserve.contracts.instances import RoleChange


@dataclass(frozen=True, kw_only=True)
class RoleOptions(JsonOptions):
    """Options of ``banaserve role``."""

    instance: str = argument("such as p1; it keeps its name")
    role: str = argument("prefill, decode or both", metavar="ROLE")
    timeout_s: float = option("time after which it keeps its role if it is not drained", 300.0)
    max_num_batched_tokens: int = option(
        "most tokens of its steps from then on; 0: those of its role", 0
    )


def role(asked: RoleOptions) -> int:
    """Give a running instance another role once its requests have ended."""
    client, instance = asked.client(), asked.instance
    ask = RoleRequest(instance, asked.role, asked.timeout_s, asked.max_num_batched_tokens)
    change = followed(client.roles, client.roles.begin(ask), _progress, is_silent=asked.as_json)
    now = "does both" if change.role == Role.COLOCATED.value else f"is for {change.role}"
    failure = f"role switch {change.id} {change.state}: {change.reason or 'by hand'}"
    return ended(change, asked.as_json, [f"{instance} {now} after {change.seconds:.1f} s"], failure)


def _progress(change: RoleChange) -> str:
    return f"{change.instance}: {change.num_left} requests left" if change.is_open else ""


app = App(role)
