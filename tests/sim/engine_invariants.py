"""What must hold in a simulated engine between two steps."""

from __future__ import annotations

from banaserve.sim.instances.batch import SimBatch


def check_engine(engine: SimBatch) -> None:
    """Assert that counts and tables agree.

    KV that is kept for other engines is in no table, so the used tokens may be more.
    """
    decoding = engine.decoding.values()
    assert engine._lengths == sorted(one.kv_tokens - one.joined_step for one in decoding)
    held = sum(engine._lengths) + len(engine._lengths) * engine._steps_done
    assert held == engine._context
    held += sum(one.kv_tokens for one in [*engine.loading.values(), *engine._joining])
    held += sum(one.computed + one.to_compute for one in engine.prefilling)
    assert 0 <= held <= engine.used_tokens
    tables = [engine.waiting, engine.prefilling, engine.loading.values(), engine._joining]
    ids = [one.id for table in (*tables, decoding) for one in table]
    assert len(ids) == len(set(ids))
