"""GPU descriptions: known ones, files, and what is refused."""

import pytest

from jprefill.errors import ConfigError
from jprefill.planner.targets import find_target, target_names


def test_every_named_gpu_has_the_figures_that_a_plan_needs():
    assert target_names() == ["a100-40", "a100-80", "h100", "h200", "l4"]
    figures = {name: find_target(name) for name in target_names()}
    assert {name: target.memory_bytes for name, target in figures.items()} == {
        "a100-40": 42_400_000_000,
        "a100-80": 85_000_000_000,
        "h100": 84_942_979_072,
        "h200": 150_700_000_000,
        "l4": 23_600_000_000,
    }
    assert [figures[name].architecture for name in ("l4", "a100-40", "h100")] == ["sm_89", "sm_80", "sm_90a"]
    assert figures["l4"].usable_bytes == 22_420_000_000
    assert figures["h200"].description == "NVIDIA H200"


def test_a_file_describes_another_gpu(tmp_path):
    path = tmp_path / "mine.txtpb"
    path.write_text(find_target("l4").text.replace("23600000000", "48000000000").replace("NVIDIA L4", "NVIDIA L40S"))
    target = find_target(str(path))
    assert (target.name, target.description, target.memory_bytes) == ("mine", "NVIDIA L40S", 48_000_000_000)


def test_an_unknown_gpu_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"gpu='t4': known are a100-40, .*, l4, or the file of a description"):
        find_target("t4")


@pytest.mark.parametrize("field", ["device_memory_size", "device_description_str", "cuda_compute_capability"])
def test_a_description_without_a_needed_field_is_refused(tmp_path, field):
    path = tmp_path / "mine.txtpb"
    path.write_text(find_target("l4").text.replace(field, "other"))
    with pytest.raises(ConfigError, match=f"gpu='mine': the description has no {field}"):
        find_target(str(path))


def test_a_description_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.txtpb"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a text file"):
        find_target(str(path))
