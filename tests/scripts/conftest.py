"""Scripts are no package: their folder is searched as it is when one of them runs."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
