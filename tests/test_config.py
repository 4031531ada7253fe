"""Settings: defaults that fit together, refusals that name key, value and what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jprefill.config import EngineConfig, ServerConfig, default_buckets, from_mapping
from jprefill.errors import ConfigError


def test_buckets_of_the_demo_model():
    assert default_buckets(8192, 256) == (128, 512, 2048, 8192)


def test_the_last_bucket_is_the_limit_in_whole_chunks():
    assert default_buckets(5000, 256) == (128, 512, 2048, 5120)
    assert default_buckets(100, 256) == (128, 256)


@given(st.integers(1, 500_000), st.sampled_from([16, 64, 256, 2048]))
def test_every_length_has_a_bucket_that_its_chunks_fit(max_tokens, chunk_size):
    buckets = default_buckets(max_tokens, chunk_size)
    assert list(buckets) == sorted(set(buckets))
    assert max_tokens <= buckets[-1] < max_tokens + chunk_size
    assert all(bucket % min(bucket, chunk_size) == 0 for bucket in buckets)
    assert len(buckets) <= 8


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (EngineConfig, {"chunk_size": 100}, "chunk_size=100: must be a power of two, at least 16"),
        (EngineConfig, {"max_queued_requests": 0}, "max_queued_requests=0: must be at least 1"),
        (EngineConfig, {"max_len": 5}, "unknown setting 'max_len': known are dtype, quantization"),
        (ServerConfig, {"port": 70000}, "port=70000: must be 0 to 65535"),
        (ServerConfig, {"request_timeout_s": -1.0}, "request_timeout_s=-1.0: must be at least 0"),
    ],
)
def test_a_bad_value_is_refused_by_name(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(kind, values)


def test_keys_are_not_in_the_repr():
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
