"""``banaserve serve --pace``: the model that really runs, vLLM's options, text of the banner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from banaserve.base import models
from banaserve.base.config.serve_config import MINIATURE, ServeConfig
from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.devices import device_of
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.pacing import miniatures
from banaserve.sim.instances.batch import EngineLimits

BLOCK_TOKENS = 32
"""Smallest block size of vLLM's attention on CPU, in tokens; modelled memory has blocks of 16."""


def profile_of(config: ServeConfig) -> Profile | None:
    """Return the modelled GPU and model of the first instance; None in real time.

    Raises:
        UserError: There is no such profile, a key of it is missing or not valid, or the profiles
            are of several models.
    """
    if config.paces:
        usual = profiles.load(config.paces[0])
        for other in config.paces[1:]:
            device_of(other, usual)
        return usual
    if config.model == MINIATURE:
        raise UserError(f"--model {MINIATURE} needs --pace PROFILE: what it is a miniature of")
    return None


def _devices(config: ServeConfig) -> dict[str, str]:
    """Return the profiles of instances whose profile differs from the first, by instance id."""
    ids = [str(name) for name, _ in config.instances()]
    usual, *_ = config.paces
    return {
        name: _absolute(own) for name, own in zip(ids, config.paces, strict=False) if own != usual
    }


def _absolute(name: str) -> str:
    """Return a profile's file as an absolute path: engines may have another working directory."""
    return str(Path(name).resolve()) if name.endswith(".toml") else name


def resolve(config: ServeConfig, say: Callable[[str], None]) -> models.ResolvedModel:
    """Return the model that really runs. Blocking.

    Raises:
        UserError: The model cannot be obtained.
    """
    profile = profile_of(config)
    if profile is None or config.model != MINIATURE:
        return models.resolve(config.model, None, say)
    return miniatures.resolve(profile, say)


def vllm_options(config: ServeConfig, logs: Path) -> list[str]:
    """Return vLLM's options for paced engines; the user's options follow them.

    A miniature gets as many KV tokens as the modelled GPU (of several different ones, the smallest)
    holds of the modelled model, and the limits of a simulated engine.

    Raises:
        UserError: The user gives a miniature another number type.
    """
    from banaserve.pacing.config import PacingSettings, pacing_options

    profile = profile_of(config)
    if profile is None:
        return []
    if config.model == MINIATURE:
        _check_dtype(config.vllm_argv)
    usual, *others = config.paces
    settings = PacingSettings(_absolute(usual), str(logs), config.dilate, _devices(config))
    options = pacing_options(settings)
    if config.model == MINIATURE:
        # Engines start with equal options: all have the KV memory of the smallest.
        all_of_them = [profile, *(device_of(one, profile) for one in others)]
        num_blocks = min(one.memory.kv_tokens for one in all_of_them) // BLOCK_TOKENS
        kv_bytes = num_blocks * BLOCK_TOKENS * miniatures.of(profile).token_bytes
        options += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS)]
        options += ["--kv-cache-memory-bytes", str(kv_bytes)]
        limits = EngineLimits()
        options += ["--max-num-batched-tokens", str(limits.step_tokens)]
        options += ["--max-num-seqs", str(limits.max_requests)]
    return options


def _check_dtype(vllm_argv: tuple[str, ...]) -> None:
    words = " ".join(vllm_argv).replace("=", " ").split()
    for option, value in itertools.pairwise(words):
        if option == "--dtype" and value not in ("float32", "float"):
            raise UserError(
                f"--dtype {value}: a miniature computes in float32, for which its KV memory is "
                "sized: leave it out"
            )


def words(config: ServeConfig) -> str:
    """Return the banner's text on modelled time; empty in real time."""
    profile = profile_of(config)
    if profile is None:
        return ""
    told = f"MODELLED, not measured: {profile.name} ({profile.source})"
    for name, own in _devices(config).items():
        told += f", {name} {device_of(own, profile).name}"
    return f"{told}; 1 s of it takes {config.dilate:g} s" if config.dilate != 1 else told


def begin(config: ServeConfig, world_size: int, on_cpu: bool, logs: Path) -> None:
    """Report modelled time on the metrics page; do nothing in real time.

    Args:
        world_size: Number of workers of an instance.

    Raises:
        UserError: These engines cannot be paced.
    """
    profile = profile_of(config)
    if profile is None:
        return
    if not on_cpu or world_size != 1:
        raise UserError(
            "--pace models one GPU an instance on a CPU: no real GPU, and no -tp or -pp"
        )
    from banaserve.pacing import metrics

    metrics.register(profile, config.dilate, logs)
