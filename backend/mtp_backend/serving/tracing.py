"""Spans of requests for OpenTelemetry: how long each waited, and what its steps went into.

A span has names and numbers alone: no text, no token ids, no message of an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mtp_backend.engine.counters import EngineTotals
from mtp_backend.engine.sequence import Sequence
from mtp_backend.serving.messages import Stepped
from mtp_backend.serving.request_times import RequestClock, Work

FLUSH_MILLISECONDS = 2000
ENDED = ("stop", "length")


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to a collector by OTLP over HTTP; OTEL_EXPORTER_OTLP_… set headers, certificates and the timeout."""
    return OTLPSpanExporter(endpoint)


class Tracing:
    """Makes the spans of requests that have come to an end, from a thread of its own.

    Args:
        exporter: where they go.
        totals: the engine's.
        clock: seconds, monotonic: the one of the requests' times.
    """

    def __init__(self, exporter: SpanExporter, totals: EngineTotals, clock: Callable[[], float]) -> None:
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "mtp")})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mtp_backend")
        self._totals = totals
        self._clock = clock
        self._zero = 0  # of the clock, in ns since 1970

    def generated(self, clock: RequestClock, traceparent: str | None, sequence: Sequence, outcome: str) -> None:
        """A request of `generate` has ended.

        Args:
            traceparent: the W3C header of that name, whose span is the parent of this one.
            outcome: its finish reason, or "cancelled" or "error".
        """
        self._set_zero()
        end = clock.last if outcome in ENDED else self._clock()
        speculation = {
            "mtp.num_spec_steps": sequence.counters.num_spec_steps,
            "mtp.num_draft_tokens": sequence.counters.num_draft_tokens,
            "mtp.num_accepted_draft_tokens": sequence.counters.num_accepted_draft_tokens,
        }
        root = self._begin("generate", clock.arrived, _parent(traceparent), SpanKind.SERVER, speculation)
        root.set_attributes(
            {
                "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sequence.num_generated,
                "gen_ai.response.finish_reasons": (outcome,),
                "mtp.num_cached_tokens": sequence.num_cached_tokens,
                "mtp.priority": sequence.priority,
            }
        )
        below = set_span_in_context(root)
        self._phase("queue", clock.arrived, end if clock.started is None else clock.started, below)
        if clock.started is not None:
            first = end if clock.first is None else clock.first
            work = _attributes(clock.work_at_start, clock.work_at_first or Work.of(self._totals))
            self._phase("prefill", clock.started, first, below, work)
        if clock.first is not None:
            work = _attributes(clock.work_at_first, Work.of(self._totals))
            self._phase("decode", clock.first, end, below, work | speculation)
        self._end(root, end, None if outcome in ENDED else outcome)

    def step(self, traceparent: str | None) -> Callable[[Stepped | str], None]:
        """A step of a sequence was asked for. Gives what takes its answer, or the code of the error that ended it."""
        return partial(self._stepped, self._clock(), Work.of(self._totals), traceparent)

    def _stepped(self, asked: float, before: Work, traceparent: str | None, outcome: Stepped | str) -> None:
        self._set_zero()
        span = self._begin("step", asked, _parent(traceparent), SpanKind.SERVER)
        span.set_attributes(_attributes(before, Work.of(self._totals)))
        if isinstance(outcome, Stepped):
            span.set_attributes(
                {
                    "mtp.step": outcome.step,
                    "mtp.num_accepted_draft_tokens": outcome.num_accepted,
                    "gen_ai.usage.output_tokens": len(outcome.token_ids),
                }
            )
        self._end(span, self._clock(), None if isinstance(outcome, Stepped) else outcome)

    def close(self) -> None:
        """Sends what has not been sent, for as long as a collector that does not answer may hold the end up."""
        self._provider.force_flush(FLUSH_MILLISECONDS)

    def _begin(
        self, name: str, start: float, context: Context, kind: SpanKind, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        return self._tracer.start_span(name, context, kind, attributes, start_time=self._nanoseconds(start))

    def _phase(
        self, name: str, start: float, end: float, context: Context, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._end(self._begin(name, start, context, SpanKind.INTERNAL, attributes), end, None)

    def _end(self, span: Span, end: float, failure: str | None) -> None:
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(self._nanoseconds(end))

    def _set_zero(self) -> None:
        """Once for the times of a request, so that its phases meet; the two clocks may drift apart."""
        self._zero = time.time_ns() - int(self._clock() * 1e9)

    def _nanoseconds(self, seconds: float) -> int:
        return self._zero + int(seconds * 1e9)


def _parent(traceparent: str | None) -> Context:
    """The context of a request; an empty one where the header is missing or malformed, as W3C Trace Context says."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent or ""}, Context())


def _attributes(before: Work, after: Work) -> dict[str, Any]:
    """What the engine did between two times."""
    seconds = after.seconds - before.seconds
    return {
        "mtp.num_steps": after.num_steps - before.num_steps,
        "mtp.draft_seconds": seconds.draft,
        "mtp.verify_seconds": seconds.verify,
        "mtp.manage_seconds": seconds.manage,
    }
