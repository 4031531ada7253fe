import math

import pytest

from jprefill.errors import EngineError, InvalidRequestError
from jprefill.tasks.probabilities import check_temperature, label_mass, softmax


def test_softmax_is_over_the_labels_alone():
    assert softmax([math.log(0.3), math.log(0.1)]) == pytest.approx((0.75, 0.25), abs=1e-15)


def test_softmax_of_tiny_probabilities_does_not_underflow():
    assert softmax([-1000.0, -1000.0 + math.log(3)]) == pytest.approx((0.25, 0.75), abs=1e-12)


def test_temperature_sharpens_or_flattens():
    assert softmax([0.0, -2.0], 0.5) == pytest.approx(softmax([0.0, -4.0]))


def test_a_label_that_is_impossible_gets_zero():
    assert softmax([-math.inf, -1.0]) == (0.0, 1.0)


@pytest.mark.parametrize("logprobs", [[math.nan, -1.0], [-1.0, math.nan], [-math.inf, -math.inf]])
def test_no_finite_value_is_an_engine_error_not_a_nan_answer(logprobs):
    with pytest.raises(EngineError, match="no finite log-probability"):
        softmax(logprobs)


def test_label_mass_never_passes_one():
    assert label_mass([math.log(0.25), math.log(0.5)]) == pytest.approx(0.75)
    assert label_mass([0.0, -20.0]) == 1.0


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "1", None])
def test_temperature_must_be_a_finite_number_above_zero(value):
    with pytest.raises(InvalidRequestError, match="must be a finite number above 0") as caught:
        check_temperature(value)
    assert caught.value.param == "temperature"
