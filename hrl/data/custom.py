"""A data set class of the user's own, named by file and class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hrl.data.files import DatasetError
from hrl.data.user_file import UserFileError, load_user_file

if TYPE_CHECKING:
    from hrl.data.dataset import RLHFDataset


def dataset_class(custom_cls: Any) -> type[RLHFDataset]:
    """`RLHFDataset`, or the subclass that `data.custom_cls.{path,name}` names.

    Args:
        custom_cls: Has `path` (a Python file or `None`) and `name`.

    Raises:
        DatasetError: There is no such file or class, or it is no `RLHFDataset`.
    """
    from hrl.data.dataset import RLHFDataset

    if custom_cls.path is None:
        return RLHFDataset
    try:
        module = load_user_file(custom_cls.path)
    except UserFileError as error:
        raise DatasetError(f"data.custom_cls.path: {error}") from error
    except Exception as error:  # the user's own code, which may raise anything
        raise DatasetError(f"data.custom_cls.path: {custom_cls.path} raises {type(error).__name__}: {error}") from error
    found = getattr(module, custom_cls.name, None)
    if not (isinstance(found, type) and issubclass(found, RLHFDataset)):
        raise DatasetError(
            f"{module.__file__} defines no subclass of hrl.data.dataset.RLHFDataset named {custom_cls.name!r}"
        )
    return found
