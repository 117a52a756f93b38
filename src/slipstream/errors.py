"""The exception tree: everything Slipstream raises on purpose, one class per kind of problem a user can fix.

    SlipstreamError
    ├── ConfigError (ValueError)                a configuration field, or two that contradict each other
    ├── WeightError                             a tensor missing, left over, of the wrong shape, or not finite
    ├── InjectionError                          a layer whose fused block does not agree with the original
    ├── UnsupportedError (NotImplementedError)  a request that is understood and cannot be honoured here
    ├── DeviceError (RuntimeError)              a device that is absent, full, or not where the tensors are
    ├── RequestError (ValueError)               an input that cannot be run: empty, out of range, misshapen
    └── TokenLimitError (RuntimeError)          a request for more tokens than `max_out_tokens`

A message names the offending object, its value, the bound and a way to fix it.
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
    """Return the first line of an error's message, and the second too if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    message = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return message or type(error).__name__
