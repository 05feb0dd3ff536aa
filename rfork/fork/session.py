"""One fork from end to end: capture, plan, pull, verify, or fall back; then be a seed.

Runs on the target. The order of design section 4, in one place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from torch import nn

from rfork.control.client import PlannerClient
from rfork.errors import (
    DeadlinePassed,
    ForkFailed,
    NetworkError,
    NoSource,
    NothingLeft,
    PlannerRefused,
    PlannerUnreachable,
    RforkError,
    UnsupportedTensor,
)
from rfork.fork.cold import Offers, Rebound
from rfork.fork.explain import explain_mismatch
from rfork.fork.fallback import Derived, Fallback, fall_back
from rfork.fork.opening import Opening
from rfork.fork.progress import Meter, OnProgress, Reporter
from rfork.fork.puller import Pulled, Puller
from rfork.fork.report import ForkReport, Outcome, Stopwatch
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.peer.base import Dial
from rfork.peer.server import PeerServer, ServePeer
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.base import Transport
from rfork.wire import ForkFinish, ForkRequest, Plan, Share, SourceFault

log = logger(__name__)

NOTHING_PULLED = Pulled(0, 0, 0, ())


class ForkSession:
    """Fills one module's tensors. Call `run` once.

    `fallbacks`, best first, are what this instance could read by itself. The planner is offered them
    (unless `settings.cold_start` is ``own``), and may elect it to read one of them for all that wait;
    they are tried in order once nothing else works. Without a planner they are all there is.
    """

    def __init__(
        self,
        module: nn.Module,
        identity: Identity,
        settings: Settings,
        transports: Sequence[Transport],
        *,
        planner: PlannerClient | None,
        dial: Dial,
        fallbacks: Sequence[Fallback] = (),
        on_progress: OnProgress | None = None,
        exclude: Sequence[str] = (),
        serve_peer: ServePeer = PeerServer,
    ) -> None:
        self._module = module
        self._identity = identity
        self._settings = settings
        self._transports = list(transports)
        self._planner = planner
        self._dial = dial
        self._fallbacks = fallbacks
        self._on_progress = on_progress
        self._exclude = exclude
        self._serve_peer = serve_peer
        self._fork_id = uuid4().hex
        self._watch = Stopwatch()
        self._meter = Meter()
        self._deadline = time.monotonic() + settings.deadline_s

    def run(self) -> ForkReport:
        """Fill the module; returns what was done, with the seed that this process now is.

        Raises NothingLeft when neither a source nor a fallback worked: the module's content is then
        undefined. On any exception the giving side is closed and the planner told.
        """
        with self._watch.phase("capture"):
            image = capture(self._module, exclude=self._exclude)
            if not image.layout.image_bytes:
                raise UnsupportedTensor(
                    "(all)", "the module has no tensor with bytes, so there is nothing to fork"
                )
            derived = Derived(self._module, image) if self._fallbacks else None
            image.advise_huge_pages()
            log.debug("captured", model=self._identity.model, layout=image.layout.layout_id)
        board = ChunkBoard(image.layout.chunks)
        seed = Seed(
            image,
            self._identity,
            self._settings,
            self._transports,
            board=board,
            planner=self._planner,
            serve_peer=self._serve_peer,
        ).start()
        try:
            return self._fill(image, board, seed, derived)
        except BaseException as error:
            ended = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            reasons = error.reasons if isinstance(error, NothingLeft) else ()
            try:
                self._finish(ended, None, reasons or (error,))
            finally:
                seed.close()
            raise

    def _fill(self, image: Image, board: ChunkBoard, seed: Seed, derived: Derived | None) -> ForkReport:
        reasons: list[RforkError] = []
        pulled = NOTHING_PULLED
        name: str | None = None
        outcome: Outcome = "forked"
        try:
            pulled = self._pull(image, board, seed, derived, reasons)
        except Rebound as loaded:
            outcome, name = "fallback", loaded.name
        except (ForkFailed, NetworkError, DeadlinePassed) as error:
            reasons.append(error)
            # Whoever reads from this relay must not see what the fallback writes over it.
            seed.fence()
            with self._watch.phase("fallback"):
                outcome, name = "fallback", fall_back(self._module, derived, self._fallbacks, reasons)
        seed.storage = ()
        if outcome == "forked":
            seed.serve()
        elif image.same_memory(capture(self._module, exclude=self._exclude)):
            with self._watch.phase("digest"):
                seed.reseal()
        else:
            seed.fence()
            log.warning("not a seed: new tensors were put in the module's place", by=name)
        report = self._report(image, board, seed, pulled, outcome, name, reasons)
        self._finish(outcome, report, reasons)
        log.info("fork done", report=report.line())
        return report

    def _report(
        self,
        image: Image,
        board: ChunkBoard,
        seed: Seed,
        pulled: Pulled,
        outcome: Outcome,
        fallback: str | None,
        reasons: Sequence[RforkError],
    ) -> ForkReport:
        manifest, layout = seed.manifest, image.layout
        transfer_s = self._watch.phases.get("transfer", 0.0)
        forked = outcome == "forked"
        return ForkReport(
            fork_id=self._fork_id,
            instance_id=self._identity.instance_id,
            model=self._identity.model,
            outcome=outcome,
            layout_id=layout.layout_id,
            weights_id=manifest.weights_id if manifest is not None else "",
            image_bytes=layout.image_bytes,
            chunks=len(layout.chunks),
            chunks_verified=len(board) if self._settings.verify or not forked else 0,
            seconds=self._watch.seconds,
            phases={phase: round(seconds, 4) for phase, seconds in self._watch.phases.items()},
            bytes_read=pulled.bytes_read,
            bytes_repeated=pulled.bytes_repeated,
            replans=pulled.replans,
            sources=pulled.sources,
            efficiency=self._meter.efficiency(layout.image_bytes, transfer_s) if forked else None,
            fallback=fallback,
            reasons=tuple(f"{error.kind}: {error}" for error in reasons),
            seed=seed,
        )

    def _pull(
        self,
        image: Image,
        board: ChunkBoard,
        seed: Seed,
        derived: Derived | None,
        reasons: list[RforkError],
    ) -> Pulled:
        planner = self._planner
        if planner is None:
            raise NoSource("no planner is set", hint="set RFORK_PLANNER or pass planner=")

        compared: set[str] = set()

        def ask(faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
            request = ForkRequest(
                fork_id=self._fork_id, instance=seed.report(), faults=faults, current=current
            )
            with self._watch.phase("plan"):
                plan = planner.ask(request)
            other, reads = plan.other_layout, bool(plan.routes or plan.storage)
            if other is not None and (not reads or other.source_id not in compared):
                difference = explain_mismatch(other, image.layout, self._dial, self._settings.stall_s)
                if not reads:
                    raise difference
                compared.add(other.source_id)
                log.warning("read from storage, since no seed fits", detail=str(difference))
            return plan

        shared = derived is not None and self._settings.cold_start == "share"
        ways = self._fallbacks if shared else ()
        with self._watch.phase("offer"):
            opened = Offers(ways, self._module, image, derived, seed, self._exclude)
        with opened as offers:
            seed.storage = offers.told
            opening = Opening(
                image,
                {transport.name: transport for transport in self._transports},
                self._dial,
                self._settings,
                offers,
                self._identity.instance_id,
                self._deadline,
            )
            puller = Puller(
                image,
                board,
                self._settings,
                identity=(self._identity.instance_id, self._settings.host),
                opening=opening,
                replan=ask,
                load_whole=offers.load_whole,
                giving=seed,
                deadline=self._deadline,
            )
            reporter = Reporter(self._fork_id, planner, puller, board, self._on_progress)
            self._meter = reporter.meter
            try:
                with reporter.running(), self._watch.phase("transfer"):
                    return puller.run()
            finally:
                reasons.extend(puller.reasons)

    def _finish(self, outcome: str, report: ForkReport | None, reasons: Sequence[BaseException]) -> None:
        """Tell the planner how it ended, which also gives the leases back. Best effort: leases expire."""
        if self._planner is None:
            return
        finish = ForkFinish.model_validate(
            {
                "outcome": outcome,
                "seconds": self._watch.seconds,
                "bytes_read": report.bytes_read if report is not None else 0,
                "sources": {share.source_id: share.verified_bytes for share in report.sources}
                if report
                else {},
                "fallback": report.fallback if report is not None else None,
                "efficiency": report.efficiency if report is not None else None,
                "reasons": [f"{type(error).__name__}: {error}" for error in reasons],
            }
        )
        try:
            self._planner.finish(self._fork_id, finish)
        except (PlannerUnreachable, PlannerRefused) as error:
            log.debug("finish not told", detail=str(error))
