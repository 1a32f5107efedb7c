"""Names that a user gives: an unknown one is answered with the known ones, and the nearest."""

from __future__ import annotations

import pytest

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known


@pytest.mark.parametrize(
    ("given", "hint"),
    [("d1", "; did you mean d0?"), ("pre", "; did you mean prefill?"), ("zz", ""), ("x", "")],
)
def test_only_a_name_that_is_near_is_suggested(given: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        check_known("name", given, ("p0", "d0", "prefill"))
    assert str(refused.value) == f"unknown name: {given} (known: d0, p0, prefill){hint}"
