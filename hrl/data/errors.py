"""The error of a data set that can't be used."""


class DatasetError(ValueError):
    """A source, a row, or a whole data set can't be used; the message names file, row and the way out."""
