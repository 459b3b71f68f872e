"""The planted faults still fit the source, and a surviving one would be told."""

from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from tests.mutants.mutants import plant
from tests.mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_fits_in_exactly_one_place(mutant: Mutant) -> None:
    text = (REPOSITORY / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and text.replace(mutant.old, mutant.new) != text
    assert all((REPOSITORY / test.partition("::")[0]).is_file() for test in mutant.tests)


def test_a_fault_that_fits_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="0 places"):
        plant(tmp_path, Mutant("m", "a.py", "y = 1", "y = 2", ()))
