"""Results as data frames, without pandas as a dependency."""

from collections.abc import Mapping, Sequence
from typing import Any


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` with one row per record.

    Raises:
      ImportError: pandas is not installed; the text says what to install.
    """
    try:
        import pandas as pd  # here: the engine and the server never need it
    except ImportError as error:
        raise ImportError(
            "to_pandas() needs pandas: run `pip install pandas`, or use to_dicts()", name="pandas"
        ) from error
    return pd.DataFrame.from_records(list(rows))
