"""Load of a cluster, estimated from the metrics of its workers: the same in the live system and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd.elasticity.load import ClusterLoad, RequestWork, WorkerSample
from epd.profiles.cost import StageCost
from epd.routing import Stage


@dataclass(frozen=True, slots=True)
class EstimatorConfig:
    """horizon_s: how far ahead utilisation is predicted. memory_s: after which what was seen has lost most
    of its weight. window_s: of arrivals that `recent` keeps."""

    horizon_s: float = 30.0
    memory_s: float = 20.0
    window_s: float = 600.0


class LoadEstimator:
    """Call `arrived` for every request, `finished` after every answer, `observe` every second or two."""

    def __init__(
        self, config: EstimatorConfig | None = None, costs: Mapping[Stage, StageCost] | None = None
    ) -> None:
        """costs: what is known beforehand of a round, by units; measurements take over as they come."""
        self.config = config or EstimatorConfig()
        self._costs = dict(costs or {})

    def arrived(self, now_s: float, work: RequestWork) -> None:
        """A request has come and was not refused."""
        raise NotImplementedError

    def finished(self, now_s: float, num_output_tokens: int) -> None:
        """An answer is complete."""
        raise NotImplementedError

    def observe(self, now_s: float, workers: Sequence[WorkerSample], *, num_waiting: int = 0) -> ClusterLoad:
        """The load now. workers: all that live. num_waiting: requests that no worker has taken yet.

        A worker whose totals have shrunk has been started anew.
        """
        raise NotImplementedError

    def recent(self, now_s: float) -> tuple[tuple[float, RequestWork], ...]:
        """Arrivals of the last window_s: (when, what), oldest first, the latest 10,000 at most."""
        raise NotImplementedError
