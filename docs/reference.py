"""Reference pages of the site, from the program itself.

Commands from their ``--help``, the admin API from its routes and message types, metrics from the
objects that are exported, configuration from the schemas that check it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

import banaserve
from banaserve.contracts.control_api import (
    ControllerStatus,
    DecisionRecord,
    NodeRequest,
    PauseRequest,
    RoleRequest,
    ScaleRequest,
    ServerStatus,
)
from banaserve.contracts.instances import DrainState, NodeChange, NodeStatus, RoleChange, Scaling
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    ExpertLoad,
    ExpertLoadRequest,
    GuestSharing,
    Migration,
    MigrationRequest,
    Overlapping,
    OverlapRequest,
    ShareRequest,
)
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.contracts.trace_events import RequestSummary, RequestTrace
from banaserve.frontdoor.page.records import PageSnapshot
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats
from banaserve.orchestrator.control.costs import profile
from banaserve.pacing.metrics import PacedTime
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.metrics import Metrics
from docs.commands import GENERATED, commands_page

PACKAGE = Path(banaserve.__file__).parent


def pages() -> dict[str, str]:
    """Return the text of each reference page by its file name."""
    return {
        "commands.md": commands_page(),
        "admin-api.md": admin_page(),
        "metrics.md": metrics_page(),
        "configuration.md": configuration_page(),
    }


# ---- admin API


class Operation(NamedTuple):
    """One operation of the admin API.

    Attributes:
        body: Type of the request's body, None where it has none.
        answer: Type of the answer's body.
        query: Parameters of the query, each with its meaning.
    """

    summary: str
    answer: Any
    body: Any = None
    status: int = 200
    query: Mapping[str, str] = {}


_WAIT = {"wait_s": "Answer when it has ended, after so many seconds at the latest; 30 at most."}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/admin/placement"): Operation("Which instance runs what.", ClusterPlacement),
    ("GET", "/admin/migrations"): Operation("The last migrations.", list[Migration]),
    ("POST", "/admin/migrations"): Operation("Begin one.", Migration, MigrationRequest, 202),
    ("GET", "/admin/migrations/{id}"): Operation("One migration.", Migration, query=_WAIT),
    ("DELETE", "/admin/migrations/{id}"): Operation("Give it up.", Migration, status=202),
    ("POST", "/admin/overlap"): Operation(
        "Let an instance and its guests compute at once.", Overlapping, OverlapRequest
    ),
    ("POST", "/admin/expert-load"): Operation(
        "How often an instance's experts are chosen.", ExpertLoad, ExpertLoadRequest
    ),
    ("POST", "/admin/share"): Operation("Bound what guests take.", GuestSharing, ShareRequest),
    ("GET", "/admin/status"): Operation("The server on one screen.", ServerStatus),
    ("GET", "/admin/decisions"): Operation(
        "Decisions of the orchestrator.",
        list[DecisionRecord],
        query={"last": "So many of the last ones, the oldest first; all that are kept without it."},
    ),
    ("GET", "/admin/live"): Operation(
        "For the page: server-sent events, a `snapshot` a second behind each `decision` that is "
        "new or has changed.",
        PageSnapshot,
    ),
    ("GET", "/admin/traces"): Operation(
        "The last requests.", list[RequestSummary], query={"last": "So many; all without it."}
    ),
    ("GET", "/admin/traces/{id:path}"): Operation("One request, event by event.", RequestTrace),
    ("GET", "/admin/orchestrator"): Operation("The control loop.", ControllerStatus),
    ("POST", "/admin/orchestrator"): Operation("Pause or resume.", ControllerStatus, PauseRequest),
    ("GET", "/admin/roles"): Operation("The last role switches.", list[RoleChange]),
    ("POST", "/admin/roles"): Operation("Begin a role switch.", RoleChange, RoleRequest, 202),
    ("GET", "/admin/roles/{id}"): Operation("One role switch.", RoleChange, query=_WAIT),
    ("DELETE", "/admin/roles/{id}"): Operation("Give it up.", RoleChange, status=202),
    ("POST", "/admin/drains/{id}"): Operation(
        "Send an instance nothing more; its streams go on elsewhere.", DrainState, status=202
    ),
    ("GET", "/admin/drains/{id}"): Operation("What is left on it.", DrainState, query=_WAIT),
    ("DELETE", "/admin/drains/{id}"): Operation("Let it serve again.", DrainState),
    ("GET", "/admin/scalings"): Operation("The last scalings.", list[Scaling]),
    ("POST", "/admin/scalings"): Operation(
        "Begin to add and remove instances.", Scaling, ScaleRequest, 202
    ),
    ("GET", "/admin/scalings/{id}"): Operation("One scaling.", Scaling, query=_WAIT),
    ("DELETE", "/admin/scalings/{id}"): Operation("Give it up.", Scaling, status=202),
    ("GET", "/admin/nodes"): Operation("Machines that engines run on.", list[NodeStatus]),
    ("GET", "/admin/node-changes"): Operation(
        "The last nodes that have joined or left.", list[NodeChange]
    ),
    ("POST", "/admin/node-changes"): Operation(
        "Take one more node, or drain one and give it back.", NodeChange, NodeRequest, 202
    ),
    ("GET", "/admin/node-changes/{id}"): Operation("One of them.", NodeChange, query=_WAIT),
    ("DELETE", "/admin/node-changes/{id}"): Operation(
        "Give it up: the node stays out, or stays.", NodeChange, status=202
    ),
    ("GET", "/admin/restarts"): Operation("The last rolling restarts.", list[RollingRestart]),
    ("POST", "/admin/restarts"): Operation(
        "Replace all engines one after the other.", RollingRestart, RestartRequest, 202
    ),
    ("GET", "/admin/restarts/{id}"): Operation("One of them.", RollingRestart, query=_WAIT),
    ("DELETE", "/admin/restarts/{id}"): Operation(
        "Give it up; what it has changed goes back.", RollingRestart, status=202
    ),
}
_ERRORS = {
    "400": "The request is wrong; the message says what to change.",
    "401": "No valid admin key.",
    "404": "Nothing of that id.",
    "409": "Refused, with the reason.",
    "503": "The instance has ended.",
}


def openapi() -> dict[str, Any]:
    """Return the admin API as an OpenAPI 3.1 document."""
    types = [one for op in OPERATIONS.values() for one in (op.answer, op.body) if one is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), op in OPERATIONS.items():
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = _operation(
            path, op, by_type
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "banaserve admin API", "version": banaserve.__version__},
        "paths": paths,
        "security": [{"adminKey": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, op: Operation, by_type: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", path)
    ] + [
        {"name": name, "in": "query", "description": words, "schema": {"type": "number"}}
        for name, words in op.query.items()
    ]
    answers = {str(op.status): _content("The answer.", by_type[str(op.answer)])}
    answers |= {code: {"description": words} for code, words in _ERRORS.items()}
    found: dict[str, Any] = {"summary": op.summary, "parameters": parameters, "responses": answers}
    if op.body is not None:
        found["requestBody"] = {"required": True, **_content("", by_type[str(op.body)])}
    return found


def _content(words: str, schema: Any) -> dict[str, Any]:
    content = {"content": {"application/json": {"schema": schema}}}
    return {"description": words, **content} if words else content


def admin_page() -> str:
    document = openapi()
    parts = [
        f"# Admin API\n\n{GENERATED} As OpenAPI: [openapi.json](openapi.json).\n\n"
        "Every request needs the header `Authorization: Bearer KEY` with the admin key, which is "
        "not one of the users' API keys. `serve` makes one for the run, where commands of the same "
        "user find it; `--admin-key` sets it. What is refused is answered with one line in "
        "`error.message`.",
        _table(
            ("Request", "What it does", "Body", "Answer"),
            (
                (f"`{method} {path}`", op.summary, _type_link(op.body), _type_link(op.answer))
                for (method, path), op in OPERATIONS.items()
            ),
        ),
        "## Errors",
        _table(("Status", "Meaning"), _ERRORS.items()),
        "## Types",
    ]
    parts += _types(dict(sorted(document["components"]["schemas"].items())))
    return "\n\n".join(parts) + "\n"


def _type_link(one: Any) -> str:
    if one is None:
        return ""
    if get_origin(one) is list:
        return f"list of {_type_link(get_args(one)[0])}"
    if get_args(one):
        return " or ".join(_type_link(part) for part in get_args(one))
    return f"[{one.__name__}](#{one.__name__.lower()})"


# ---- metrics


class MetricFacts(NamedTuple):
    """One metric as its documentation has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    words: str
    where: str


def metrics() -> list[MetricFacts]:
    """Return every metric that a server, a store or a balancer exports, by name."""
    found = [one for module in _metric_modules() for one in _of_module(module)]
    about = profile.load(profile.names()[0])
    front, balancer = "`serve`, front door", "`route`"
    for family in PacedTime(about, 1.0, Path(os.devnull)).collect():
        found.append(_of_family(family, f"{front}, with `--pace`"))
    found += [_of_family(family, balancer) for family in Metrics().collect()]
    found += _of_store()
    return sorted(set(found))


def _metric_modules() -> Iterator[ModuleType]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "prometheus_client" in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield import_module(".".join(parts))


def _of_module(module: ModuleType) -> Iterator[MetricFacts]:
    values = list(vars(module).values())
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    for value in values:
        if isinstance(value, MetricWrapperBase):
            [family] = value.describe()
            # The library has no public way to the labels of a metric without samples.
            labels = tuple(value._labelnames)
            yield _facts(family, labels, "`serve`, front door")


def _of_family(family: Metric, where: str) -> MetricFacts:
    return _facts(family, tuple(getattr(family, "_labelnames", ())), where)


def _of_store() -> Iterator[MetricFacts]:
    empty: dict[str, Any] = dict.fromkeys(StoreStats.__struct_fields__, 0)
    stats = StoreStats(**empty | {"tiers": (TierReport(stats=TierStats(name="ssd")),)})
    for family in text_string_to_metric_families(prometheus_text(stats)):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        yield _facts(family, tuple(labels), "store: `kvstore`, `serve`")


def _facts(family: Metric, labels: tuple[str, ...], where: str) -> MetricFacts:
    suffix = "_total" if family.type == "counter" else ""
    return MetricFacts(family.name + suffix, family.type, labels, family.documentation, where)


def metrics_page() -> str:
    rows = [
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels) or "-",
         one.words.replace("|", "/"), one.where)
        for one in metrics()
    ]  # fmt: skip
    return (
        f"# Metrics\n\n{GENERATED} `GET /metrics` of the front door has all of `serve`'s, those "
        "of vLLM (`vllm:...`, with the label `instance_id`) and those of the store; `banaserve "
        "kvstore --metrics-port` has the store's alone. vLLM's metrics of requests have a label "
        "`leg` too: a request with two legs counts its prompt, its time in the queue and its "
        "prefill time under `prefill`, everything else under `decode`, one without a prefill leg "
        "all of it under `whole`. So their sums over all instances and legs count each request "
        "once, also one that has moved or whose engine has died. `banaserve_kvstore_up` is 1 "
        "while the store answers."
        f"\n\n{_table(('Metric', 'Type', 'Labels', 'Meaning', 'Where'), rows)}\n"
    )


# ---- configuration


def configuration_page() -> str:
    """Return the page of the balancer's file and of the profiles of modelled GPUs."""
    parts = [
        f"# Configuration\n\n{GENERATED} Options of `serve` are on the page of "
        "[commands](commands.md#banaserve-serve); `serve --config FILE` reads the same names from "
        "YAML.",
        "## The balancer's file\n\n`banaserve route --config FILE`, TOML or YAML. An unknown key "
        "is refused; the file is followed while the balancer serves.",
    ]
    _, components = msgspec.json.schema_components([BalancerSettings])
    parts += _types(components)
    parts.append("## Profiles of modelled GPUs\n\n`serve --pace NAME`, `simulate`; or a TOML file.")
    rows = [(f"`{name}`", profile.load(name).source) for name in sorted(profile.names())]
    parts.append(_table(("Name", "Where its times come from"), rows))
    return "\n\n".join(parts) + "\n"


# ---- types


def _types(components: Mapping[str, Any]) -> Iterator[str]:
    """Yield a section for each schema, with a table of its fields."""
    for name, schema in components.items():
        about = schema.get("description", "")
        first_line = about.strip().partition("\n")[0]
        yield f"### {name}\n\n{first_line}"
        words, needed = attribute_words(about), schema.get("required", ())
        rows = [
            (
                f"`{field}`",
                _schema_words(one),
                "needed" if field in needed else _default(one),
                words.get(field, ""),
            )
            for field, one in schema.get("properties", {}).items()
        ]
        if rows:
            yield _table(("Field", "Type", "Default", "Meaning"), rows)


def _default(schema: Mapping[str, Any]) -> str:
    found = schema.get("default")
    return "as below" if isinstance(found, dict) and found else f"`{found!r}`"


def attribute_words(docstring: str) -> dict[str, str]:
    """Return the meaning of each attribute that a Google-style docstring describes."""
    _, _, described = docstring.partition("Attributes:")
    found: dict[str, str] = {}
    name = ""
    for line in described.splitlines():
        if begun := re.match(r" {8}(\w+): (.*)", line):
            name = begun[1]
            found[name] = begun[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _schema_words(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_schema_words(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_schema_words(schema['items'])}" if schema["items"] else "list"
    more = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(more, dict) and more:
        return f"map to {_schema_words(more)}"
    return str(schema.get("type", "any"))


# ---- Markdown


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = (names, ["---"] * len(names), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
