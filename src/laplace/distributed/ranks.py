"""Exchange values between the ranks of a process group so that an error of one is an error of all, and nothing hangs.

Every exchange begins with an all-gather of small reports, a value or an error from each rank. So a rank that fails
still arrives where the others wait for it, and tells them why. Tensors follow only if nobody has failed.

Some work needs the others at times that they do not know: a layer whose pieces they hold, a factor that one of them
keeps. Such a rank asks (`Ranks.ask`), and all others take part wherever they wait, at an exchange or while they ask for
something themselves. So ranks need not run in step, and one that has no more data serves the others until they are
done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from laplace.distributed.buckets import add_up, agreed
from laplace.distributed.reduce import Reduce
from laplace.errors import LaplaceError, RankError, notes_of, numbered

Value = TypeVar("Value")
Service = Callable[[Any, list[Any]], Any]  # of a key, and what each rank asked

SERVICES: dict[str, Service] = {}  # that every rank has, whatever it does
_open: ContextVar[Ranks | None] = ContextVar("open", default=None)  # the ranks that make a call together just now


def ranks_of(group: distributed.ProcessGroup) -> Ranks:
    """Return the ranks of a group: those that make a call together just now, if they are this group's."""
    ranks = _open.get()
    return ranks if ranks is not None and ranks.group is group else Ranks(group)


@dataclass(frozen=True)
class _Report:
    """Says how the work of one rank ended, or what it asks of all ranks before it can go on."""

    calls: tuple[str, ...]  # in which the rank is, the outermost first
    value: Any = None
    error: str | None = None
    final: bool = False  # whether the rank leaves the call with its error, as after Ctrl-C
    asked: tuple[str, Any, Any] | None = None  # the service, what of it, and what it should know
    work: str = ""  # where in our code the rank is: all do the same work in the same order


class Ranks(Reduce):
    """Is one of the processes of a group.

    Args:
        group: a process group of torch.distributed, in which this process is.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._interrupted = False  # Ctrl-C came during an exchange, and nobody knows yet
        self._over = False  # whether all ranks know that the call has failed, or that it is done: nobody waits
        self._final = False  # whether a rank has left the call for good, so that the others cannot go on without it
        self._why = ""
        self._calls: tuple[str, ...] = ()
        self._sessions = 0  # that are open, one within the other
        self.services = dict(SERVICES)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Begin a call that all ranks make. If one raises an error before its session, all raise it."""
        with self._within(name):
            try:
                yield
            except BaseException as error:
                if not self._over and not self._sessions:  # an open session will tell
                    self._fail(error)
                raise

    @contextmanager
    def session(self, name: str = "") -> Iterator[None]:
        with self._within(name):
            if not self._sessions:
                self._over = self._final = False
            services = self.services
            self.services, self._sessions = dict(services), self._sessions + 1
            try:
                try:
                    yield
                    if self._interrupted:
                        raise KeyboardInterrupt
                except BaseException as error:
                    if not self._over:
                        self._fail(error)
                    raise
                self._exchanged(_Report(self._calls, work="the end"))
            finally:
                self.services, self._sessions = services, self._sessions - 1  # others hold the sums of what has asked
            if not self._sessions:
                self._over, self._why = True, "the call that all ranks made together has ended"
            if self._interrupted:  # during that last exchange
                raise KeyboardInterrupt

    @contextmanager
    def attempt(self) -> Iterator[None]:
        self.agree(lambda: None)  # whoever has failed before is not in here
        try:
            with self.session():
                yield
        except Exception:
            self._over = self._final  # all ranks know of it, and all catch it
            raise

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        """Say with every report in which call this rank is."""
        outer = self._calls
        if not outer and not self._sessions:
            self._over = self._final = self._interrupted = False
        self._calls = (*outer, name) if name else outer
        token = _open.set(self)
        try:
            yield
        finally:
            self._calls = outer
            _open.reset(token)

    def agree(self, work: Callable[[], Value]) -> list[Value]:
        try:
            if self._interrupted:
                raise KeyboardInterrupt
            value = work()
        except BaseException as error:
            if not self._over:
                self._fail(error)
            raise
        return [report.value for report in self._exchanged(_Report(self._calls, value, work=_place(work)))]

    def _exchanged(self, own: _Report) -> list[_Report]:
        """Return the reports of all ranks, once none of them asks for a service any more."""
        while True:
            self._require_going()
            reports = self._gather(own)
            self._raise_errors(reports)
            if not self._served(reports):
                self._require_same_work(reports)
                return reports

    def ask(self, service: str, key: Any, detail: Any = None) -> Any:
        """Ask all ranks to do a service together, and return what it gave this rank.

        Every rank must have the service. Its argument is what each rank asked of this key, by rank; None of a rank that
        waits or asks for something else.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._require_going()
        reports = self._gather(_Report(self._calls, asked=(service, key, detail)))
        self._raise_errors(reports)
        return self._served(reports)[service, key]

    def _require_going(self) -> None:
        """Raise again what ended the session, if somebody has caught it: nobody else waits any more."""
        if self._over:
            raise RankError(self._why)

    def _served(self, reports: list[_Report]) -> dict[tuple[str, Any], Any]:
        """Do all services that were asked for, in the same order on all ranks."""
        asked = [(None, None) if report.asked is None else report.asked[:2] for report in reports]
        found = {}
        for service, key in dict.fromkeys(pair for pair in asked if pair[0] is not None):
            details = [
                report.asked[2] if report.asked is not None and pair == (service, key) else None
                for report, pair in zip(reports, asked, strict=True)
            ]
            with self._undisturbed(), self._connected():
                found[service, key] = self.services[service](key, details)
        return found

    def share(self, source: int, value: Value) -> Value:
        return self.agree(lambda: value if self.rank == source else None)[source]  # type: ignore[return-value]

    def total(self, sums: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        forms = self.agree(lambda: {key: (tuple(t.shape), t.dtype) for key, t in sums.items()})
        shapes = agreed(forms)
        with self._undisturbed(), self._connected():
            return add_up(sums, shapes, device, self.device, self.group)

    @property
    def device(self) -> torch.device | None:
        """Return the device that the group's tensors must be on, or None if any will do."""
        backend = distributed.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None

    def _gather(self, report: _Report) -> list[_Report]:
        reports: list[Any] = [None] * self.size
        with self._undisturbed(), self._connected():
            distributed.all_gather_object(reports, report, self.group)
        return reports

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed. An error about data or the network is raised with its number."""
        self._over = True
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        said = self._why = "; ".join([said.rstrip("."), *notes_of(error)])
        reports = self._gather(_Report(self._calls, error=said, final=not isinstance(error, Exception)))
        self._final = any(report.final or report.calls != self._calls for report in reports)
        told = numbered(error, f"rank {self.rank}") if isinstance(error, LaplaceError) else error
        if told is not error:
            raise told from error.__cause__

    def _raise_errors(self, reports: list[_Report]) -> None:
        failed = {rank: report.error for rank, report in enumerate(reports) if report.error is not None}
        if not failed:
            self._require_same_call(reports)
            return
        self._over = True
        self._final = any(report.final or report.calls != self._calls for report in reports)
        first = min(failed)
        more = f" ({len(failed)} of {self.size} ranks failed.)" if len(failed) > 1 else ""
        end = "" if failed[first].endswith(".)") else "."
        self._why = (
            f"rank {first} failed, so that rank {self.rank} cannot go on: {failed[first].rstrip('.')}{end}{more} The "
            "posterior is as it was before the call, on every rank."
        )
        raise RankError(self._why)

    def _require_same_call(self, reports: list[_Report]) -> None:
        """Refuse ranks of which one fits and another predicts: what they exchange would mean different things."""
        calls = [" within ".join(reversed(report.calls)) for report in reports]
        if len(set(calls)) > 1:
            self._over = self._final = True
            told = ", ".join(f"rank {rank} is in {call or 'no call'}" for rank, call in enumerate(calls))
            self._why = (
                f"the ranks make different calls: {told}. All ranks of a group must make the same calls with group= in "
                "the same order; has one of them caught an error and gone on?"
            )
            raise RankError(self._why)

    def _require_same_work(self, reports: list[_Report]) -> None:
        """Refuse ranks that are at different places of a call, as in a search with random numbers of its own."""
        if len({report.work for report in reports}) > 1:
            self._over = self._final = True
            self._why = (
                f"the ranks do different work in {self._calls[-1] if self._calls else 'this call'}: one of them has "
                "taken another way through it. Give all ranks the same options, and methods, losses and other objects "
                "of your own that do the same on each."
            )
            raise RankError(self._why)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Turn a broken connection into an error that says so."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            self._over = self._final = True
            self._why = (
                f"rank {self.rank} of {self.size} lost the others: one of them was killed, took longer than the "
                "group's timeout, or does not make this call, which all ranks must (no `if rank == 0:`). Start the job "
                "again; with fit(checkpoint=...) it goes on from its last file. For shards that take longer, "
                "init_process_group(timeout=timedelta(...)). torch.distributed says: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            raise RankError(self._why) from error

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Make Ctrl-C wait for the end of an exchange: a rank that leaves in its midst leaves the others hanging."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def remember(number: int, frame: FrameType | None) -> None:
            self._interrupted = True

        before = signal.signal(signal.SIGINT, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _place(work: Callable[[], Any]) -> str:
    """Return where in the code a function was written."""
    code = getattr(work, "__code__", None)
    return type(work).__qualname__ if code is None else f"{work.__module__}, line {code.co_firstlineno}"
