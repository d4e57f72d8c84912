"""Where on this machine results are kept between runs."""

from __future__ import annotations

import os
import pathlib

FOLDER_VARIABLE = "AUTOFIT_CACHE"
"""Names another folder; an empty text keeps nothing."""


def cache_folder() -> pathlib.Path | None:
    """``$AUTOFIT_CACHE``, else ``$XDG_CACHE_HOME/autofit`` on Linux and its like elsewhere; None to keep nothing."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return pathlib.Path(named) if named else None
    import platformdirs

    return platformdirs.user_cache_path("autofit", appauthor=False)
