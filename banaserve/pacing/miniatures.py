"""Miniatures: the small models that really run in place of a profile's model."""

from __future__ import annotations

from collections.abc import Callable

from banaserve.base import models
from banaserve.base.models import miniature
from banaserve.base.models.miniature import Miniature
from banaserve.orchestrator.control.costs.profile import Profile


def of(profile: Profile) -> Miniature:
    """Return the dimensions of the miniature of the profile's model."""
    shape = profile.model
    return Miniature.of(
        shape.num_layers, shape.num_heads, shape.num_kv_heads, profile.model.max_context_tokens
    )


def resolve(profile: Profile, say: Callable[[str], None]) -> models.ResolvedModel:
    """Return the miniature, and make it if it does not exist yet. Blocking.

    Its name shows that it is a miniature.

    Raises:
        UserError: The packaged model, whose tokenizer the miniature uses, cannot be obtained.
    """
    return miniature.resolve(of(profile), f"paced-{profile.name}", None, say)
