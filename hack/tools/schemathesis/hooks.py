"""Hooks of schemathesis: see schemathesis.toml."""

import schemathesis


@schemathesis.hook
def map_body(context, body):
    """JSON schemas do not distinguish 1 from 1.0; the server reads only the first as an integer."""
    return without_fractions(body)


def without_fractions(value):
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: without_fractions(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_fractions(one) for one in value]
    return value


@schemathesis.serializer("application/vnd.nestor.volume-stream")
def volume_stream(context, value):
    """A body of any bytes: the server refuses what is no stream."""
    return value if isinstance(value, bytes) else repr(value).encode()
