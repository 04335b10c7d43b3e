"""Traces of requests through router, prefill, decode and transfer; off unless an endpoint is given (docs/tracing.md).

`span` is what other parts know: a span may be one that does nothing. `otlp` makes real ones, and alone imports
OpenTelemetry. `commands` joins the two.
"""
