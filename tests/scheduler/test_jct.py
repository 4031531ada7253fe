"""The job completion model: what it learns, from how little, and what cannot upset it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jprefill.scheduler.features import Features
from jprefill.scheduler.jct import MAX_TRACE, JctModel, Sample

TRUE = (2e-3, 0.3, 6e-8, 1e-9)


def features(rng, restores=True):
    num_new, num_cached = int(10 ** rng.uniform(1, 4)), int(rng.choice([0, 10 ** rng.uniform(2, 4)]))
    area = num_new * (num_cached + (num_new + 1) / 2)
    return Features(math.ceil(num_new / 256) / 1, area, float(rng.choice([0, 10 ** rng.uniform(5, 9)]) * restores))


def seconds(one, scale=1.0):
    a, b, c, d = TRUE
    return scale * (a + b * one.num_chunks + c * one.attention_area + d * one.restore_bytes)


def samples(rng, number, noise=0.0, **kwargs):
    chosen = [features(rng, **kwargs) for _ in range(number)]
    return [Sample(one, seconds(one) * math.exp(noise * rng.standard_normal())) for one in chosen]


def mean_error(model, rng, scale=1.0, number=200):
    unseen = [features(rng) for _ in range(number)]
    return np.mean([abs(model.predict(one) / seconds(one, scale) - 1) for one in unseen])


def fitted(number=40, noise=0.03):
    model, rng = JctModel(), np.random.default_rng(0)
    model.fit(samples(rng, number, noise))
    return model, rng


def test_exact_times_give_the_exact_coefficients():
    model, _ = fitted(noise=0.0)
    assert model.coefficients == pytest.approx(TRUE, rel=1e-6)


def test_relative_errors_stay_small_from_milliseconds_to_minutes():
    model, rng = fitted(noise=0.05)
    assert mean_error(model, rng) < 0.05


def test_a_tenth_of_passes_that_took_ten_times_too_long_is_left_out():
    model, rng = JctModel(), np.random.default_rng(1)
    timed = samples(rng, 60, 0.03)
    for i in range(0, 60, 10):
        timed[i] = Sample(timed[i].features, timed[i].seconds * 10)
    model.fit(timed)
    assert mean_error(model, rng) < 0.1


def test_what_no_sample_shows_keeps_its_default():
    model, default = JctModel(), JctModel().coefficients
    model.fit(samples(np.random.default_rng(2), 30, restores=False))
    assert model.coefficients[3] == default[3]
    assert model.coefficients[:3] == pytest.approx(TRUE[:3], rel=1e-6)


def test_many_prices_at_once_are_the_same_prices():
    model, rng = fitted()
    several = [features(rng) for _ in range(20)]
    columns = [np.array([getattr(one, name) for one in several]) for name in Features.__slots__]
    assert model.predict_all(*columns).tolist() == pytest.approx([model.predict(one) for one in several])


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan]])
def test_a_fit_without_usable_times_is_refused_and_changes_nothing(bad):
    model = JctModel()
    with pytest.raises(ValueError, match=f"fit: {len(bad)} samples; needed is one at least, each with seconds above 0"):
        model.fit([Sample(Features(1.0, 1.0), s) for s in bad])
    assert model.coefficients == JctModel().coefficients


def test_passes_alone_teach_it_without_any_fit():
    model, rng = JctModel(), np.random.default_rng(3)
    for one, time_s in samples(rng, 300, 0.05):
        model.observe(one, time_s)
    assert mean_error(model, rng) < 0.1


@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_a_device_that_became_faster_or_slower_is_followed(scale):
    model, rng = fitted()
    for one, time_s in samples(rng, 200, 0.05):
        model.observe(one, time_s * scale)
    assert mean_error(model, rng, scale) < 0.1


def test_one_pass_that_hung_moves_little():
    model, rng = fitted()
    before = mean_error(model, rng)
    model.observe(Features(4.0, 5e5), 3600.0)
    assert mean_error(model, rng) < before + 0.05


def test_thousands_of_equal_passes_do_not_make_it_jumpy():
    model, rng = fitted()
    one = Features(1.0, 3e4)
    for _ in range(5000):
        model.observe(one, seconds(one) * math.exp(0.02 * rng.standard_normal()))
    model.observe(Features(40.0, 5e7), 10 * seconds(Features(40.0, 5e7)))
    assert model.predict(one) == pytest.approx(seconds(one), rel=0.1)
    assert mean_error(model, rng) < 0.6


@given(st.lists(st.tuples(*[st.floats(0, 1e12)] * 3, st.floats(0) | st.just(math.nan)), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_is_observed_more_work_never_costs_less(observed):
    model, _ = fitted()
    for chunks, area, num_bytes, time_s in observed:
        model.observe(Features(chunks, area, num_bytes), time_s)
        assert all(0 <= c < math.inf for c in model.coefficients)
        assert np.trace(model._covariance) <= MAX_TRACE * (1 + 1e-9)
        assert (np.diagonal(model._covariance) >= 0).all()
    assert 0 < model.predict(Features(1.0, 1.0)) < math.inf


@given(st.lists(st.tuples(*[st.floats(0, 1e12)] * 3, st.floats(1e-6, 1e4)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_whatever_is_fitted_no_coefficient_is_negative(timed):
    model = JctModel()
    model.fit([Sample(Features(*row[:3]), row[3]) for row in timed])
    assert all(0 <= c < math.inf for c in model.coefficients)


# ---- on disk -----------------------------------------------------------------------------------------------


def test_a_saved_model_predicts_and_learns_on_as_before(tmp_path):
    model, rng = fitted()
    path = tmp_path / "new" / "jct.json"
    model.save(path, "model on device")
    again = JctModel.load(path, "model on device")
    for one, time_s in samples(rng, 5, 0.1):
        model.observe(one, time_s)
        again.observe(one, time_s)
    assert again.coefficients == pytest.approx(model.coefficients)
    assert [p.name for p in path.parent.iterdir()] == ["jct.json"]


def test_another_device_and_a_missing_file_give_nothing(tmp_path):
    fitted()[0].save(tmp_path / "jct.json", "here")
    assert JctModel.load(tmp_path / "jct.json", "there") is None
    assert JctModel.load(tmp_path / "none.json", "here") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("coefficients", [1, 2, 3]),
        ("coefficients", [1, 2, 3, -4]),
        ("scales", [1, 2, 3, math.nan]),
        ("covariance", "much"),
        ("covariance", np.diag([1, 1, 1, -1]).tolist()),
    ],
)
def test_a_damaged_file_is_left_out_with_a_warning(tmp_path, caplog, key, value):
    path = tmp_path / "jct.json"
    fitted()[0].save(path, "here")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert JctModel.load(path, "here") is None
    assert "jct.json cannot be used and is left out" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\xff"])
def test_a_file_that_is_no_model_is_left_out(tmp_path, text):
    path = tmp_path / "jct.json"
    path.write_bytes(text.encode("latin-1"))
    assert JctModel.load(path, "here") is None
