"""Report of a probe, as text, as JSON and as a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.cli.terminal.console import print_rows
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve_bench.loadgen.target import ServerUnderTest
from banaserve_bench.plan.probe.judging import HeldOutErrors
from banaserve_bench.plan.probe.measuring import ProbeSamples
from banaserve_bench.plan.probe.profile_file import profile_text


class ProbeReport(NamedTuple):
    """Fitted step times of a server, and their errors.

    Attributes:
        profile: Profile with these step times, which states source and error.
        samples: Samples of the rounds that are used.
        assumed: Parts of the profile that are assumed, each with the remedy.
    """

    server: ServerUnderTest
    profile: Profile
    errors: Sequence[HeldOutErrors]
    samples: ProbeSamples
    num_rounds: int
    assumed: Sequence[str]

    def show(self) -> None:
        prefill, decode = self.profile.prefill, self.profile.decode_small
        print(f"{self.server.model} at {self.server.url}: {self.profile.source}")
        print(
            f"prefill: {1e3 * prefill.fixed_s:.4g} ms + {1e6 * prefill.token_s:.4g} us a token + "
            f"{1e9 * prefill.pair_s:.4g} ns a pair of tokens (TTFT of a prompt alone)"
        )
        print(
            f"decode: {1e3 * decode.fixed_s:.4g} ms + {1e9 * decode.context_token_s:.4g} ns a "
            f"token of context + {1e6 * decode.request_s:.4g} us a request"
        )
        print(f"{self._rounds}; equal probes differ by {self.samples.spread:.0%}")
        print("\nerrors on probes that were not fitted:")
        print_rows([("probes", "figure", "number", "mean error", "worst"), *self._rows()], {})
        print("\nassumed: " + "; ".join(self.assumed))

    def as_json(self) -> dict[str, Any]:
        return {
            "server": {"url": self.server.url, "model": self.server.model},
            "source": self.profile.source,
            "prefill": asdict(self.profile.prefill),
            "decode": asdict(self.profile.decode_small),
            "rounds": self.num_rounds,
            "used_rounds": len(self.samples.loads),
            "spread": self.samples.spread,
            "errors": [
                {
                    "kind": one.kind,
                    "figure": one.figure,
                    "mean": one.mean,
                    "worst": one.worst,
                    "errors": one.errors,
                }
                for one in self.errors
            ],
            "assumed": self.assumed,
        }

    def save(self, path: Path) -> None:
        """Write the profile.

        Raises:
            UserError: The step times are too wrong for a profile, or the file cannot be written.
        """
        error = self.profile.error
        assert error is not None
        if max(error.ttft, error.tpot, error.latency) > 1:
            raise UserError(
                f"{path} is not written: the step times are wrong by more than 100%: probe the "
                "server while it and its machine do nothing else"
            )
        about = [
            f"{self.server.model}: step times of a running server, by banaserve plan probe.",
            "prefill is the time to first token of a prompt alone, with the request's way.",
            "Errors on probes that were not fitted:",
            *(
                f"  {one.kind} {one.figure}: mean {one.mean:.1%}, worst {one.worst:.1%}"
                for one in self.errors
            ),
            *(f"Assumed: {one}" for one in self.assumed),
        ]
        try:
            path.write_text(profile_text(self.profile, about))
        except OSError as failure:
            raise UserError(f"cannot write {path}: {failure.strerror}") from failure

    @property
    def _rounds(self) -> str:
        used = len(self.samples.loads)
        if used == self.num_rounds:
            return f"{used} rounds"
        return f"{used} of {self.num_rounds} rounds (something slowed the others)"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for one in self.errors:
            numbers = (str(len(one.errors)), f"{one.mean:.1%}", f"{one.worst:.1%}")
            yield (one.kind, one.figure, *numbers)
