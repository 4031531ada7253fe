import numpy as np
import pytest

from jprefill.errors import InvalidRequestError
from jprefill.tokenization import check_text, check_token_ids


def test_good_ids_become_int32() -> None:
    for ids in (
        [0, 5, 9],
        (0, 5, 9),
        np.array([0, 5, 9]),
        np.array([0, 5, 9], np.uint16),
        [np.int64(0), 5, 9],
    ):
        checked = check_token_ids(ids, 10, "prompt")
        assert checked.dtype == np.int32
        assert checked.tolist() == [0, 5, 9]
    assert check_token_ids([], 10, "prompt").shape == (0,)


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (True, "True"),
        (np.True_, "np.True_"),
        (-1, "-1"),
        (10, "10"),
        (2**31, str(2**31)),
        (2**70, str(2**70)),
        pytest.param(10**5000, "an integer of 16610 bits", id="5000 digits"),
        (1.0, "1.0"),
        (np.float32(1), "np.float32(1.0)"),
        ("1", "'1'"),
        ("x" * 10**6, "'" + "x" * 40 + "'..."),
        (None, "None"),
        ([1], "[1]"),
    ],
)
@pytest.mark.parametrize("index", [0, 2], ids=str)
def test_bad_id_is_named_with_index_and_value(bad: object, shown: str, index: int) -> None:
    ids: list[object] = [1, 2, 3]
    ids[index] = bad
    with pytest.raises(InvalidRequestError) as error:
        check_token_ids(ids, 10, "prompt")
    assert error.value.message == f"prompt[{index}]={shown}: a token id is an integer from 0 to 9"
    assert error.value.param == f"prompt[{index}]"


@pytest.mark.parametrize("array", [np.array([1, 11]), np.array([1.0, 2.0]), np.array([True]), np.zeros((2, 2), int)])
def test_bad_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        check_token_ids(array, 10, "prompt")


def test_text_with_a_lone_surrogate_names_the_field() -> None:
    check_text("fine é 😀", "prompt")
    with pytest.raises(InvalidRequestError, match=r"lone surrogate \\ud83d at character 2") as error:
        check_text("é \ud83d", "prompt")
    assert error.value.param == "prompt"
