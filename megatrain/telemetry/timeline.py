"""The work of each stream over time: spans, their sums, and a trace for Perfetto.

Times are seconds from the start of the recording.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Seconds; a longer gap is idle time, a shorter one the launch of the next work.
SHORTEST_GAP_SECONDS = 50e-6

_PLACE = re.compile(r"\S*\(.*\)")  # the part of a name with the layer and the micro-batch


class Span(NamedTuple):
    """Work on a stream; `after`: names of the waits before it; `num_bytes`: moved, 0: unknown."""

    stream: str
    name: str
    start: float
    end: float
    after: tuple[str, ...] = ()
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Breakdown:
    """The parts of the time between the first and the last span, in seconds."""

    seconds: float
    busy: dict[str, float] = field(default_factory=dict)  # of each stream
    # of each stream, if known: over the bus, or through host memory
    num_bytes: dict[str, int] = field(default_factory=dict)
    # of each `(stream, kind of work)`; a kind is a name without numbers
    work: dict[tuple[str, str], float] = field(default_factory=dict)
    # of the main stream, by the name of the wait
    idle: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for plans and result files."""
        work = {f"{stream}: {kind}": seconds for (stream, kind), seconds in self.work.items()}
        lines = [f"{s:8.3f} s {s / self.seconds:6.1%}  {name}" for name, s in self.rows()]
        return vars(self) | {"work": work, "lines": lines}

    def rows(self) -> list[tuple[str, float]]:
        """Idle times and kinds of work with their seconds, largest first."""
        rows = [(f"idle: {why}", seconds) for why, seconds in self.idle.items()]
        rows += [(f"{stream}: {kind}", seconds) for (stream, kind), seconds in self.work.items()]
        return sorted(rows, key=lambda row: -row[1])


def breakdown(spans: Sequence[Span], main: str) -> Breakdown:
    """The parts of the time of these spans; idle times are those of the stream `main`."""
    if not spans:
        return Breakdown(0.0)
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    busy: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, int] = defaultdict(int)
    work: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        busy[span.stream] += span.seconds
        moved[span.stream] += span.num_bytes
        words = _PLACE.sub("", span.name).split()
        kind = " ".join(word for word in words if any(map(str.isalpha, word)))  # without numbers
        work[span.stream, kind] += span.seconds
    idle: defaultdict[str, float] = defaultdict(float)
    now = first
    for span in sorted((s for s in spans if s.stream == main), key=lambda s: s.start):
        gap = span.start - now
        if gap > SHORTEST_GAP_SECONDS:
            idle[span.after[-1] if span.after else "launch"] += gap
        now = max(now, span.end)
    if last > now:
        idle["end of step"] += last - now
    num_bytes = {stream: count for stream, count in moved.items() if count}
    return Breakdown(last - first, dict(busy), num_bytes, dict(work), dict(idle))


def critical_path(spans: Iterable[Span]) -> Counter[str]:
    """Seconds of each stream on the critical path, which add up to the end of the last span.

    The path is followed back from the last end: a span's predecessor ended when the span began, on
    the same stream if possible. `launches` are gaps between them: the caller launched late.
    """
    ends: defaultdict[int, dict[str, Span]] = defaultdict(dict)  # nanoseconds
    for span in spans:
        ends[round(span.end * 1e9)][span.stream] = span
    path, stream, now = Counter[str](), "", max(ends, default=0)
    for end in sorted(ends, reverse=True):
        if end > now:
            continue
        ended = ends[end]
        span = ended.get(stream) or max(ended.values(), key=lambda span: span.seconds)
        begin, stream = min(end, round(span.start * 1e9)), span.stream
        path["launches"] += now - end
        path[stream] += end - begin
        now = begin
    path["launches"] += now
    return Counter({stream: ns / 1e9 for stream, ns in path.items() if ns})


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans in the Trace Event Format, which Perfetto and chrome://tracing open."""
    ordered = list(spans)
    lanes = {stream: i for i, stream in enumerate(dict.fromkeys(s.stream for s in ordered))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": stream}}
        for stream, lane in lanes.items()
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": lanes[span.stream],
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"after": list(span.after), "bytes": span.num_bytes},
        }
        for span in ordered
    ]
    return {"traceEvents": names + events}


def read_trace(trace: Mapping[str, Any]) -> list[Span]:
    """The spans of a trace that `chrome_trace` made. Raises ValueError: it is something else."""
    try:
        events = trace["traceEvents"]
        lanes = {e["tid"]: str(e["args"]["name"]) for e in events if e["ph"] == "M"}
        return [
            Span(
                lanes[event["tid"]],
                str(event["name"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
                tuple(str(why) for why in event["args"]["after"]),
                int(event["args"].get("bytes", 0)),
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a timeline ({type(error).__name__}: {error})") from error


def window(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The spans between two times, counted from `start` and cut at both ends, bytes too."""
    cut = []
    for stream, name, first, last, after, num_bytes in spans:
        begins, ends = max(first, start), min(last, end)
        if begins < ends:
            part = num_bytes and round(num_bytes * (ends - begins) / (last - first))
            cut.append(Span(stream, name, begins - start, ends - start, after, part))
    return cut


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds in which both streams work; the spans of each are in order, one at a time."""
    total, i, j = 0.0, 0, 0
    while i < len(spans) and j < len(others):
        total += max(0.0, min(spans[i].end, others[j].end) - max(spans[i].start, others[j].start))
        if spans[i].end < others[j].end:
            i += 1
        else:
            j += 1
    return total


Recording = Callable[[], AbstractContextManager[list[Span]]]


class StepRecorder:
    """Records steps, and returns the spans of the last one, with updates of the one before it.

    recorder.start(); step(); recorder.start(); step(); spans = recorder.end()
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording  # `Engine.recording`
        self._open = ExitStack()
        self._spans: list[Span] | None = None
        self._origin = self._start = 0.0

    def start(self) -> None:
        """Call this before each step."""
        if self._spans is None:
            self._spans = self._open.enter_context(self._recording())
            self._origin = time.perf_counter()
        self._start = time.perf_counter() - self._origin

    def cancel(self) -> None:
        """Drop the recording of a failed step; errors of the engine are those of the step."""
        self._spans = None
        with suppress(Exception):
            self._open.close()

    def end(self) -> list[Span]:
        """The spans of the last step, which has ended; waits for the updates that it started."""
        end, spans = time.perf_counter() - self._origin, self._spans
        assert spans is not None
        self._spans = None
        self._open.close()
        return window(spans, self._start, end)
