"""Tensors read by a few threads, in order, never far ahead of whoever takes them."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tqdm import tqdm


def read_ahead[T](read: Callable[[str], T], names: Iterable[str]) -> Iterator[tuple[str, T]]:
    """Yields `(name, read(name))` in the order of `names`; at most threads + 1 results are in memory.

    The first error leaves as it came; reads that have not begun are dropped.
    """
    num_threads = min(8, os.cpu_count() or 1)
    pending: collections.deque[tuple[str, Future[T]]] = collections.deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-weights") as pool:
        try:
            for name in names:
                pending.append((name, pool.submit(read, name)))
                if len(pending) > num_threads:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def progress_bar(description: str, num_bytes: int, *, progress: bool) -> tqdm:
    """A byte counter on stderr; silent where stderr is no terminal or `progress` is False."""
    return tqdm(
        desc=description,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if progress else True,  # None: off without a terminal
    )
