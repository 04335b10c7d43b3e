"""The tracer that a configuration asks for."""

from __future__ import annotations

from ..config import TracingConfig
from ..errors import ConfigError
from ..tracing.span import NO_TRACER, Tracer


def open_tracer(config: TracingConfig, role: str, service: str) -> Tracer:
    """One that does nothing without an endpoint. `service`: name of what is served. Raises ConfigError where the extra
    `tracing` is not installed."""
    if not config.endpoint:
        return NO_TRACER
    try:
        from ..tracing.otlp import OtlpTracer
    except ImportError as e:
        raise ConfigError(
            f"--trace-endpoint needs OpenTelemetry, which is not installed ({e}); install isthmus-runtime[tracing]"
        ) from e
    return OtlpTracer(config.endpoint, sampling=config.sampling, role=role, service=service)
