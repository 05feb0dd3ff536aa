"""One fork from end to end: capture, plan, pull, verify, or fall back; then be a seed.

Runs on the target. The order of design section 4, in one place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from rfork.fork.explain import explain_mismatch
from rfork.fork.fallback import Derived, Fallback, fall_back
from rfork.fork.feed import Feed, FeedListener
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
from rfork.wire import ForkFinish, ForkProgress, ForkRequest, Plan, Route, SourceFault

log = logger(__name__)

PROGRESS_S = 1.0
NOTHING_PULLED = Pulled(0, 0, 0, ())

OnProgress = Callable[[ForkProgress, int], None]
"""Told the progress about four times a second, and the image's size in bytes."""


class ForkSession:
    """Fills one module's tensors. Call `run` once.

    `fallbacks` are tried in order once no source works. Without a planner they are all there is.
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
        try:
            pulled = self._pull(image, board, seed, reasons)
        except (ForkFailed, NetworkError, DeadlinePassed) as error:
            reasons.append(error)
            # Whoever reads from this relay must not see what the fallback writes over it.
            seed.fence()
            with self._watch.phase("fallback"):
                name: str | None = fall_back(self._module, derived, self._fallbacks, reasons)
            if image.same_memory(capture(self._module, exclude=self._exclude)):
                with self._watch.phase("digest"):
                    seed.reseal()
            else:
                log.warning("not a seed: the fallback put new tensors in the module's place", fallback=name)
            outcome: Outcome = "fallback"
        else:
            name, outcome = None, "forked"
            seed.serve()
        manifest = seed.manifest
        report = ForkReport(
            fork_id=self._fork_id,
            instance_id=self._identity.instance_id,
            model=self._identity.model,
            outcome=outcome,
            layout_id=image.layout.layout_id,
            weights_id=manifest.weights_id if manifest is not None else "",
            image_bytes=image.layout.image_bytes,
            chunks=len(image.layout.chunks),
            chunks_verified=len(board) if self._settings.verify or outcome == "fallback" else 0,
            seconds=self._watch.seconds,
            phases={phase: round(seconds, 4) for phase, seconds in self._watch.phases.items()},
            bytes_read=pulled.bytes_read,
            bytes_repeated=pulled.bytes_repeated,
            replans=pulled.replans,
            sources=pulled.sources,
            fallback=name,
            reasons=tuple(f"{error.kind}: {error}" for error in reasons),
            seed=seed,
        )
        self._finish(outcome, report, reasons)
        log.info("fork done", report=report.line())
        return report

    def _pull(self, image: Image, board: ChunkBoard, seed: Seed, reasons: list[RforkError]) -> Pulled:
        planner = self._planner
        if planner is None:
            raise NoSource("no planner is set", hint="set RFORK_PLANNER or pass planner=")

        def ask(faults: tuple[SourceFault, ...]) -> Plan:
            request = ForkRequest(fork_id=self._fork_id, instance=seed.report(), faults=faults)
            with self._watch.phase("plan"):
                plan = planner.ask(request)
            if plan.other_layout is not None and not plan.routes:
                raise explain_mismatch(plan.other_layout, image.layout, self._dial, self._settings.stall_s)
            return plan

        transports = {transport.name: transport for transport in self._transports}

        def open_feed(route: Route, listener: FeedListener) -> Feed:
            return Feed(route, image, transports, self._dial, self._settings, listener, self._deadline)

        puller = Puller(
            image,
            board,
            self._settings,
            open_feed=open_feed,
            replan=ask,
            learn=seed.learn,
            deadline=self._deadline,
        )
        try:
            with self._reporting(planner, puller, board, image), self._watch.phase("transfer"):
                return puller.run()
        finally:
            reasons.extend(puller.reasons)

    @contextlib.contextmanager
    def _reporting(
        self, planner: PlannerClient, puller: Puller, board: ChunkBoard, image: Image
    ) -> Iterator[None]:
        """Tell the planner and the caller about progress, and renew leases, while the block runs."""
        done = threading.Event()
        reporter = threading.Thread(
            target=self._report_progress,
            args=(planner, puller, board, image, done),
            name="rfork-progress",
            daemon=True,
        )
        reporter.start()
        try:
            yield
        finally:
            done.set()
            # A planner that does not answer must not hold up a fork that is done.
            reporter.join(PROGRESS_S)

    def _report_progress(
        self, planner: PlannerClient, puller: Puller, board: ChunkBoard, image: Image, done: threading.Event
    ) -> None:
        began = time.monotonic()
        told_at = began
        while True:
            last = done.wait(PROGRESS_S / 4)
            now = time.monotonic()
            progress = ForkProgress(
                verified=board.verified,
                bytes_read=puller.bytes_read,
                bytes_per_s=puller.bytes_read / max(now - began, 1e-9),
                sources={share.source_id: share.verified_bytes for share in puller.shares},
            )
            self._show_progress(progress, image.layout.image_bytes)
            if last:
                return
            if now - told_at < PROGRESS_S:
                continue
            told_at = now
            try:
                puller.renew(planner.progress(self._fork_id, progress).leases)
            except PlannerRefused as error:
                if error.problem == "unknown-fork":
                    puller.plan_again()
                else:
                    log.warning("progress refused, so leases will run out", detail=str(error))
            except PlannerUnreachable as error:
                log.debug("progress not told", detail=str(error))

    def _show_progress(self, progress: ForkProgress, image_bytes: int) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress, image_bytes)
        except Exception:  # what shows the progress may fail; this thread also renews the leases
            log.exception("progress not shown, and not shown again")
            self._on_progress = None

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
                "reasons": [f"{type(error).__name__}: {error}" for error in reasons],
            }
        )
        try:
            self._planner.finish(self._fork_id, finish)
        except (PlannerUnreachable, PlannerRefused) as error:
            log.debug("finish not told", detail=str(error))
