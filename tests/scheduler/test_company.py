"""Companies: sets under keys, with their sizes in a column."""

from hypothesis import given
from hypothesis import strategies as st

from jprefill.scheduler.company import NOBODY, Companies


def test_who_shares_nothing_is_one():
    companies = Companies[str]()
    assert companies.join(None, "a") == NOBODY
    companies.leave(None, "a")
    assert companies.of(None) == set()
    assert companies.sizes[NOBODY] == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 200)), max_size=300))
def test_sizes_are_the_sizes_of_the_sets(steps):
    companies, twin, numbers = Companies[int](), {}, {}
    for joins, group, member in steps:
        key, members = str(group).encode(), twin.setdefault(group, set())
        if joins:
            members.add(member)
            numbers[group] = companies.join(key, member)
        elif member in members:
            members.discard(member)
            companies.leave(key, member)
        here = {group: members for group, members in twin.items() if members}
        assert len(companies) == len(here)
        assert len({numbers[group] for group in here}) == len(here)
        for group, members in here.items():
            assert companies.of(str(group).encode()) == members
            assert companies.sizes[numbers[group]] == len(members)
    assert companies.sizes[NOBODY] == 1


def test_there_is_room_for_many_companies():
    companies = Companies[int]()
    numbers = {companies.join(str(group).encode(), group) for group in range(1_000)}
    assert len(numbers) == 1_000
    assert NOBODY not in numbers
