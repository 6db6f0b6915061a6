"""Names of cache files: what a person may type, on every system."""

import pytest


@pytest.mark.parametrize("name", ["con", "NUL", "Com1", "lpt9.tckcache", "aux.flux", "nul .x", "prn "])
def test_a_name_of_a_device_of_windows_is_refused(engine, name):
    """A file of that name cannot be opened there, or is lost: what is written to nul is gone without an error."""
    with pytest.raises(engine("errors").InvalidSetting, match="device of Windows"):
        engine("host.nodes.cache_files").plain_name(name)


@pytest.mark.parametrize("name", ["console", "null", "com10", "my nul", "flux.con", "con-1"])
def test_a_name_that_begins_like_a_device_is_a_name(engine, name):
    assert engine("host.nodes.cache_files").plain_name(f" {name}.tckcache") == name
