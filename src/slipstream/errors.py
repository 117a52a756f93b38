"""The exception tree: everything Slipstream raises on purpose, one class per thing a user can mend.

    SlipstreamError
    ├── ConfigError (ValueError)                a configuration field, or two that contradict each other
    ├── WeightError                             a tensor missing, left over, of the wrong shape, or not finite
    ├── InjectionError                          a layer whose fused block does not agree with the original
    ├── UnsupportedError (NotImplementedError)  a request that is understood and cannot be honoured here
    ├── DeviceError (RuntimeError)              a device that is absent, full, or not where the tensors are
    ├── RequestError (ValueError)               an input that cannot be run: empty, out of range, misshapen
    └── TokenLimitError (RuntimeError)          a request for more tokens than `max_out_tokens`

A message has the thing, the value, the bound and the way out.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DeviceError",
    "InjectionError",
    "RequestError",
    "SlipstreamError",
    "TokenLimitError",
    "UnsupportedError",
    "WeightError",
    "one_line",
]


class SlipstreamError(Exception):
    """Root of every error that Slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """A configuration field has a wrong type or value, or contradicts another."""


class WeightError(SlipstreamError):
    """A weight is missing, left over, of the wrong shape, or holds NaN or infinity."""


class InjectionError(SlipstreamError):
    """A fused block does not agree with the layer it replaces, or cannot be built from it."""


class UnsupportedError(SlipstreamError, NotImplementedError):
    """The request is understood but cannot be honoured by this engine on this machine."""


class DeviceError(SlipstreamError, RuntimeError):
    """A device is absent, out of memory, or not where the tensors are."""


class RequestError(SlipstreamError, ValueError):
    """An input that cannot be run: empty, out of the vocabulary, or of the wrong shape."""


class TokenLimitError(SlipstreamError, RuntimeError):
    """A request needs more tokens than `max_out_tokens` allows, or fewer than `min_out_tokens` fit."""


def one_line(error: BaseException) -> str:
    """What another library's error says: its first line, with the second where that only leads up to it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return said or type(error).__name__
