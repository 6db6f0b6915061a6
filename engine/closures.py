"""What the closure of a function holds."""

from __future__ import annotations

import types


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable has been set."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def contents_of(function: types.FunctionType) -> list[object]:
    """The values of the variables that have been set."""
    return [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
