"""GPU tests run in child processes: a lost CUDA context costs one test, not all that come after it.

After an illegal memory access every later CUDA call of that process fails. So tests marked `gpu` are run by child
processes of pytest, several at a time, because importing torch takes longer than most tests. A child ends after the
test that lost its context, or dies in it; a fresh child runs the tests that are left. The children's reports are shown
as if the tests had run in this process. With `-n` (pytest-xdist), `--pdb` or `--collect-only` there are no children.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest

EVENTS = "SELFSPEC_TEST_EVENTS"  # tells a child the file descriptor it reports to
NUM_CHILDREN = int(os.environ.get("GPU_TEST_PROCESSES", "4"))  # at a time; each holds a CUDA context
LIMIT = 100  # seconds of one test; a test that takes longer hangs, and its child is ended
GRACE = 20  # seconds that a child has for its end, once it has reported all: with a lost context that may hang
Reports = list[pytest.TestReport]


def pytest_configure(config: pytest.Config) -> None:
    events = os.environ.pop(EVENTS, None)  # popped: a pytest that a test starts is no child of ours
    if events is not None:
        config.pluginmanager.register(Child(config, int(events)))
    elif not (hasattr(config, "workerinput") or config.option.usepdb or config.option.collectonly):
        config.pluginmanager.register(Parent(config))


def lost_context(error: BaseException | None) -> str | None:
    """What an error says of the device, if it or what caused it is a device's error; None for any other."""
    torch = sys.modules.get("torch")
    while torch is not None and error is not None:
        if isinstance(error, torch.AcceleratorError):
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        error = error.__cause__ or error.__context__
    return None


def wait_for_device() -> None:
    """Raise what kernels that still run have done wrong, while the test that started them is known."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Child:
    """Sends every test's start, reports and end to the parent, and stops once the context is lost."""

    def __init__(self, config: pytest.Config, events: int) -> None:
        self.config = config
        os.set_inheritable(events, False)
        self.events = os.fdopen(events, "wb")

    def send(self, kind: str, what: Any) -> None:
        pickle.dump((kind, what), self.events)  # unlike JSON it keeps the tuples of reports
        self.events.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("start", nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            if not item.session.shouldstop:
                wait_for_device()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        report = yield
        report.lost = lost_context(call.excinfo.value) if call.excinfo else None
        if report.lost:
            item.session.shouldstop = report.lost
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.send("end", nodeid)

    def pytest_unconfigure(self) -> None:
        self.events.close()


class Parent:
    """Runs the tests marked `gpu` in children, after all others, and shows their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stopping = False
        self.losses: list[tuple[str, str]] = []  # (test, what it lost its context or process by), in order of time

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        collected = session.items
        apart = [one for one in collected if one.get_closest_marker("gpu") and not one.get_closest_marker("skip")]
        session.items = [one for one in collected if one not in apart]
        try:
            result = yield
            self.run(session, apart)
            return result
        finally:
            session.items = collected

    def run(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        groups = [{item.nodeid: item for item in items[i::NUM_CHILDREN]} for i in range(NUM_CHILDREN)]
        done: SimpleQueue[tuple[pytest.Item, Reports] | None] = SimpleQueue()
        with ThreadPoolExecutor(NUM_CHILDREN) as pool:
            jobs = [pool.submit(self.run_group, group, done) for group in groups if group]
            try:
                running = len(jobs)
                while running:
                    ended = done.get()
                    if ended is None:
                        running -= 1
                        continue
                    self.show(*ended)
                    if session.shouldfail or session.shouldstop:
                        raise session.Failed(session.shouldfail or session.shouldstop)
            finally:
                self.stopping = True
                for process in self.processes:
                    process.kill()  # does nothing to those that have ended
        for job in jobs:
            job.result()  # raises what went wrong in the thread

    def show(self, item: pytest.Item, reports: Reports) -> None:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            if report.lost:
                self.losses.append((item.nodeid, report.lost))
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def run_group(self, left: dict[str, pytest.Item], done: SimpleQueue[Any]) -> None:
        """Run tests in a child, and those it did not come to in a fresh one, until there is a report of each."""
        try:
            while left and not self.stopping:
                self.run_child(left, lambda nodeid, reports: done.put((left.pop(nodeid), reports)))
        finally:
            done.put(None)

    def run_child(self, left: dict[str, pytest.Item], done: Callable[[str, Reports], None]) -> None:
        started, reports, num_ended = None, Reports(), 0
        with tempfile.TemporaryFile() as log:
            process, events = self.start(list(left), log)
            for kind, what in events:
                if kind == "start":
                    started, reports = what, []
                elif kind == "report":
                    make = self.config.hook.pytest_report_from_serializable
                    reports.append(make(config=self.config, data=what))
                else:
                    started, num_ended = None, num_ended + 1
                    done(what, reports)
            code = exit_code(process)
            log.seek(0)
            said = log.read().decode(errors="replace")[-4000:]
        # It died in a test, or before it came to any: then all that it was given fail, or this would go on for ever.
        unfinished = [started] if started else [] if num_ended else list(left)
        for nodeid in unfinished:
            done(nodeid, [*(reports if started else ()), _died(left[nodeid], code, said)])

    def start(self, nodeids: list[str], log: Any) -> tuple[subprocess.Popen[bytes], Iterator[Any]]:
        option, root, ini = self.config.option, self.config.rootpath, self.config.inipath
        command = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", f"--rootdir={root}"]
        command += [f"--tb={option.tbstyle}", *(["-c", str(ini)] if ini else []), *nodeids]
        command += ["-o", f"faulthandler_timeout={LIMIT}", "-o", "faulthandler_exit_on_timeout=true"]
        read, write = os.pipe()
        process = subprocess.Popen(
            command, cwd=root, env={**os.environ, EVENTS: str(write)}, pass_fds=[write], stdout=log, stderr=log
        )
        os.close(write)
        self.processes.append(process)
        if self.stopping:  # the others were ended before this one was there to be ended with them
            process.kill()
        return process, _read(read)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.losses:
            terminalreporter.section("lost CUDA contexts and processes, the first one first")
            for nodeid, what in self.losses:
                terminalreporter.write_line(f"{nodeid}: {what}")
            terminalreporter.write_line("the tests after each of them ran in a fresh process")


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """That of a process that has nothing left to report; it is ended if it does not end."""
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(descriptor: int) -> Iterator[Any]:
    """A child's events until it ends; the last one may be cut off where it died."""
    with os.fdopen(descriptor, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)


def _died(item: pytest.Item, code: int, said: str) -> pytest.TestReport:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lost = f"the process ended with {how} before the test did"
    text = f"{lost}; its last words:\n{said}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", lost=lost)
