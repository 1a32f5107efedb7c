"""Miniatures: the small models that really run in the place of a profile's model."""

from __future__ import annotations

from collections.abc import Callable

from banaserve import models
from banaserve.costs.profile import Profile
from banaserve.models import miniature
from banaserve.models.miniature import Miniature


def of(profile: Profile) -> Miniature:
    """The dimensions of the miniature of the profile's model."""
    shape = profile.shape
    return Miniature.of(
        shape.num_layers, shape.num_heads, shape.num_kv_heads, profile.model.max_context_tokens
    )


def resolve(profile: Profile, say: Callable[[str], None]) -> models.ResolvedModel:
    """The miniature, made where that has not been done; its name says that it is one. Blocking.

    Raises:
        UserError: The packaged model, whose tokenizer it takes, cannot be had.
    """
    return miniature.resolve(of(profile), f"paced-{profile.name}", None, say)
